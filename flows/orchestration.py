"""A training's parts as Prefect tasks, and the states of flows that failed or came to no answer."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.futures import wait
from prefect.states import Cancelled, Completed, Failed
from prefect.utilities.annotations import quote

from fp8core.config.steps import Plan, PlannedStep
from fp8core.errors import printable_lines
from fp8core.run.context import RunContext, live_run
from fp8core.run.execute import TaskResult, run_step
from fp8core.run.loop import Execution
from fp8core.store.artifacts import Ref

T = TypeVar("T")


def as_task(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Make a Prefect task of a function of (folder, index, ...).

    The ledger persists and caches; Prefect does neither, so that there is one record of what is done.
    """
    return task(name=name, task_run_name=f"{name}-{{index}}", persist_result=False, cache_policy=NO_CACHE)


class PrefectExecution(Execution):
    """Every part of a training as a Prefect task; steps of an iteration run as soon as their inputs exist."""

    def __init__(self, plan: Plan) -> None:
        self._steps = {planned.name: _prefect_step(planned) for planned in plan.steps}
        self._calls: dict[str, Any] = {}

    def call(self, run: RunContext, name: str, index: int, body: Callable[[], T]) -> T:
        if name not in self._calls:
            self._calls[name] = as_task(name)(_call)
        # Quoted: Prefect need not look for futures in it.
        result: T = self._calls[name](folder=run.directory.path, index=index, body=quote(body))
        return result

    def steps(self, run: RunContext, index: int, inputs: Mapping[str, Ref]) -> dict[str, TaskResult]:
        """Of steps that are ready together the last is called in this thread: a call costs less than a submission."""
        artifacts, results = dict(inputs), dict[str, TaskResult]()
        while ready := run.plan.ready(set(results)):
            calls = [
                partial(
                    self._steps[planned.name],
                    folder=run.directory.path,
                    index=index,
                    inputs=quote({port: artifacts[artifact] for port, artifact in planned.inputs.items()}),
                )
                for planned in ready
            ]
            for planned, result in zip(ready, side_by_side(calls), strict=True):
                results[planned.name] = result
                artifacts |= result.entry.outputs
        assert len(results) == len(run.plan.steps), "a checked plan runs to its end"
        return results


def side_by_side(calls: Sequence[partial[Any]]) -> list[TaskResult]:
    """Results of Prefect tasks that run at once; what one of them raises is raised when all have ended."""
    *others, own = calls
    futures = [other.func.submit(**other.keywords) for other in others]
    try:
        result = own()
    finally:
        wait(futures)
    return [*(future.result() for future in futures), _value(result)]


def _value(result: TaskResult | State[TaskResult]) -> TaskResult:
    """Result of a called task, whose body may return the state it ends in.

    A state's own `result()` waits for another thread, which costs as much as half of a call.
    """
    return result.result() if isinstance(result, State) else result


def _prefect_step(planned: PlannedStep) -> Any:
    @as_task(planned.name)
    def body(folder: Path, index: int, inputs: dict[str, Ref]) -> Any:
        result = run_step(live_run(folder), index, planned, inputs)
        # Shown as cached, so that a user sees what a resumed run did not repeat.
        return Completed(name="Cached", data=result) if result.reused else result

    return body


def _call(folder: Path, index: int, body: Callable[[], Any]) -> Any:
    live_run(folder)  # Torch's thread count belongs to a thread.
    return body()


def show_logs_escaped() -> None:
    """Let Prefect's logs, on terminals and on its server, hold texts of others escaped; tracebacks quote them."""
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_escaped)


def _escaped(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable_lines(record.getMessage()), None
    if record.exc_info:
        # A formatter takes a text that is there already.
        record.exc_text = printable_lines(logging.Formatter().formatException(record.exc_info))
    return True


def failed(reason: str, cause: BaseException | None = None) -> State[Any]:
    """The state of a flow run that failed for `reason`; `cause` is for callers that read the state's result."""
    shown = printable_lines(reason)
    get_run_logger().error(shown)
    return Failed(message=shown, data=cause)


def unanswered(name: str, reason: str) -> State[Any]:
    """The state of a flow run that did its work and has no answer for `reason`; the UI shows it by `name`.

    Prefect has no colour for this: Completed is green and Failed red whatever their names. Cancelled is final, grey,
    and no success to `--watch`, to automations or to callers that read the state's result.
    """
    shown = printable_lines(reason)
    get_run_logger().warning(shown)
    return Cancelled(name=name, message=shown)
