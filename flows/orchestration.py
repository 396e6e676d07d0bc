"""A training as Prefect tasks, its log lines, and the states of flows without a result."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO, TypeVar

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.exceptions import CancelledRun, FailedRun
from prefect.futures import PrefectFuture, as_completed, wait
from prefect.logging.handlers import PrefectConsoleHandler
from prefect.states import Cancelled, Completed, Failed
from prefect.utilities.annotations import quote
from rich.text import Text

from flows.training_pages import TrainingPages
from fp8core.config.step_graph import PlannedStep, StepGraph
from fp8core.errors import printable_lines
from fp8core.run.context import RunContext, live_run
from fp8core.run.execute import TaskResult, run_step
from fp8core.run.loop import Execution
from fp8core.store.artifacts import Ref

T = TypeVar("T")
# Attribute of log records whose text this process prints by itself.
_PRINTED = "fp8_grpo_printed"


def as_task(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Make a Prefect task of a function of (folder, index, ...).

    The ledger persists and caches; Prefect does neither, so that there is one record of what is done.
    """
    return task(name=name, task_run_name=f"{name}-{{index}}", persist_result=False, cache_policy=NO_CACHE)


class PrefectExecution(Execution):
    """Every part of a training as a Prefect task; steps of an iteration run as soon as their inputs exist."""

    def __init__(self, graph: StepGraph, pages: TrainingPages) -> None:
        self._steps = {planned.name: _prefect_step(planned) for planned in graph.steps}
        self._producers = {planned.name: _producers(graph, planned) for planned in graph.steps}
        self._pages = pages
        self._calls: dict[str, Any] = {}
        self._last: list[State[Any]] = []

    def begin_step(self, index: int) -> None:
        self._pages.begin_step(index, self._last)
        self._last = []

    def end_step(self) -> None:
        self._pages.end_step(Completed())

    def call(self, run: RunContext, name: str, index: int, body: Callable[[], T]) -> T:
        """It comes after what came before it in its flow run."""
        if name not in self._calls:
            self._calls[name] = as_task(name)(_run_body)
        with self._pages.place():
            # Quoted: Prefect need not look for futures in it.
            state = self._calls[name](
                run.directory.path, index, quote(body), wait_for=self._last or None, return_state=True
            )
        result: T = state.result()
        self._last = [state]
        return result

    def steps(self, run: RunContext, index: int, inputs: Mapping[str, Ref]) -> dict[str, TaskResult]:
        """Each step begins when the steps whose artifacts it reads have ended, whatever else is under way.

        An update of the live trainer runs in this thread. So does the first of those that may begin where none is under
        way: a call costs less than a submission. Where one fails, its error is raised when all have ended.
        """
        artifacts, results = dict(inputs), dict[str, TaskResult]()
        states, under_way = dict[str, State[Any]](), dict[PrefectFuture[Any], str]()

        def arguments(planned: PlannedStep) -> tuple[tuple[Any, ...], dict[str, Any]]:
            ports = {port: artifacts[artifact] for port, artifact in planned.inputs.items()}
            after = [states[producer] for producer in sorted(self._producers[planned.name])]
            return (run.directory.path, index, quote(ports)), {"wait_for": after or None}

        run.halted.clear()
        try:
            with self._pages.place():
                while len(results) < len(run.graph.steps):
                    waiting = [each for each in run.graph.ready({*results}) if each.name not in under_way.values()]
                    updates = [each for each in waiting if each.spec.redo]
                    own = next(iter(updates or ([] if under_way else waiting)), None)
                    for planned in waiting:
                        if planned is not own and not planned.spec.redo:
                            values, options = arguments(planned)
                            under_way[self._steps[planned.name].submit(*values, **options)] = planned.name
                    if own is not None:
                        values, options = arguments(own)
                        name, state = own.name, self._steps[own.name](*values, **options, return_state=True)
                    else:
                        future = next(as_completed([*under_way]))
                        future.wait()
                        name, state = under_way.pop(future), future.state
                    results[name], states[name] = state.result(), state
                    artifacts |= results[name].entry.outputs
        except BaseException:
            run.halted.set()
            raise
        finally:
            wait([*under_way])
        self._last = [states[name] for name in states.keys() - set().union(*self._producers.values())]
        return results


def _producers(graph: StepGraph, reader: PlannedStep) -> set[str]:
    read = set(reader.inputs.values())
    return {step.name for step in graph.steps if not read.isdisjoint(step.outputs.values())}


def _prefect_step(planned: PlannedStep) -> Any:
    @as_task(planned.name)
    def body(folder: Path, index: int, inputs: dict[str, Ref]) -> Any:
        result = run_step(live_run(folder), index, planned, inputs)
        # Shown as cached, so that a user sees what a resumed run did not repeat.
        return Completed(name="Cached", data=result) if result.reused else result

    return body


def _run_body(folder: Path, index: int, body: Callable[[], T]) -> T:
    live_run(folder)  # Torch's thread count belongs to a thread.
    return body()


def prepare_logs() -> None:
    """Let Prefect's logs, on terminals and on its server, hold texts of others escaped, and one reason of a failure."""
    for name in ("prefect.flow_runs", "prefect.task_runs", "prefect.engine"):
        logging.getLogger(name).addFilter(_escaped)


def _escaped(record: logging.LogRecord) -> bool:
    """Escapes a record, whose traceback quotes others, too. False leaves it out."""
    if record.exc_info and isinstance(record.exc_info[1], FailedRun | CancelledRun):
        # Prefect raises these where a flow returned such a state: `failed` and `unanswered` logged its reason.
        return False
    record.msg, record.args = printable_lines(record.getMessage()), None
    if record.exc_info:
        # A formatter takes a text that is there already.
        record.exc_text = printable_lines(logging.Formatter().formatException(record.exc_info))
    return True


class LoggedLines:
    """A text file whose whole lines go to Prefect's log of this flow run too, without their colours."""

    def __init__(self, file: TextIO) -> None:
        """Called in the flow; other threads may write."""
        self._file, self._log, self._rest = file, get_run_logger(), ""
        for handler in logging.getLogger().handlers:
            if isinstance(handler, PrefectConsoleHandler):
                handler.addFilter(lambda record: not hasattr(record, _PRINTED))

    def write(self, text: str) -> int:
        *lines, self._rest = f"{self._rest}{text}".split("\n")
        for line in filter(str.strip, lines):
            self._log.info("%s", Text.from_ansi(line).plain, extra={_PRINTED: True})
        return self._file.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


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
