"""When vLLM's steps of a rollout came, and what its processes did: whether a slow one is slow throughout, or stands
still now and then, and whether it waited for a GPU or for a processor.
"""

import gc
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from statistics import median
from typing import Any

import psutil

from fp8core.rollout.engine import Completion

QUARTERS = 4
BUSIEST = 3


def timed(steps: Iterable[Sequence[Completion]]) -> tuple[list[Completion], list[float]]:
    """The completions of a rollout (`VllmEngine.steps`), and the seconds from each step to the next."""
    found, seconds, last = list[Completion](), list[float](), time.perf_counter()
    for finished in steps:
        now = time.perf_counter()
        found += finished
        seconds.append(now - last)
        last = now
    return found, seconds


def by_quarter(seconds: Sequence[float]) -> list[dict[str, float]]:
    """Milliseconds of the steps of each quarter of a rollout: the median, that of one in a hundred, and the largest."""
    ends = [len(seconds) * quarter // QUARTERS for quarter in range(QUARTERS + 1)]
    return [_summary(sorted(seconds[start:end])) for start, end in itertools.pairwise(ends) if end > start]


@contextmanager
def processor_shares() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """How busy this process and its children were inside the block, asked for after it.

    A row a process, the busiest first, in shares of one processor: `all` of its threads, and its busiest `threads`,
    none of which can exceed 1. An engine whose scheduling thread is near 1 waits for a processor and not for its GPU;
    `all` near 1 with no thread near it is a lock that threads share. A process that ends inside the block has no row.
    """
    started = dict[psutil.Process, dict[int, float]]()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            started[process] = _thread_seconds(process)
    began = time.perf_counter()
    found = list[dict[str, Any]]()
    yield lambda: found
    elapsed = time.perf_counter() - began
    for process, earlier in started.items():
        with suppress(psutil.NoSuchProcess):
            spent = {i: seconds - earlier.get(i, 0.0) for i, seconds in _thread_seconds(process).items()}
            found.append({"process": _name(process), **_shares([seconds / elapsed for seconds in spent.values()])})
    found.sort(key=lambda row: row["all"], reverse=True)


@contextmanager
def garbage_collections() -> Iterator[Callable[[], dict[str, Any]]]:
    """What Python's garbage collector took of this process inside the block, asked for after it.

    While it looks at everything alive, nobody reads what the engine's process has done: steps come late, then at once.
    """
    began, seconds, frozen = [0.0], list[float](), gc.get_freeze_count()

    def heard(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            began[0] = time.perf_counter()
        else:
            seconds.append(time.perf_counter() - began[0])

    gc.callbacks.append(heard)
    try:
        yield lambda: {
            **{"count": len(seconds), "frozen": frozen},
            **_milliseconds(all=sum(seconds), max=max(seconds, default=0.0)),
        }
    finally:
        gc.callbacks.remove(heard)


def _name(process: psutil.Process) -> str:
    return "driver" if process.pid == os.getpid() else process.name()


def _thread_seconds(process: psutil.Process) -> dict[int, float]:
    return {thread.id: thread.user_time + thread.system_time for thread in process.threads()}


def _shares(threads: Sequence[float]) -> dict[str, Any]:
    busiest = sorted(threads, reverse=True)[:BUSIEST]
    return {"all": round(sum(threads), 3), "threads": [round(share, 3) for share in busiest]}


def _summary(ordered: Sequence[float]) -> dict[str, float]:
    return _milliseconds(median=median(ordered), p99=ordered[len(ordered) * 99 // 100], max=ordered[-1])


def _milliseconds(**seconds: float) -> dict[str, float]:
    return {name: round(1000 * value, 2) for name, value in seconds.items()}
