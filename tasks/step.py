"""Declaration of a function as a step of the iteration.

    @step(inputs={"rollouts": "rollouts"}, outputs={"rewards": "rewards"})
    def reward(run: StepContext, index: int, options: NoOptions, rollouts: Ref) -> dict[str, Ref]: ...

A step is a function of its inputs, its options, the run's configuration and its code.
"""

from collections.abc import Callable, Mapping

from pydantic import BaseModel

from fp8core.config.steps import Feature, NoOptions, Step, StepSpec
from fp8core.store.artifacts import Ref

StepFunction = Callable[..., dict[str, Ref]]


def step(
    *,
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    optional_inputs: Mapping[str, str] | None = None,
    options: type[BaseModel] = NoOptions,
    redo: bool = False,
    inputs_where: Mapping[Feature, Mapping[str, str]] | None = None,
    outputs_where: Mapping[Feature, Mapping[str, str]] | None = None,
    carries: Mapping[str, str] | None = None,
) -> Callable[[StepFunction], Step]:
    """Declare a step: port -> kind of artifact; the other arguments are those of `StepSpec`."""

    def declare(function: StepFunction) -> Step:
        function.spec = StepSpec(  # type: ignore[attr-defined]
            name=function.__name__,
            inputs=dict(inputs),
            outputs=dict(outputs),
            optional_inputs=dict(optional_inputs or {}),
            options=options,
            redo=redo,
            inputs_where=dict(inputs_where or {}),
            outputs_where=dict(outputs_where or {}),
            carries=dict(carries or {}),
        )
        return function  # type: ignore[return-value]

    return declare
