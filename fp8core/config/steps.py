"""The declaration of a step: any callable with an attribute `spec`, found by its import path (`uses`)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel

from fp8core.config.section import Section
from fp8core.errors import UserError
from fp8core.user_code import import_attribute


class NoOptions(Section):
    """The options of a step, or of a loss, that has none."""


@dataclass(frozen=True)
class StepSpec:
    """`inputs`, `outputs` and `optional_inputs` map a port to the kind of its artifact.

    A pipeline must connect every port of `inputs`. `options` is the model of `with`. A step with `redo` changes the
    live trainer: a restored run executes it again from its stored inputs and compares.
    """

    name: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    optional_inputs: Mapping[str, str] = field(default_factory=dict)
    options: type[BaseModel] = NoOptions
    redo: bool = False

    def __post_init__(self) -> None:
        both = self.inputs.keys() & self.optional_inputs.keys()
        assert not both, f"step {self.name}: ports both required and optional: {sorted(both)}"

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
