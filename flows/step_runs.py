"""The flow run of each step of a training, below the training's own in Prefect: a page with the step's own graph.

They are made through Prefect's client. `@flow` would wait for its heartbeat's thread, up to a second, at each end. One
thread sends every request, and makes the runs of the next steps while a step is computed. Nothing here fails a
training: the tasks of a step without a flow run belong to that of the training. While the server is away the training
waits for nothing; each step makes one attempt beside it, and the first that succeeds ends the outage.
"""

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, Self
from uuid import UUID, uuid4

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import FlowRunCreate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, FlowRunResult, RunInput, State, StateType, TaskRun
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled, Completed, Crashed, Failed, Pending, Running, to_state_create
from prefect.utilities.engine import emit_task_run_state_change_event

from flows.prefect_server import answers
from fp8core.errors import first_line, printable_lines

FLOW = "fp8-grpo-step"
# Steps that are announced in the training's graph before they begin, and those whose flow runs are made then. A server
# records events when it can, and one on SQLite refuses requests while it does.
_ANNOUNCED, _MADE = 4, 2
# A step waits no longer for its flow run, and the end of a training no longer for the last requests.
_LATE_SECONDS = 5.0
_FLUSH_SECONDS = 5.0
_LOOK_SECONDS = 1.0
# SQLite refuses a transaction when another one wrote in between: the server answers 503, after which Prefect's client
# would sleep for two seconds. It answers 409 while it has not recorded the place of a flow run.
_BUSY_STATUSES, _BUSY_PAUSES = {409, 503}, (0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 0.5, 1.0, 1.0, 1.0)
# RuntimeError is what a closed client raises, after the wait of a training's end.
_FAILURES = (httpx.HTTPError, PrefectException, OSError, ValueError, RuntimeError)


class _BusyError(RuntimeError):
    """The server requests to be asked again."""


@dataclass(frozen=True)
class _Place:
    step: int
    id: UUID
    after: tuple[RunInput, ...]


def step_client() -> SyncPrefectClient:
    """A client for `StepRuns`, whose requests end soon."""

    def refuse(response: httpx.Response) -> None:
        if response.status_code in _BUSY_STATUSES:
            raise _BusyError("Prefect's server is busy")

    settings = {"timeout": _LATE_SECONDS, "event_hooks": {"response": [refuse]}}
    return get_client(httpx_settings=settings, sync_client=True)


class StepRuns:
    def __init__(self, client: SyncPrefectClient, note: Callable[[str], None]) -> None:
        """`client` is a `step_client` for the thread alone; `note` gets the reason when a server is lost."""
        self._client, self._note = client, note
        self._health = f"{str(client.api_url).rstrip('/')}/health"
        self._requests = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]()
        # A daemon: a process that ends does not wait for an answer. In the training's context: an event belongs to its
        # flow run.
        self._thread = threading.Thread(target=copy_context().run, args=[self._serve], name="step-runs", daemon=True)
        self._away = self._noted = False
        self._wanted, self._lock = dict[UUID, tuple[State[Any], _Place]](), threading.Lock()
        # The open step and its place, which a retry of the training does not forget with those ahead.
        self._open: FlowRunContext | None = None
        self._place: _Place
        self._ahead = dict[int, Future[FlowRun]]()
        self._places, self._begun = dict[int, _Place](), 0
        self._flow: UUID | None = None

    def __enter__(self) -> Self:
        training = FlowRunContext.get()
        assert training is not None, "a training is a flow run"
        assert training.flow_run is not None, "a training is a flow run"
        self._training, self._training_id = training, training.flow_run.id
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """End an open step as the training ends, by `error`; delete the next ones, which were not reached."""
        if self._open is not None:
            if isinstance(error, Exception):
                self._close(Failed(message=printable_lines(first_line(error))))
            else:
                self._close(Cancelled(message="stopped"))
        self._forget_ahead()
        self._send(self._set_wanted)
        self._requests.put(None)
        # It may answer again since the last step, and what it has not received stands in its pages for long.
        self._thread.join(0.0 if self._away and not answers(self._health, _LOOK_SECONDS) else _FLUSH_SECONDS)

    def follow(self, tag: str, last: int) -> None:
        """Before the first step: the runs have `tag`, which is the training's own, and `last` is the last step.

        Runs that a killed process of the training left are settled.
        """
        self._tag, self._last = tag, last
        self._forget_ahead()
        self._send(self._settle_left)

    def begin(self, index: int, after: Collection[RunInput]) -> None:
        """The tasks of `place` belong to step `index`, which comes after `after`; the next runs are made."""
        if self._open is not None:
            self._close(Crashed(message="a process was lost: the step begins again"))
        run = self._take(index, after)
        if run is not None:
            self._open = self._training.model_copy(update={"flow_run": run, "task_run_dynamic_keys": {}})
            self._places[index] = self._place = replace(self._places[index], after=(*after,))
            self._set(run.id, Running())
            for step in range(index + 1, min(index + _ANNOUNCED, self._last) + 1):
                # The next one a second time: what it comes after has an identity now.
                if step == index + 1 or step not in self._places:
                    self._announce(step, [FlowRunResult(id=run.id)] if step == index + 1 else [])
            for step in range(index + 1, min(index + _MADE, self._last) + 1):
                self._order(step)

    def end(self) -> set[RunInput]:
        """The step is committed; returns its flow run, if it has one."""
        return set() if self._open is None else {FlowRunResult(id=self._close(Completed()))}

    def place(self) -> AbstractContextManager[Any]:
        """Prefect tasks of this block belong to the open step, else to the training."""
        return nullcontext() if self._open is None else self._open

    # ---- in the training's thread ----

    def _announce(self, index: int, after: Collection[RunInput]) -> None:
        known = self._places.get(index)
        self._places[index] = _Place(index, uuid4() if known is None else known.id, (*after,))
        self._draw(self._places[index], Pending())

    def _draw(self, place: _Place, state: State[Any]) -> None:
        """Have the server record a place, as it does a task run. A request would meet with many more refusals."""
        run = TaskRun(
            id=place.id,
            name=f"step {place.step}",
            flow_run_id=self._training_id,
            task_key=FLOW,
            dynamic_key=str(place.id),
            task_inputs={"carried": list(place.after)},
            state=state,
        )
        emit_task_run_state_change_event(run, None, state)

    def _order(self, index: int) -> None:
        if index not in self._ahead:
            self._ahead[index] = self._send(partial(self._make, index, self._places[index].id))

    def _take(self, index: int, after: Collection[RunInput]) -> FlowRun | None:
        """The flow run of a step; None when it is not there in time."""
        waits = self._away and not all(made.done() for made in self._ahead.values())
        if not waits and index not in self._ahead:
            self._forget_ahead()
            self._announce(index, after)
            self._order(index)
        made = self._ahead.get(index)
        if made is None or (self._away and not made.done()):
            return None  # One attempt at a time, beside the training.
        try:
            run = made.result(_LATE_SECONDS)
        except _FAILURES as error:
            if not self._noted:
                reason = "it does not answer" if isinstance(error, TimeoutError) else first_line(error)
                self._note(f"Prefect shows step {index} and those that follow without pages of their own: {reason}")
            self._away = self._noted = True
            if made.done():
                self._forget_ahead()
            return None
        del self._ahead[index]
        self._begun = index
        self._places.pop(index - 1, None)
        self._noted = False
        return run

    def _close(self, state: State[Any]) -> UUID:
        assert self._open is not None, "a step is open"
        assert self._open.flow_run is not None, "it has a flow run"
        run = self._open.flow_run.id
        self._open = None
        self._set(run, state)
        return run

    def _forget_ahead(self) -> None:
        for made in self._ahead.values():
            self._send(partial(self._delete_made, made))
        for place in (place for step, place in self._places.items() if step > max(self._ahead, default=self._begun)):
            self._send(partial(self._delete_place, place.id))
        self._ahead, self._places = {}, {}

    def _set(self, run: UUID, state: State[Any]) -> None:
        with self._lock:
            self._wanted[run] = state, self._place
        self._send(self._set_wanted)

    def _send(self, body: Callable[[], Any]) -> Future[Any]:
        answer = Future[Any]()
        self._requests.put((answer, body))
        return answer

    # ---- in the thread of the requests ----

    def _serve(self) -> None:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
            while (request := self._requests.get()) is not None:
                answer, body = request
                try:
                    answer.set_result(body())
                except _FAILURES as error:
                    answer.set_exception(error)

    def _ask(self, request: Callable[[], Any]) -> Any:
        """The answer to one request, which is repeated while the server is busy."""
        for pause in (*_BUSY_PAUSES, None):
            try:
                answer = request()
                self._away = False
                return answer
            except _BusyError:
                if pause is None:
                    raise
                time.sleep(pause)
            except httpx.TransportError:
                self._away = True
                raise
        raise AssertionError("the last attempt returns or raises")

    def _make(self, index: int, place: UUID) -> FlowRun:
        if self._flow is None:
            self._flow = self._ask(lambda: self._client.create_flow_from_name(FLOW))
        request = FlowRunCreate(
            flow_id=self._flow,
            name=f"step {index}",
            parameters={"step": index},
            parent_task_run_id=place,
            tags=[self._tag],
            state=to_state_create(Pending()),
        ).model_dump(mode="json", exclude_unset=True)
        answer = self._ask(lambda: self._client.request("POST", "/flow_runs/", json=request))
        return FlowRun.model_validate(answer.json())

    def _set_wanted(self) -> None:
        """Send the newest state of each run; one that is not sent waits for the next call.

        The place of a step that has ended is drawn again, with a time that is not before the state's own. The server
        drops a drawing, and its edges, which it comes to record after a state with a later time.
        """
        with self._lock:
            wanted = dict(self._wanted)
        for run, (state, place) in wanted.items():
            # A user may delete a flow run.
            with suppress(ObjectNotFound):
                began = time.monotonic()
                answer = self._ask(partial(self._client.set_flow_run_state, run, state, force=True))
                if state.is_final():
                    # By the server's clock: it gave the flow run's state a time first, and the place's state another.
                    ended = answer.state.timestamp + timedelta(seconds=time.monotonic() - began)
                    self._draw(place, state.model_copy(update={"timestamp": ended}))
            with self._lock:
                if self._wanted[run][0] is state:
                    del self._wanted[run]

    def _settle_left(self) -> None:
        live = FlowRunFilterStateType(any_=[StateType.PENDING, StateType.RUNNING])
        left = FlowRunFilter(tags=FlowRunFilterTags(all_=[self._tag]), state=FlowRunFilterState(type=live))
        found = self._ask(lambda: self._client.read_flow_runs(flow_run_filter=left))
        above = {self._ask(partial(self._client.read_task_run, run.parent_task_run_id)).flow_run_id for run in found}
        for run in found:
            if run.state_type == StateType.PENDING:
                self._delete(run)
            else:
                crashed: State[Any] = Crashed(message="its process was lost")
                self._ask(partial(self._client.set_flow_run_state, run.id, crashed, force=True))
        if above:
            self._delete_announced(FlowRunFilter(id=FlowRunFilterId(any_=list(above))))

    def _delete_announced(self, trainings: FlowRunFilter) -> None:
        waiting = TaskRunFilterState(type=TaskRunFilterStateType(any_=[StateType.PENDING]), name=None)
        request = partial(
            self._client.read_task_runs, flow_run_filter=trainings, task_run_filter=TaskRunFilter(state=waiting)
        )
        for run in self._ask(request):
            if run.task_key == FLOW and run.id not in {place.id for place in self._places.values()}:
                self._delete_place(run.id)

    def _delete_made(self, made: Future[FlowRun]) -> None:
        if made.exception() is None:
            self._delete(made.result())

    def _delete(self, run: FlowRun) -> None:
        self._ask(partial(self._client.delete_flow_run, run.id))
        assert run.parent_task_run_id is not None, "it has a place"
        self._delete_place(run.parent_task_run_id)

    def _delete_place(self, place: UUID) -> None:
        self._ask(lambda: self._client.request("DELETE", "/task_runs/{id}", path_params={"id": place}))
