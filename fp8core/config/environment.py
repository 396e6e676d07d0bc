"""Settings of an environment: what answers a policy that calls tools and speaks in turns, and the bounds of that."""

from typing import Literal

from pydantic import Field, JsonValue, field_validator

from fp8core.config.section import Section, UserSource, check_choice, name_pattern
from fp8core.config.shipped import SHIPPED_ENVIRONMENTS

PYTHON_DEFAULTS = {"seconds": 3, "memory_mb": 512}
"""Of `environments.shipped.Python`."""


class EnvironmentConfig(Section):
    """Episodes of several turns; each is one completion, and each has a process of its own."""

    name: UserSource = Field(
        description="calculator, guess, python, or a class of your own: `module:Class` or `path/to/file.py:Class` "
        "(docs/guides/environments.md).",
        json_schema_extra={"pattern": name_pattern(SHIPPED_ENVIRONMENTS)},
    )
    options: dict[str, JsonValue] = Field(default_factory=dict, description="Keyword arguments of the class.")
    max_turns: int = Field(8, ge=1, le=4096, description="Of the policy; what then has no outcome is `unparsed`.")
    turn_tokens: int | None = Field(
        None,
        ge=1,
        le=1 << 20,
        description="That the policy may write in a turn; null: what is left of rollout.max_new_tokens, the budget of "
        "all turns and observations.",
    )
    observation_tokens: int | None = Field(
        None, ge=1, le=1 << 20, description="Of an observation; a longer one ends the episode. null: what is left."
    )
    format: Literal["auto", "qwen", "llama3", "plain"] = Field(
        "auto", description="How a tool call is written; auto: as the model's chat template writes it, else plain."
    )
    advantage: Literal["episode", "turn"] = Field(
        "episode",
        description="`turn`: a turn's tokens learn from the rewards of this turn and later ones, compared with the "
        "same turn of the prompt's other episodes.",
    )
    failed: Literal["leave_out", "count"] = Field(
        "leave_out",
        description="Of episodes that end as timeout or crashed: leave them out of the loss and of the baseline of "
        "their group, or count the reward that they have until then. Count them where the policy shall learn to keep "
        "the limits.",
    )
    timeout_seconds: float = Field(10.0, gt=0, le=3600, description="Longest wait for one answer of an environment.")
    cpu_seconds: float = Field(5.0, gt=0, le=3600, description="Processor time of one answer.")
    memory_mb: int = Field(
        1024, ge=16, le=1 << 20, description="Memory (MiB) of an episode, beyond what the loaded environment takes."
    )
    output_kb: int = Field(1024, ge=1, le=1 << 20, description="KiB of one answer.")
    processes: int = Field(32, ge=1, le=4096, description="That an episode may start.")
    at_once: int = Field(64, ge=1, le=4096, description="Episodes that have a process at the same time; others wait.")

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        return check_choice(name, SHIPPED_ENVIRONMENTS, "Class")

    def unmeant(self) -> dict[str, str]:
        """Limits of the python tool that those of its episode do not hold, by their keys."""
        if self.name != "python":
            return {}
        asked = {**PYTHON_DEFAULTS, **self.options}
        keys = {
            name: f"environment.options.{name}" if name in self.options else of_episode
            for name, of_episode in (("seconds", "environment.timeout_seconds"), ("memory_mb", "environment.memory_mb"))
        }
        # The tool itself refuses other types.
        seconds, memory = (value if isinstance(value, int | float) else 0 for value in map(asked.get, PYTHON_DEFAULTS))
        found = {}
        if memory > self.memory_mb:
            found[keys["memory_mb"]] = (
                f"options.memory_mb={memory} of the tool is more than environment.memory_mb={self.memory_mb} of its "
                "episode, so that every call would fail; set the first lower, or the second higher"
            )
        if 2 * seconds >= self.timeout_seconds:
            found[keys["seconds"]] = (
                f"a call may take {2 * seconds} s, twice options.seconds={seconds}, and "
                f"environment.timeout_seconds={self.timeout_seconds:g} ends the episode first; set options.seconds "
                "lower, or the other higher"
            )
        return found
