"""The flow run of each step of a training, below the training's own in Prefect: a page with the step's own graph.

They are made through Prefect's client. `@flow` would wait for its heartbeat's thread, up to a second, at each end.
A thread makes them while earlier steps are computed. Nothing here fails a training: the tasks of a step
without a flow run belong to that of the training.
"""

import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Self, TypeVar
from uuid import UUID

import httpx
from prefect import Task
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import FlowRunCreate
from prefect.client.schemas.objects import FlowRun, FlowRunResult, RunInput, State
from prefect.context import FlowRunContext
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Completed, Failed, Pending, Running, to_state_create

from fp8core.errors import first_line, printable_lines

T = TypeVar("T")
FLOW = "fp8-grpo-step"
# Runs that exist before their step begins: a server that works for others may take seconds for one.
_AHEAD = 2
_RETRIES = 2
# A step waits no longer for its flow run. After a failure, none are requested for a while.
_LATE_SECONDS = 3.0
_SILENCE_SECONDS = 60.0
_FLUSH_SECONDS = 5.0


class StepRuns:
    """Flow runs `step N` of a training. A retry of the training's flow run continues those it left."""

    def __init__(self, client: SyncPrefectClient, last: int, note: Callable[[str], None]) -> None:
        """`client` is for the thread alone, `last` the number of the last step; `note` gets a failure's reason."""
        self._client, self._last, self._note = client, last, note
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="step-runs")
        self._requests: list[Future[Any]] = []
        self._made: dict[int, Future[FlowRun]] = {}
        self._open: FlowRunContext | None = None
        self._begun = 0
        self._flow: UUID | None = None
        self._silent_until = 0.0

    def __enter__(self) -> Self:
        training = FlowRunContext.get()
        assert training is not None, "a training is a flow run"
        assert training.flow_run is not None, "a training is a flow run"
        self._training, self._training_id = training, training.flow_run.id
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """A step that is open has failed with `error`; those that were not reached are deleted."""
        if self._open is not None:
            self._close(Failed(message="stopped" if error is None else printable_lines(first_line(error))))
        self._drop_made()
        wait(self._requests, _FLUSH_SECONDS)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def begin(self, index: int, after: Collection[RunInput]) -> None:
        """The tasks of `place` belong to step `index`, which comes after `after`; the next runs are made."""
        if self._open is not None:
            self._close(Failed(message="a process was lost: the step begins again"))
        if index not in self._made:
            self._drop_made()
        self._requests = [request for request in self._requests if not request.done()]
        self._prepare([index], after)
        run = self._take(index)
        if run is not None:
            self._open = self._training.model_copy(update={"flow_run": run, "task_run_dynamic_keys": {}})
            self._set(run.id, Running())
            self._prepare(range(index + 1, min(index + _AHEAD, self._last) + 1), after)

    def end(self) -> set[RunInput]:
        """The step is committed; returns its flow run, if it has one."""
        return set() if self._open is None else {FlowRunResult(id=self._close(Completed()))}

    def place(self) -> AbstractContextManager[Any]:
        """Prefect tasks of this block belong to the open step, else to the training."""
        return nullcontext() if self._open is None else self._open

    def _prepare(self, steps: Iterable[int], after: Collection[RunInput]) -> None:
        for index in steps:
            if index not in self._made and time.monotonic() >= self._silent_until:
                before = self._made.get(index - 1)
                self._made[index] = self._request(partial(self._make, index, before, after))

    def _take(self, index: int) -> FlowRun | None:
        if index not in self._made:
            return None
        try:
            run = self._made[index].result(_LATE_SECONDS)
        except (httpx.HTTPError, PrefectException, OSError, ValueError, CancelledError) as error:
            reason = "Prefect does not answer" if isinstance(error, TimeoutError) else first_line(error)
            self._note(f"step {index} has no page of its own in Prefect: {reason}")
            self._silent_until = time.monotonic() + _SILENCE_SECONDS
            self._drop_made()
            return None
        self._begun = index
        self._made.pop(index - 1, None)
        return run

    def _make(self, index: int, before: Future[FlowRun] | None, first: Collection[RunInput]) -> FlowRun:
        """The run of a step, pending, after that of the step `before`; after `first` where there is none."""
        after = first if before is None else [FlowRunResult(id=before.result().id)]
        if self._flow is None:
            self._flow = self._client.create_flow_from_name(FLOW)
        name = f"step {index}"
        inputs: Any = {"carried": list(after)}
        # One key a step, so that a retry finds the runs of the first attempt.
        parent = self._client.create_task_run(_PLACE, self._training_id, name, name=name, task_inputs=inputs)
        request = FlowRunCreate(
            flow_id=self._flow,
            name=name,
            parameters={"step": index},
            parent_task_run_id=parent.id,
            state=to_state_create(Pending()),
            idempotency_key=f"{self._training_id}-{name}",
        )
        answer = self._client.request("POST", "/flow_runs/", json=request.model_dump(mode="json", exclude_unset=True))
        return FlowRun.model_validate(answer.json())

    def _close(self, state: State[Any]) -> UUID:
        assert self._open is not None, "a step is open"
        assert self._open.flow_run is not None, "it has a flow run"
        run = self._open.flow_run.id
        self._set(run, state)
        self._open = None
        return run

    def _drop_made(self) -> None:
        """Forget the runs, and delete those whose step has not begun."""
        for index, request in self._made.items():
            if index > self._begun:
                self._request(partial(self._delete, request))
        self._made = {}

    def _delete(self, made: Future[FlowRun]) -> None:
        if made.exception() is None:
            run = made.result()
            self._client.delete_flow_run(run.id)
            self._client.request("DELETE", "/task_runs/{id}", path_params={"id": run.parent_task_run_id})

    def _set(self, run: UUID, state: State[Any]) -> None:
        self._request(partial(self._client.set_flow_run_state, run, state, force=True))

    def _request(self, body: Callable[[], T]) -> Future[T]:
        def attempt() -> T:
            with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: _RETRIES}):
                return body()

        request = self._thread.submit(attempt)
        self._requests.append(request)
        return request


def _placeholder() -> None:
    """The task of the task run that stands for a flow run in the one above it."""


_PLACE: Task[[], None] = Task(_placeholder, name=FLOW)
