"""Declaration of a function as a step of the iteration.

    @step(inputs={"rollouts": "rollouts"}, outputs={"rewards": "rewards"})
    def reward(run: StepContext, index: int, options: NoOptions, rollouts: Ref) -> dict[str, Ref]: ...

A step is a function of its inputs, its options, the run's configuration and its code.
"""

from collections.abc import Callable, Mapping
from typing import Any

from fp8core.config.steps import Step, StepSpec
from fp8core.store.artifacts import Ref

StepFunction = Callable[..., dict[str, Ref]]


def step(*, inputs: Mapping[str, str], outputs: Mapping[str, str], **others: Any) -> Callable[[StepFunction], Step]:
    """Declare a step: port -> kind of artifact; the other arguments are those of `StepSpec`."""

    def declare(function: StepFunction) -> Step:
        function.spec = StepSpec(function.__name__, dict(inputs), dict(outputs), **others)  # type: ignore[attr-defined]
        return function  # type: ignore[return-value]

    return declare
