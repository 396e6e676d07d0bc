"""Prefect tasks that run at once, as the steps of an iteration do."""

import threading
import time
from typing import Any

import pytest
from prefect import flow
from prefect.states import Completed

from flows.orchestration import Call, as_task, side_by_side

pytestmark = pytest.mark.usefixtures("prefect_server")


def in_a_flow(*calls: Call) -> list[Any]:
    @flow
    def alone() -> list[Any]:
        return side_by_side(list(calls))

    return alone()


@as_task("named")
def thread_of(index: int, barrier: threading.Barrier) -> str:
    barrier.wait(timeout=60)
    return threading.current_thread().name


def test_tasks_run_at_once_and_the_last_in_the_calling_thread() -> None:
    barrier = threading.Barrier(3)
    first, second, last = in_a_flow(*(Call(thread_of, {"index": index, "barrier": barrier}, {}) for index in range(3)))
    assert last == threading.current_thread().name
    assert len({first, second, last}) == 3


@as_task("cached")
def stored(index: int) -> Any:
    return Completed(name="Cached", data=10 * index)


def test_a_task_may_return_the_state_it_ends_in() -> None:
    assert in_a_flow(Call(stored, {"index": 1}, {})) == [10]
    assert in_a_flow(Call(stored, {"index": 1}, {}), Call(stored, {"index": 2}, {})) == [10, 20]


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
    calls = [Call(raising, {"index": 1, "error": ValueError("why")}, {}), Call(slow, {"index": 1, "ended": ended}, {})]
    with pytest.raises(ValueError, match="why"):
        in_a_flow(*(calls if raises_first else reversed(calls)))
    assert ended
