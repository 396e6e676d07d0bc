"""A training in Prefect: its parts as tasks and its artifacts, and the states of flows without a result."""

import logging
import os
import re
import select
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED
from concurrent.futures import wait as wait_for_one
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar, cast
from uuid import UUID

import httpx
from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.objects import RunInput, State, TaskRunResult
from prefect.context import FlowRunContext, SettingsContext, TaskRunContext, get_settings_context
from prefect.exceptions import CancelledRun, FailedRun, PrefectException
from prefect.futures import wait
from prefect.logging.handlers import PrefectConsoleHandler
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES
from prefect.states import Cancelled, Completed, Failed
from prefect.task_engine import run_task_sync
from prefect.utilities.annotations import quote
from rich.text import Text

from flows.launch import say
from flows.step_runs import StepRuns
from flows.tracking.tracker import Outage
from fp8core.config.step_graph import PlannedStep, StepGraph
from fp8core.errors import UserError, first_line, printable_lines
from fp8core.report.text import progress_markdown
from fp8core.run.commit import step_metrics
from fp8core.run.context import RunContext, live_run
from fp8core.run.execute import TaskResult, run_step
from fp8core.run.loop import Execution
from fp8core.store.artifacts import Ref
from fp8core.store.ledger import START
from fp8core.store.metrics import STEP

T = TypeVar("T")
# Longest wait of a finished training for a server that does not answer, and for one answer at any time.
PATIENCE_SECONDS = 5.0
# Attribute of log records whose text this process prints by itself.
_PRINTED = "fp8_grpo_printed"
_OUTPUTS = (1, 2)
_PASSING_STATUS = {408, 429}


def as_task(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Make a Prefect task of a function of (folder, index, ...).

    The ledger persists and caches; Prefect does neither, so that there is one record of what is done.
    """
    return task(name=name, task_run_name=f"{name}-{{index}}", persist_result=False, cache_policy=NO_CACHE)


class PrefectExecution(Execution):
    """Every part of a training as a Prefect task; steps of an iteration run as soon as their inputs exist."""

    def __init__(self, graph: StepGraph, step_runs: StepRuns) -> None:
        self._steps = {planned.name: _prefect_step(planned) for planned in graph.steps}
        self._producers = {planned.name: _producers(graph, planned) for planned in graph.steps}
        self._step_runs = step_runs
        self._calls: dict[str, Any] = {}
        self._last: set[RunInput] = set()

    def follow_steps(self, tag: str, last: int) -> None:
        """Steps have flow runs with `tag` from here, up to step `last`."""
        self._step_runs.follow(tag, last)

    def begin_step(self, index: int) -> None:
        self._step_runs.begin(index, self._last)

    def end_step(self) -> None:
        self._last = self._step_runs.end() or self._last

    def call(self, run: RunContext, name: str, index: int, body: Callable[[], T]) -> T:
        """It comes after what came before it in its flow run."""
        if name not in self._calls:
            self._calls[name] = as_task(name)(_run_body)
        # Quoted: Prefect need not look for futures in it.
        parameters = {"folder": run.directory.path, "index": index, "body": quote(body)}
        with self._step_runs.place():
            outcome = _value(run_task_sync(self._calls[name], parameters=parameters, dependencies={"body": self._last}))
        self._last = {outcome.run}
        result: T = outcome.result
        return result

    def steps(self, run: RunContext, index: int, inputs: Mapping[str, Ref]) -> dict[str, TaskResult]:
        """Each step begins when the steps whose artifacts it reads have ended, whatever else is under way."""

        def ready(ended: Mapping[str, TaskOutcome]) -> dict[str, TaskCall]:
            artifacts = dict(inputs)
            for outcome in ended.values():
                artifacts |= outcome.result.entry.outputs
            return {
                planned.name: TaskCall(
                    self._steps[planned.name],
                    {
                        "folder": run.directory.path,
                        "index": index,
                        "inputs": quote({port: artifacts[artifact] for port, artifact in planned.inputs.items()}),
                    },
                    {"inputs": {ended[producer].run for producer in self._producers[planned.name]}},
                    here=planned.spec.redo,
                )
                for planned in run.graph.ready(set(ended))
            }

        run.halted.clear()
        with self._step_runs.place():
            ended = side_by_side(ready, run.halted.set)
        assert len(ended) == len(run.graph.steps), "a checked graph runs to its end"
        self._last = {ended[name].run for name in ended.keys() - set().union(*self._producers.values())}
        return {name: outcome.result for name, outcome in ended.items()}


@dataclass(frozen=True)
class TaskCall:
    """A Prefect task, its parameters, and the task runs that it comes after, by parameter.

    With `here` it runs in the calling thread, whatever else is under way: an update of the live trainer does.
    """

    task: Any
    parameters: dict[str, Any]
    after: dict[str, set[RunInput]]
    here: bool = False


class TaskOutcome(NamedTuple):
    result: Any
    run: RunInput


def side_by_side(
    ready: Callable[[Mapping[str, TaskOutcome]], Mapping[str, TaskCall]], halt: Callable[[], None]
) -> dict[str, TaskOutcome]:
    """Results by name of Prefect tasks that run at once.

    Where none is under way, the first of those that may begin runs in this thread: a call costs less than a submission.
    Later ones would hide failures of those under way, and keep what these make possible from beginning.

    Args:
        ready: from what has ended to what may begin; what has begun already is left out.
        halt: called when one raises, which is raised when all that have begun have ended.
    """
    within = FlowRunContext.get()
    assert within is not None, "tasks are called within a flow run"
    runner, begun, ended = within.task_runner, dict[str, Any](), dict[str, TaskOutcome]()
    try:
        while (calls := {name: call for name, call in ready(ended).items() if name not in begun}) or begun:
            updates = [name for name, call in calls.items() if call.here]
            own = next(iter(updates or ([] if begun else calls)), None)
            for name, call in calls.items():
                if name != own and not call.here:
                    begun[name] = runner.submit(call.task, call.parameters, dependencies=call.after)
            if own is not None:
                call = calls[own]
                ended[own] = _value(run_task_sync(call.task, parameters=call.parameters, dependencies=call.after))
            else:
                wait_for_one([future.wrapped_future for future in begun.values()], return_when=FIRST_COMPLETED)
            # The state of Prefect's own future is a question to the server.
            for name in [name for name, future in begun.items() if future.wrapped_future.done()]:
                ended[name] = begun.pop(name).result()
    except BaseException:
        halt()
        raise
    finally:
        wait([*begun.values()])
    return ended


def _value(result: TaskOutcome | State[Any] | None) -> TaskOutcome:
    """Result of a called task, whose body may return the state it ends in.

    A state's own `result()` waits for another thread, which costs as much as half of a call.
    """
    outcome: Any = result.result() if isinstance(result, State) else result
    return cast(TaskOutcome, outcome)


def _producers(graph: StepGraph, reader: PlannedStep) -> set[str]:
    read = set(reader.inputs.values())
    return {step.name for step in graph.steps if not read.isdisjoint(step.outputs.values())}


def _prefect_step(planned: PlannedStep) -> Any:
    @as_task(planned.name)
    def body(folder: Path, index: int, inputs: dict[str, Ref]) -> Any:
        result = run_step(live_run(folder), index, planned, inputs)
        outcome = TaskOutcome(result, _this_run())
        # Shown as cached, so that a user sees what a resumed run did not repeat.
        return Completed(name="Cached", data=outcome) if result.reused else outcome

    return body


def _run_body(folder: Path, index: int, body: Callable[[], Any]) -> TaskOutcome:
    live_run(folder)  # Torch's thread count belongs to a thread.
    return TaskOutcome(body(), _this_run())


def _this_run() -> RunInput:
    context = TaskRunContext.get()
    assert context is not None, "a task runs in Prefect's context"
    return TaskRunResult(id=context.task_run.id)


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
    """A text file whose whole lines go to Prefect's log of this flow run too, without their colours.

    A worker reads its training's output. In a run of a deployment, output is dropped once the worker is gone. Else
    rich, which prints our lines and Prefect's, would end the process. The output of a command is kept: who ends its
    reader ends it too.
    """

    def __init__(self, file: TextIO) -> None:
        """Called in the flow; other threads may write."""
        within = FlowRunContext.get()
        assert within is not None, "called in the flow"
        assert within.flow_run is not None, "a flow runs with its run"
        self._file, self._log, self._rest = file, get_run_logger(), ""
        self._deployed = within.flow_run.deployment_id is not None
        for handler in logging.getLogger().handlers:
            if isinstance(handler, PrefectConsoleHandler):
                handler.addFilter(_is_unprinted)
                if self._deployed:
                    handler.addFilter(_drop_before)

    def write(self, text: str) -> int:
        *lines, self._rest = f"{self._rest}{text}".split("\n")
        for line in filter(str.strip, lines):
            self._log.info("%s", Text.from_ansi(line).plain, extra={_PRINTED: True})
        if self._deployed:
            drop_unread_output()
        return self._file.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _is_unprinted(record: logging.LogRecord) -> bool:
    return not hasattr(record, _PRINTED)


def _drop_before(record: logging.LogRecord) -> bool:
    drop_unread_output()
    return True


def drop_unread_output() -> None:
    """Point standard output and standard error at /dev/null, each if it is a pipe that nobody reads any more."""
    outputs = select.poll()
    for number in _OUTPUTS:
        outputs.register(number, 0)  # An error is reported without being asked for.
    for number, found in outputs.poll(0):
        if found & select.POLLERR:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)


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


class PrefectArtifacts:
    """Prefect's view of a training beside its tasks: progress, a report, and a link to its MLflow run.

    The thread that serves MLflow posts these artifacts of a run, which belong to a flow run (`session.Destination`).
    Nothing here fails a training.
    """

    name = "Prefect"
    outage_note = "what its UI shows of the run follows"

    def __init__(self, run: RunContext, page: str, flow_run: str | None, client: SyncPrefectClient) -> None:
        """`page` is the address of the MLflow run, `client` that of `artifact_client`."""
        self.patience = PATIENCE_SECONDS
        # Made once: `temporary_settings` takes 30 ms of a processor, which a step would lack.
        ours = get_settings_context()
        settings = ours.settings.copy_with_update(updates={PREFECT_CLIENT_MAX_RETRIES: 0})
        self._once = SettingsContext(profile=ours.profile, settings=settings)
        self._run, self._flow_run, self._client = run, flow_run, client
        self._done = run.directory.ledger.last_step() or START
        self._shown: int | None = None
        self._progress: UUID | None = None
        self._waiting: deque[Callable[[], None]] = deque([partial(self._post_link, page)])

    def step_done(self, index: int) -> None:
        """A step is committed; every `tracking.report_every` steps, and after the last one, a report is due."""
        self._done = index
        every, last = self._run.config.tracking.report_every, self._run.config.steps
        if index % every == 0 or index == last:
            self._waiting.append(partial(self._post_report, index))

    def publish(self) -> Iterator[None]:
        """Posts what waits (`session.Destination.publish`); a piece that is refused is left out."""
        while (done := self._done) != self._shown:
            self._try(partial(self._post_progress, done))
            self._shown = done
            yield
        while self._waiting:
            self._try(self._waiting[0])
            self._waiting.popleft()
            yield

    def _try(self, piece: Callable[[], None]) -> None:
        try:
            # One attempt: the publisher makes the next ones, and serves MLflow between them.
            with self._once:
                piece()
        except (httpx.HTTPError, PrefectException, OSError, UserError, ValueError) as error:
            if _passes(error):
                raise Outage(first_line(error)) from error
            self._run.console.note(f"left out of what Prefect shows: {first_line(error)}")

    def caught_up(self) -> str:
        return ""

    def _create(self, kind: str, name: str, data: object, words: str) -> UUID:
        key = artifact_key(self._run.directory.path.name, name)
        request = ArtifactCreate(type=kind, key=key, description=words, data=data, flow_run_id=self._flow_run)
        return self._client.create_artifact(request).id

    def _post_link(self, page: str) -> None:
        self._create("markdown", "3-mlflow", f"[MLflow run]({page})", "Metrics, models and files of this training.")

    def _post_progress(self, done: int) -> None:
        share = 100.0 * done / self._run.config.steps
        if self._progress is None:
            words = f"Steps of {self._run.directory.path.name}, of {self._run.config.steps}"
            self._progress = self._create("progress", "1-progress", share, words)
        else:
            self._client.update_artifact(self._progress, ArtifactUpdate(data=share))

    def _post_report(self, index: int) -> None:
        every, steps = self._run.config.tracking.report_every, self._run.config.steps
        first = max(START + 1, index - every + 1)
        seconds: dict[str, float] = {}
        for step in range(first, index + 1):
            for name, entry in self._run.directory.ledger.tasks(step).items():
                seconds[name] = seconds.get(name, 0.0) + entry.seconds
        rows, before = self._rows(first, index), self._rows(max(START + 1, first - every), first - 1)
        text = progress_markdown(self._run.directory.path.name, steps, rows, before, seconds)
        self._create("markdown", "2-report", text, f"Step {index} of {steps}")

    def _rows(self, first: int, last: int) -> list[dict[str, float]]:
        return [{STEP: step, **step_metrics(self._run, step)} for step in range(first, last + 1)]


def artifact_key(run: str, name: str) -> str:
    """Key of an artifact: small letters, digits and dashes. Prefect sorts by it, so `name` may begin with a number."""
    return re.sub(r"[^a-z0-9]+", "-", f"{run}-{name}".lower()).strip("-")


def show_markdown(text: str, key: str, words: str) -> None:
    """An artifact of the flow run; where Prefect's server is away, the run goes on without."""
    try:
        create_markdown_artifact(text, key, words)
    except (httpx.HTTPError, PrefectException, OSError) as error:
        say(f"left out of what Prefect shows: {first_line(error)}")


def artifact_client() -> SyncPrefectClient:
    """A client whose requests end soon: while one waits, MLflow gets nothing."""
    return get_client(httpx_settings={"timeout": PATIENCE_SECONDS}, sync_client=True)


def _passes(error: Exception) -> bool:
    """True if a retry may help; a refusal, and metrics that are gone, will be the same."""
    if isinstance(error, httpx.HTTPStatusError):
        status = error.response.status_code
        return status >= 500 or status in _PASSING_STATUS
    return isinstance(error, httpx.HTTPError | OSError)
