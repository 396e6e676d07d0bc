"""Pages of a training in Prefect beside its tasks: one for each step, and links to tracking services.

A step is a flow run below the training's. Prefect's client makes it one step ahead, in a thread: `@flow` would ask the
server ten times a step, while the training waits. While the server is away, the tasks of a step belong to the
training's own page, and one attempt in `PAUSE_SECONDS` finds its return.
"""

import re
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from contextvars import copy_context
from typing import Any, Self, TypeVar
from uuid import UUID, uuid4

import httpx
from prefect import flow, task
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun, FlowRunResult, State, StateType, TaskRunResult
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled, Crashed, Failed, Running

from flows.launch import say
from fp8core.errors import UserError, first_line, printable_lines
from fp8core.run.context import RunContext

T = TypeVar("T")
STEP_FLOW = "fp8-grpo-step"
ANSWER_SECONDS, PAUSE_SECONDS = 5.0, 30.0
"""Longest wait for an answer, and the pause after one that did not come."""
# SQLite refuses a transaction when another one wrote in between: the server answers 503.
_BUSY_PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
_FAILURES = (httpx.HTTPError, PrefectException, OSError, UserError, ValueError)


@flow(name=STEP_FLOW)
def _step(step: int) -> None:
    """Known to the server by its name; its body is `TrainingPages.place`."""


_place = task(name=STEP_FLOW)(_step.fn)


class TrainingPages:
    def __init__(self, run: RunContext) -> None:
        training = FlowRunContext.get()
        assert training is not None and training.flow_run is not None, "a training is a flow run"  # noqa: PT018
        described = run.directory.description()
        assert described is not None, "a run is described before it is executed"
        self._run, self._training, self._training_id = run, training, training.flow_run.id
        self._tag = f"run-{described.id}"
        self._client = get_client(httpx_settings={"timeout": ANSWER_SECONDS}, sync_client=True)
        self._block = ExitStack()
        self._thread = ThreadPoolExecutor(1, "prefect-pages")
        self._next_attempt = 0.0
        self._step: FlowRun | None = None
        self._next_page: tuple[int, Future[FlowRun | None]] | None = None
        """The next step, and its flow run."""
        self._end_states: dict[UUID, State[Any]] = {}

    def __enter__(self) -> Self:
        # Prefect's client would pause for seconds: `_request` repeats what a busy server refuses.
        self._block.enter_context(temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}))
        self._block.enter_context(self._client)
        self._block.enter_context(self._thread)
        self._context = copy_context()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """End an open step as the training ends, by `error`."""
        with self._block:
            if isinstance(error, Exception):
                self.end_step(Failed(message=printable_lines(first_line(error))))
            else:
                self.end_step(Cancelled(message="stopped"))
            self._leave_next_page()

    def start(self, pages: Mapping[str, str]) -> None:
        """Link the run's `pages` in tracking services; what a killed process of it left as running has crashed."""
        key = artifact_key(self._run.directory.path.name, "mlflow")
        links = "\n\n".join(f"[{title} run]({page})" for title, page in pages.items())
        if links:
            self._ask(lambda: create_markdown_artifact(links, key, "Metrics, models and files."))
        self._ask(self._settle)

    def begin_step(self, index: int, after: Collection[State[Any]]) -> None:
        """The tasks within `place` belong to step `index`, which comes after the last step, or after these tasks."""
        self.end_step(Crashed(message="a process was lost: the step begins again"))
        if self._next_page is None or self._next_page[0] != index:
            self._leave_next_page()
            self._make(index, [TaskRunResult(id=each.state_details.task_run_id) for each in after])
        assert self._next_page is not None, "it was ordered above"
        with suppress(TimeoutError):
            self._step = self._next_page[1].result(ANSWER_SECONDS)
        if (step := self._step) is None:
            self._leave_next_page()
            return
        self._next_page = None
        # First what the next step will wait for.
        if index < self._run.config.steps:
            self._make(index + 1, [FlowRunResult(id=step.id)])
        self._ask(lambda: self._set_state(step.id, Running()))

    def end_step(self, state: State[Any]) -> None:
        if self._step is not None:
            self._end_states[self._step.id] = state
            self._step = None
            self._ask(self._send_end_states)

    def place(self) -> AbstractContextManager[Any]:
        """Prefect tasks of this block belong to the open step, else to the training."""
        if self._step is None:
            return nullcontext()
        return self._training.model_copy(update={"flow_run": self._step, "task_run_dynamic_keys": {}})

    def _ask(self, request: Callable[[], T], without: str = "its pages lack a part of this run") -> Future[T | None]:
        return self._thread.submit(self._context.run, self._answer, request, without)

    def _make(self, index: int, after: list[Any]) -> None:
        made = self._ask(lambda: self._make_step(index, after), f"step {index} has no page of its own")
        self._next_page = index, made

    def _leave_next_page(self) -> None:
        """The next step is not reached, or made anew."""
        if self._next_page is not None:
            made, self._next_page = self._next_page[1], None
            self._ask(lambda: self._cancel(made.result()))

    # ---- in the thread of the requests ----

    def _cancel(self, step: FlowRun | None) -> None:
        if step is not None:
            self._set_state(step.id, Cancelled(message="not begun"))

    def _answer(self, request: Callable[[], T], without: str) -> T | None:
        """The answer; None, with a note on the console, where the server is away or refuses."""
        if time.monotonic() < self._next_attempt:
            return None
        try:
            answer = request()
        except _FAILURES as error:
            away = isinstance(error, httpx.TransportError)
            if not away or not self._next_attempt:
                self._run.console.note(f"Prefect: {without}: {first_line(error) or type(error).__name__}")
            if away:
                self._next_attempt = time.monotonic() + PAUSE_SECONDS
            return None
        self._next_attempt = 0.0
        return answer

    def _request(self, method: str, /, *values: Any, **options: Any) -> Any:
        """The answer of the client's method, which is called again while the server is busy."""
        for pause in _BUSY_PAUSES:
            try:
                return getattr(self._client, method)(*values, **options)
            except httpx.HTTPStatusError as error:
                if error.response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                    raise
                time.sleep(pause)
        return getattr(self._client, method)(*values, **options)

    def _set_state(self, step: UUID, state: State[Any]) -> None:
        with suppress(ObjectNotFound):  # A user may delete it.
            self._request("set_flow_run_state", step, state, force=True)

    def _send_end_states(self) -> None:
        for step, state in [*self._end_states.items()]:
            self._set_state(step, state)
            del self._end_states[step]

    def _make_step(self, index: int, after: list[Any]) -> FlowRun:
        name = f"step {index}"
        place = self._request(
            "create_task_run", _place, self._training_id, str(uuid4()), name=name, task_inputs={"after": after}
        )
        tags = [self._run.directory.path.name, self._tag]
        made: FlowRun = self._request(
            "create_flow_run", _step, name, {"step": index}, tags=tags, parent_task_run_id=place.id
        )
        return made

    def _settle(self) -> None:
        under_way = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PENDING, StateType.RUNNING]))
        open_runs = FlowRunFilter(tags=FlowRunFilterTags(all_=[self._tag]), state=under_way)
        crash_state: State[Any] = Crashed(message="its process was lost")
        for step in self._request("read_flow_runs", flow_run_filter=open_runs):
            assert step.parent_task_run_id is not None, "a step is below its training"
            training = self._request("read_task_run", step.parent_task_run_id).flow_run_id
            self._set_state(step.id, crash_state)
            if training not in (None, self._training_id):
                earlier = self._request("read_flow_run", training)
                if earlier.state_type == StateType.RUNNING:
                    self._set_state(earlier.id, crash_state)


def artifact_key(run: str, name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", f"{run}-{name}".lower()).strip("-")


def show_markdown(text: str, key: str, words: str) -> None:
    """An artifact of the flow run; where Prefect's server is away, the run goes on without."""
    try:
        create_markdown_artifact(text, key, words)
    except _FAILURES as error:
        say(f"left out of what Prefect shows: {first_line(error)}")
