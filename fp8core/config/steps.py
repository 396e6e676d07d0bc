"""The declaration of a step: any callable with an attribute `spec`, found by its import path (`uses`)."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from pydantic import BaseModel

from fp8core.config.section import Section
from fp8core.errors import UserError
from fp8core.user_code import import_attribute


class NoOptions(Section):
    """The options of a step, or of a loss, that has none."""


Feature = Literal[
    "environment",
    "synchronous",
    "ahead",
    "prompts_first",
    "by_step",
    "by_use",
    "refill",
    "scoring_pass",
    "scoring_update",
    "judge",
    "mixed_reference",
    "judge_by_use",
]
"""What a configuration has (`RunConfig.features`), as far as steps and their ports depend on it."""


@dataclass(frozen=True)
class StepSpec:
    """`inputs`, `outputs` and `optional_inputs` map a port to the kind of its artifact.

    A pipeline must connect every port of `inputs`. A port of `optional_inputs` is connected where an artifact of its
    name and kind exists. `options` is the model of `with`. A step with `redo` changes the live trainer: a restored run
    executes it again from its stored inputs and compares.

    Attributes:
        inputs_where, outputs_where: feature -> further ports, of configurations that have the feature. Such an input
            is required, and reads the artifact of its own name where `needs` names no other one.
        carries: artifact of the next iteration -> the output port that becomes it, where there is this port.
    """

    name: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    optional_inputs: Mapping[str, str] = field(default_factory=dict)
    options: type[BaseModel] = NoOptions
    redo: bool = False
    inputs_where: Mapping[Feature, Mapping[str, str]] = field(default_factory=dict)
    outputs_where: Mapping[Feature, Mapping[str, str]] = field(default_factory=dict)
    carries: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        both = self.inputs.keys() & self.optional_inputs.keys()
        assert not both, f"step {self.name}: ports both required and optional: {sorted(both)}"

    def under(self, features: Collection[Feature]) -> "StepSpec":
        """The step of a configuration that has these features."""
        inputs, outputs = (
            {**ports, **{port: kind for one, more in where.items() if one in features for port, kind in more.items()}}
            for ports, where in ((self.inputs, self.inputs_where), (self.outputs, self.outputs_where))
        )
        carries = {artifact: port for artifact, port in self.carries.items() if port in outputs}
        return replace(self, inputs=inputs, outputs=outputs, inputs_where={}, outputs_where={}, carries=carries)

    @property
    def input_kinds(self) -> dict[str, str]:
        return {**self.inputs, **self.optional_inputs}


class Step(Protocol):
    @property
    def spec(self) -> StepSpec: ...

    __call__: Callable[..., Any]


def import_step(uses: str) -> Step:
    step: Step = import_attribute(uses, f"uses {uses}")
    if not isinstance(getattr(step, "spec", None), StepSpec):
        raise UserError(
            f"uses {uses}: {uses.partition(':')[2]} is not a step: it has no attribute `spec` of type StepSpec"
        )
    return step


def import_spec(uses: str) -> StepSpec:
    return import_step(uses).spec
