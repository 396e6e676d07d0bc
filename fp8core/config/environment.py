"""Settings of an environment: what answers a policy that calls tools and speaks in turns, and the bounds of that."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from fp8core.config.section import Section, UserSource, choice_of
from fp8core.config.shipped import SHIPPED_ENVIRONMENTS


class EnvironmentConfig(Section):
    """Episodes of several turns; each is one completion, and each has a process of its own."""

    name: Annotated[UserSource, choice_of(SHIPPED_ENVIRONMENTS, "Class")] = Field(
        description="calculator, python, or your class: `module:Class` or `path/to/file.py:Class`."
    )
    options: dict[str, JsonValue] = Field(default_factory=dict, description="Keyword arguments of the class.")
    max_turns: int = Field(8, ge=1, le=4096, description="Of the policy; what then has no outcome is `unparsed`.")
    turn_tokens: int | None = Field(None, ge=1, le=1 << 20, description="Longest turn; null: what is left of the row.")
    observation_tokens: int | None = Field(
        None, ge=1, le=1 << 20, description="Longest observation; one beyond ends the episode."
    )
    format: Literal["auto", "qwen", "plain"] = Field(
        "auto", description="How a tool call is written; auto: as in the model's chat template, else plain."
    )
    failed: Literal["leave_out", "count"] = Field(
        "leave_out", description="Episodes that time out or crash: leave out of loss and baseline, or count the reward."
    )
    timeout_seconds: float = Field(10.0, gt=0, le=3600, description="Longest wait for one answer of an environment.")
    memory_mb: int = Field(1024, ge=16, le=1 << 20, description="MiB of an episode, beyond the loaded environment.")
    max_concurrent_episodes: int = Field(
        64, ge=1, le=512, description="Episodes that have a process at the same time; others wait."
    )
