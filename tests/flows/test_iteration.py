"""Prefect tasks that run at once, as the steps of an iteration do."""

import threading
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
from prefect import flow
from prefect.states import Completed

from flows.orchestration import TaskCall, TaskOutcome, as_task, side_by_side

pytestmark = pytest.mark.usefixtures("prefect_server")


def in_a_flow(
    *calls: TaskCall, after: Mapping[str, str] = MappingProxyType({}), halt: threading.Event | None = None
) -> Any:
    """What they return; `after` maps one to another that must have ended."""
    named = {str(place): call for place, call in enumerate(calls)}

    def ready(ended: Mapping[str, TaskOutcome]) -> dict[str, TaskCall]:
        free = {name: call for name, call in named.items() if after.get(name, name) in {name, *ended}}
        return {name: call for name, call in free.items() if name not in ended}

    @flow
    def alone() -> list[Any]:
        ended = side_by_side(ready, (halt or threading.Event()).set)
        return [ended[name] for name in named]

    return alone()


@as_task("named")
def thread_of(index: int, barrier: threading.Barrier) -> str:
    barrier.wait(timeout=60)
    return threading.current_thread().name


def test_tasks_run_at_once_and_the_first_in_the_calling_thread() -> None:
    barrier = threading.Barrier(3)
    first, second, last = in_a_flow(
        *(TaskCall(thread_of, {"index": index, "barrier": barrier}, {}) for index in range(3))
    )
    assert first == threading.current_thread().name
    assert len({first, second, last}) == 3


@as_task("waiting")
def waiting(index: int, event: threading.Event) -> bool:
    return event.wait(timeout=60)


@as_task("setting")
def setting(index: int, event: threading.Event) -> None:
    event.set()


def test_a_task_begins_when_what_it_needs_has_ended_whatever_else_is_under_way() -> None:
    event = threading.Event()
    calls = [TaskCall(stored, {"index": 1}, {}), TaskCall(waiting, {"index": 1, "event": event}, {})]
    assert in_a_flow(*calls, TaskCall(setting, {"index": 1, "event": event}, {}), after={"2": "0"}) == [10, True, None]


@as_task("failing")
def failing(index: int, event: threading.Event) -> None:
    event.wait(timeout=60)
    raise ValueError("why")


@as_task("unending")
def unending(index: int, begun: threading.Event, halt: threading.Event, halted: list[bool]) -> None:
    begun.set()
    halted.append(halt.wait(timeout=20))


def test_a_failure_halts_a_task_that_begins_after_it_has() -> None:
    begun, halt, halted = threading.Event(), threading.Event(), list[bool]()
    calls = [
        TaskCall(stored, {"index": 1}, {}),
        TaskCall(failing, {"index": 1, "event": begun}, {}),
        TaskCall(unending, {"index": 1, "begun": begun, "halt": halt, "halted": halted}, {}),
    ]
    with pytest.raises(ValueError, match="why"):
        in_a_flow(*calls, after={"2": "0"}, halt=halt)
    assert halted == [True]


@as_task("placed")
def placed(index: int, event: threading.Event) -> str:
    event.set()
    return threading.current_thread().name


@pytest.mark.parametrize("here", [True, False])
def test_an_update_runs_in_the_calling_thread_beside_others(here: bool) -> None:
    event = threading.Event()
    calls = [TaskCall(stored, {"index": 1}, {}), TaskCall(waiting, {"index": 1, "event": event}, {})]
    _, waited, name = in_a_flow(*calls, TaskCall(placed, {"index": 1, "event": event}, {}, here), after={"2": "0"})
    assert waited
    assert (name == threading.current_thread().name) == here


@as_task("cached")
def stored(index: int) -> Any:
    return Completed(name="Cached", data=10 * index)


def test_a_task_may_return_the_state_it_ends_in() -> None:
    assert in_a_flow(TaskCall(stored, {"index": 1}, {})) == [10]
    assert in_a_flow(TaskCall(stored, {"index": 1}, {}), TaskCall(stored, {"index": 2}, {})) == [10, 20]


@as_task("raising")
def raising(index: int, error: Exception) -> None:
    raise error


@as_task("slow")
def slow(index: int, ended: list[float]) -> None:
    time.sleep(0.5)
    ended.append(time.perf_counter())


@pytest.mark.parametrize("raises_first", [True, False])
def test_what_one_raises_is_raised_when_all_have_ended(raises_first: bool) -> None:
    ended: list[float] = []
    calls = [
        TaskCall(raising, {"index": 1, "error": ValueError("why")}, {}),
        TaskCall(slow, {"index": 1, "ended": ended}, {}),
    ]
    halt = threading.Event()
    with pytest.raises(ValueError, match="why"):
        in_a_flow(*(calls if raises_first else reversed(calls)), halt=halt)
    assert ended
    assert halt.is_set()
