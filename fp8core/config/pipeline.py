"""The declaration of one iteration: steps, what each needs and what each provides.

An artifact has one name and one producer in an iteration. `needs` and `provides` map a step's ports to
artifact names; a port that is not mentioned has the artifact of its own name.
"""

from typing import Any

from pydantic import Field

from fp8core.config.section import Section


class StepConfig(Section):
    """One step of the iteration."""

    name: str = Field(min_length=1, max_length=60, pattern=r"^[a-z][a-z0-9_]*$")
    uses: str = Field(
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", description="Import path of the step: `tasks.rollout:rollout`."
    )
    needs: dict[str, str] | list[str] = Field(
        default_factory=list, description="Input ports: a list of artifact names, or port -> artifact."
    )
    provides: dict[str, str] = Field(default_factory=dict, description="Output port -> artifact, to rename an output.")
    options: dict[str, Any] = Field(default_factory=dict, alias="with", description="Options of this step.")

    def inputs(self) -> dict[str, str]:
        """Input ports and the artifacts they read."""
        return dict(self.needs) if isinstance(self.needs, dict) else {name: name for name in self.needs}


class PipelineConfig(Section):
    """The steps of one iteration, and what one iteration hands to the next."""

    steps: list[StepConfig] = Field(min_length=1)
    carries: dict[str, str] = Field(
        default_factory=lambda: {"policy": "next_policy", "scales": "next_scales"},
        description="Artifact at the start of an iteration -> artifact that replaces it at the end.",
    )
