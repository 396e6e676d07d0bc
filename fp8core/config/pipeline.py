"""The section `pipeline`: the steps of one iteration by import path, what each reads and stores, and their mode.

A port that `needs` or `provides` does not mention has the artifact of its own name. An input that may be missing
(`StepSpec.optional_inputs`) is connected where there is such an artifact.
"""

from typing import Any, Literal

from pydantic import Field, model_validator

from fp8core.config.section import Section
from fp8core.config.steps import Feature


class StepConfig(Section):
    name: str = Field(min_length=1, max_length=60, pattern=r"^[a-z][a-z0-9_]*$", description="Name of the step.")
    uses: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", description="Import path: `tasks.rollout:rollout`.")
    needs: dict[str, str | None] | list[str] = Field(
        default_factory=list, description="Artifacts, or port -> artifact; null leaves an optional port unconnected."
    )
    provides: dict[str, str] = Field(default_factory=dict, description="Output port -> artifact, to rename an output.")
    options: dict[str, Any] = Field(default_factory=dict, alias="with", description="Options of this step.")
    when: Feature | None = Field(
        None,
        description="Only in configurations with this feature; null: always. `by_use`, else `by_step`: "
        "docs/concepts/iteration.md#prompts-by-use.",
    )

    def inputs(self) -> dict[str, str | None]:
        return dict(self.needs) if isinstance(self.needs, dict) else {name: name for name in self.needs}


class PipelineConfig(Section):
    """The steps of one iteration, what one iteration hands to the next, and whether generation waits for the update."""

    mode: Literal["synchronous", "one_step_off", "asynchronous"] = Field(
        "synchronous", description="What is generated beside the update (docs/guides/asynchronous.md)."
    )
    max_staleness: int = Field(1, ge=0, le=100, description="Versions that a token may lag behind its learner.")
    ahead_tokens: int | None = Field(
        None,
        ge=0,
        le=1 << 20,
        description="`asynchronous`: tokens in a row beside an update; 0: none; null: until the update has ended.",
    )
    chunk_tokens: int = Field(32, ge=1, le=1 << 20, description="Tokens that are written before more prompts enter.")
    max_inflight_prompts: int | None = Field(None, ge=1, le=1 << 20, description="Prompts in flight; null: no limit.")
    verified_share: float = Field(0.0625, gt=0, le=1, description="Share of completions that are scored anew.")
    steps: list[StepConfig] = Field(
        min_length=1, description="Steps of an iteration, each as `pipeline.insert.step`; or changes of steps by name."
    )
    carries: dict[str, str] = Field(
        default_factory=lambda: {"policy": "next_policy", "scales": "next_scales"},
        description="Artifact at the start -> artifact that replaces it at the end.",
    )

    @model_validator(mode="after")
    def _mode_follows(self) -> "PipelineConfig":
        asynchronous_alone = {
            f"ahead_tokens={self.ahead_tokens}": self.ahead_tokens is not None,
            f"max_staleness={self.max_staleness}": self.max_staleness > 1,
        }
        for setting in (setting for setting, is_set in asynchronous_alone.items() if is_set):
            if self.mode != "asynchronous":
                raise ValueError(f"{setting} needs mode=asynchronous, not {self.mode}")
        return self

    @property
    def in_turn(self) -> bool:
        return self.mode == "synchronous" or self.ahead_tokens == 0

    @property
    def kept_policies(self) -> int:
        """Policies that are kept to score the tokens that they wrote."""
        return 0 if self.mode == "synchronous" else self.max_staleness + 2

    @property
    def reach(self) -> int:
        """Updates before the newest policy from which a resumed run may need a policy to score tokens with."""
        return max(0, self.kept_policies - 1)
