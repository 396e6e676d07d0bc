"""Declaration of a function as a step of the iteration.

    @step(inputs={"rollouts": "rollouts"}, outputs={"rewards": "rewards"})
    def reward(run: RunContext, index: int, options: NoOptions, rollouts: Ref) -> dict[str, Ref]: ...

A step gets the live run, the index of the iteration, its validated options and one reference per connected input
port. It returns one reference per output port. It is a function of its inputs, its options, the run's configuration
and its code; the executor relies on that.
"""

from collections.abc import Callable, Mapping
from inspect import signature

from pydantic import BaseModel

from fp8core.config.steps import NoOptions, Step, StepSpec
from fp8core.store.artifacts import Ref

StepFunction = Callable[..., dict[str, Ref]]


def step(
    *,
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    optional_inputs: Mapping[str, str] | None = None,
    options: type[BaseModel] = NoOptions,
    redo: bool = False,
) -> Callable[[StepFunction], Step]:
    """Declare a step: ports and the kinds of artifact they carry.

    Args:
        inputs: port -> kind, all of which a pipeline must connect.
        outputs: port -> kind.
        optional_inputs: port -> kind, which a pipeline may connect.
        options: model of the step's `with`.
        redo: the step changes the live trainer, so a restored run executes it again from its stored inputs.

    Raises TypeError: the function takes other arguments.
    """

    def declare(function: StepFunction) -> Step:
        takes = signature(function)
        for ports in (inputs, {**inputs, **(optional_inputs or {})}):
            try:
                takes.bind(None, 0, None, **dict.fromkeys(ports))
            except TypeError as error:
                wanted = ", ".join(["run", "index", "options", *ports])
                raise TypeError(f"step {function.__name__} is called with {wanted}: {error}") from None
        function.spec = StepSpec(  # type: ignore[attr-defined]
            name=function.__name__,
            inputs=dict(inputs),
            outputs=dict(outputs),
            optional_inputs=dict(optional_inputs or {}),
            options=options,
            redo=redo,
        )
        return function  # type: ignore[return-value]

    return declare
