"""Flow runs of a training's steps while the server is away, and what a killed process left of them."""

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from prefect import flow, runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterTags
from prefect.client.schemas.objects import RunInput, TaskRun
from prefect.context import FlowRunContext
from prefect.states import Running
from prefect.utilities.engine import emit_task_run_state_change_event

from flows.ended_trainings import EndedTrainings
from flows.step_runs import FLOW, StepRuns, step_client

STEPS = 1000


class Line:
    """A client whose requests are refused while it is cut, and wait for a second before; otherwise they may be late."""

    def __init__(self, client: SyncPrefectClient) -> None:
        self._client, self.cut, self.late, self.api_url = client, False, 0.0, client.api_url

    def __getattr__(self, name: str) -> Any:
        def request(*arguments: Any, **options: Any) -> Any:
            if self.cut:
                time.sleep(1)
                raise httpx.ConnectError("refused")
            time.sleep(self.late)
            return getattr(self._client, name)(*arguments, **options)

        return request


class RefusesOneDeletion:
    """A client whose server never deletes the first flow run that it is asked to delete."""

    def __init__(self, client: SyncPrefectClient) -> None:
        self._client, self._refused = client, list[UUID]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def delete_flow_run(self, number: UUID) -> None:
        if number in [*self._refused, number][:1]:
            self._refused.append(number)
            request = httpx.Request("DELETE", f"http://server/flow_runs/{number}")
            raise httpx.HTTPStatusError("refused", request=request, response=httpx.Response(500, request=request))
        self._client.delete_flow_run(number)


@pytest.fixture
def line(prefect_server: None) -> Iterator[Line]:
    with step_client() as client:
        yield Line(client)


def in_a_flow(body: Callable[[], None], name: str = "alone") -> UUID:
    @flow(name=name, persist_result=False)
    def alone() -> UUID:
        body()
        return UUID(runtime.flow_run.id)

    return alone()


def shown(tag: str) -> list[tuple[str, str]]:
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=[tag])))
    return sorted((run.name, run.state_type.value) for run in found if run.state_type is not None)


def tasks_of(flow_run: UUID) -> list[tuple[str, str]]:
    below = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run]))
    with get_client(sync_client=True) as client:
        return sorted((run.name, str(run.state_name)) for run in client.read_task_runs(flow_run_filter=below))


def assert_tasks(flow_run: UUID, expected: list[tuple[str, str]]) -> None:
    """As `assert_shown`: the server records them when it can."""
    until = time.monotonic() + 30
    while tasks_of(flow_run) != expected and time.monotonic() < until:
        time.sleep(0.1)
    assert tasks_of(flow_run) == expected


def assert_shown(tag: str, expected: list[tuple[str, str]], name: str = "step") -> None:
    """Runs whose names begin so are as expected. What a flow leaves at its end may be on its way for some seconds."""

    def found() -> list[tuple[str, str]]:
        return [each for each in shown(tag) if each[0].startswith(name)]

    until = time.monotonic() + 30
    while found() != expected and time.monotonic() < until:
        time.sleep(0.1)
    assert found() == expected


def test_a_training_waits_once_for_a_lost_server_and_its_steps_come_back(line: Line) -> None:
    tag, notes, has_page = uuid4().hex, list[str](), list[bool]()

    def take(runs: StepRuns) -> None:
        runs.begin(len(has_page) + 1, [])
        has_page.append(bool(runs.end()))

    def training() -> None:
        with StepRuns(line, notes.append) as runs:  # type: ignore[arg-type]
            runs.follow(tag, STEPS)
            take(runs)
            line.cut = True
            while has_page[-1]:
                take(runs)
            began = time.monotonic()
            for _ in range(20):
                take(runs)
            assert time.monotonic() - began < 5
            line.cut = False
            while len(has_page) < STEPS and not has_page[-1]:
                time.sleep(0.1)
                take(runs)
            while len(has_page) < STEPS and not all(has_page[-3:]):
                take(runs)

    in_a_flow(training)
    assert len(notes) == 1
    assert "refused" in notes[0]
    assert_shown(tag, sorted((f"step {step}", "COMPLETED") for step, page in enumerate(has_page, 1) if page))


def test_the_graph_has_every_edge_of_steps_that_end_before_their_places_are_recorded(
    line: Line, graph_as: Callable[[UUID, dict[str, set[str]]], dict[str, set[str]]]
) -> None:
    pages, expected = list[UUID](), dict[str, set[str]]()

    def training() -> None:
        context = FlowRunContext.get()
        assert context is not None
        assert context.flow_run is not None
        pages.append(context.flow_run.id)
        with StepRuns(line, print) as runs:  # type: ignore[arg-type]
            runs.follow(uuid4().hex, STEPS)
            before, label = set[RunInput](), set[str]()
            for index in range(1, STEPS + 1):
                runs.begin(index, before)
                if own := runs.end():
                    expected[f"{FLOW} / step {index}"] = label
                    before, label = own, {f"{FLOW} / step {index}"}
                else:
                    time.sleep(0.1)  # The server is slow.
                if len(expected) == 12:
                    return

    in_a_flow(training)
    assert len(expected) == 12
    assert graph_as(pages[0], expected) == expected


def test_what_a_killed_process_left_is_settled_when_the_training_continues(line: Line) -> None:
    tag = uuid4().hex

    def killed() -> None:
        runs = StepRuns(line, print).__enter__()  # type: ignore[arg-type]
        runs.follow(tag, STEPS)
        runs.begin(1, [])
        assert_shown(tag, [("step 1", "RUNNING"), ("step 2", "PENDING"), ("step 3", "PENDING")])

    def continued() -> None:
        with StepRuns(line, print) as runs:  # type: ignore[arg-type]
            runs.follow(tag, STEPS)
            runs.begin(1, [])
            runs.end()

    in_a_flow(killed)
    in_a_flow(continued)
    assert_shown(tag, [("step 1", "COMPLETED"), ("step 1", "CRASHED")])


def test_a_step_that_is_open_when_its_training_is_retried_ends_and_begins_again(line: Line) -> None:
    tag = uuid4().hex

    def retried() -> None:
        with StepRuns(line, print) as runs:  # type: ignore[arg-type]
            runs.follow(tag, 2)
            runs.begin(1, [])
            runs.follow(tag, 2)
            runs.begin(1, [])
            runs.end()

    in_a_flow(retried)
    assert_shown(tag, [("step 1", "COMPLETED"), ("step 1", "CRASHED")], "step 1")


def test_a_training_that_ends_when_a_lost_server_answers_again_tells_it_everything(line: Line) -> None:
    tag = uuid4().hex

    def training() -> None:
        with StepRuns(line, print) as runs:  # type: ignore[arg-type]
            runs.follow(tag, 1)
            runs.begin(1, [])
            assert_shown(tag, [("step 1", "RUNNING")])
            line.cut = True
            runs.end()
            while not runs._away:
                time.sleep(0.1)
            line.cut, line.late = False, 1.0
        # At once: the process ends next.
        assert shown(tag) == [("step 1", "COMPLETED")]

    in_a_flow(training)


def test_what_a_training_left_is_settled_from_outside_once_it_has_ended(line: Line) -> None:
    tag, steps = uuid4().hex, list[UUID]()

    def killed() -> None:
        runs = StepRuns(line, print).__enter__()  # type: ignore[arg-type]
        runs.follow(tag, STEPS)
        runs.begin(1, [])
        assert_shown(tag, [("step 1", "RUNNING"), ("step 2", "PENDING"), ("step 3", "PENDING")])
        with runs.place():
            steps.append(FlowRunContext.get().flow_run.id)  # type: ignore[union-attr]
            task = TaskRun(name="rollout", flow_run_id=steps[0], task_key="rollout", dynamic_key="1", state=Running())
            emit_task_run_state_change_event(task, None, task.state)  # type: ignore[arg-type]

    training = in_a_flow(killed, "fp8-grpo")
    ahead = [(f"step {step}", "Pending") for step in range(2, 6)]
    assert_tasks(training, [("step 1", "Running"), *ahead])
    assert_tasks(steps[0], [("rollout", "Running")])
    with get_client(sync_client=True) as client:
        EndedTrainings(client, timedelta(minutes=10)).settle()
        assert tasks_of(training) == [("step 1", "Running"), *ahead]
        EndedTrainings(RefusesOneDeletion(client), timedelta(0)).settle()  # type: ignore[arg-type]
        assert [state for _, state in shown(tag)] == ["CRASHED", "PENDING"]
        EndedTrainings(client, timedelta(0)).settle()
        assert_shown(tag, [("step 1", "CRASHED")])
        assert_tasks(training, [("step 1", "Crashed")])
        EndedTrainings(client, timedelta(0)).settle()
    assert_tasks(steps[0], [("rollout", "Crashed")])
