"""Steps and tasks that Prefect shows as under way below trainings that ended, settled from outside.

A training settles its own steps (`flows.step_runs`), but not when its process is killed, or ends while the server is
away. Its tasks end by events, of which a server that is killed loses the last ones.
"""

import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterParentTaskRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType, TaskRun
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Crashed

from flows.step_runs import FLOW

_TRAINING = "fp8-grpo"
_FINAL = [StateType.COMPLETED, StateType.FAILED, StateType.CRASHED, StateType.CANCELLED]
_UNDER_WAY = [StateType.PENDING, StateType.RUNNING]
# A server records the ends of tasks when it can, and drops one that is older than the state it has.
_RECORDED = timedelta(seconds=120)
_LOOK_SECONDS = 20.0
# A server that answers so would refuse the next run too: no login, too many requests, or it is not there.
_OF_ALL = frozenset({401, 429, 502, 503, 504})


class EndedTrainings:
    def __init__(self, client: SyncPrefectClient, recorded: timedelta = _RECORDED) -> None:
        """`recorded`: time after the end of a training in which the server may still record ends below it."""
        self._client, self._recorded = client, recorded
        self._due = 0.0

    def look(self) -> None:
        """Settle it. One attempt: what the server refuses now is left to the next look."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _LOOK_SECONDS
        try:
            with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
                self.settle()
        except (httpx.HTTPError, PrefectException):
            return

    def settle(self) -> None:
        """A step or task that began has crashed, one that did not begin is deleted, and one that is refused stays.

        Raises httpx.HTTPError: the server does not answer, or refuses to list runs.
        """
        places = [run for run in self._left(_TRAINING) if run.task_key == FLOW]
        # Where a step is refused its place stays too: by the place the next look finds the step.
        refused = {step.parent_task_run_id for step in self._steps(places) if not self._settle(step)}
        for run in (*self._left(_TRAINING), *self._left(FLOW)):
            if run.id not in refused:
                self._settle(run)

    def _steps(self, places: Sequence[TaskRun]) -> list[FlowRun]:
        if not places:
            return []
        above = FlowRunFilterParentTaskRunId(any_=[place.id for place in places])
        under_way = FlowRunFilterState(type=FlowRunFilterStateType(any_=_UNDER_WAY))
        return self._client.read_flow_runs(flow_run_filter=FlowRunFilter(parent_task_run_id=above, state=under_way))

    def _settle(self, run: FlowRun | TaskRun) -> bool:
        """Settle one run; False: the server refuses this one, or somebody else deleted it."""
        crashed: State[Any] = Crashed(message="its training ended before")
        try:
            match run:
                case FlowRun(state_type=StateType.PENDING):
                    self._client.delete_flow_run(run.id)
                case FlowRun():
                    # The place of the step follows it.
                    self._client.set_flow_run_state(run.id, crashed, force=True)
                case TaskRun(task_key=key, state_type=StateType.PENDING) if key == FLOW:
                    self._client.request("DELETE", "/task_runs/{id}", path_params={"id": run.id})
                case _:
                    self._client.set_task_run_state(run.id, crashed, force=True)
        except httpx.HTTPStatusError as error:
            if error.response.status_code in _OF_ALL:
                raise
            return False
        except PrefectException:
            return False
        return True

    def _left(self, flow: str) -> list[TaskRun]:
        """Task runs under way of those runs of a flow that ended; the place of a step is one of its training's."""
        ended = FlowRunFilterEndTime(before_=datetime.now(UTC) - self._recorded)
        final = FlowRunFilterState(type=FlowRunFilterStateType(any_=_FINAL))
        under_way = TaskRunFilterState(type=TaskRunFilterStateType(any_=_UNDER_WAY), name=None)
        return self._client.read_task_runs(
            flow_filter=FlowFilter(name=FlowFilterName(any_=[flow])),
            flow_run_filter=FlowRunFilter(end_time=ended, state=final),
            task_run_filter=TaskRunFilter(state=under_way),
        )
