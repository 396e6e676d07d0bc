"""Prefect tasks that run at once, as the steps of an iteration do."""

import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest
from prefect import flow
from prefect.states import Completed

from flows.orchestration import Call, as_task, side_by_side

pytestmark = pytest.mark.usefixtures("prefect_server")


def in_a_flow(*calls: Call, after: dict[str, str] | None = None) -> list[Any]:
    """Results of calls, which have their numbers as names; `after` has the one that another waits for."""
    named, waits = {str(number): call for number, call in enumerate(calls)}, after or {}

    def ready(ended: Mapping[str, Any]) -> dict[str, Call]:
        left = {name: call for name, call in named.items() if name not in ended}
        return {name: call for name, call in left.items() if waits.get(name) in (None, *ended)}

    @flow
    def alone() -> list[Any]:
        ended = side_by_side(ready)
        return [ended[name] for name in named]

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


@as_task("waiting")
def waiting(index: int, reached: threading.Event) -> bool:
    return reached.wait(timeout=60)


@as_task("setting")
def setting(index: int, reached: threading.Event) -> None:
    reached.set()


def test_one_begins_when_its_inputs_exist_whatever_else_still_runs() -> None:
    """As an update does, beside which a run generates."""
    reached = threading.Event()
    parameters = {"index": 1, "reached": reached}
    calls = [Call(waiting, parameters, {}), Call(stored, {"index": 1}, {}), Call(setting, parameters, {})]
    assert in_a_flow(*calls, after={"2": "1"}) == [True, 10, None]


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
