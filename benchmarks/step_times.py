"""When vLLM's steps of a rollout came, and what its processes did: whether a slow one is slow throughout, or stands
still now and then, and whether it waited for a GPU or for a processor.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import psutil

from fp8core.rollout.engine import Completion

QUARTERS = 4


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

    A row a process, the busiest first, in shares of one processor: `all` of its threads, and its `busiest` one, which
    cannot exceed 1. An engine whose scheduling thread is near 1 waits for a processor and not for its GPU.
    """
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    began, before = time.perf_counter(), [_thread_seconds(process) for process in processes]
    found = list[dict[str, Any]]()
    yield lambda: found
    elapsed = time.perf_counter() - began
    for process, earlier in zip(processes, before, strict=True):
        shares = [(spent - earlier.get(i, 0.0)) / elapsed for i, spent in _thread_seconds(process).items()]
        row = {"all": round(sum(shares), 3), "busiest": round(max(shares, default=0.0), 3)}
        found.append({"process": "driver" if process.pid == psutil.Process().pid else process.name(), **row})
    found.sort(key=lambda row: row["all"], reverse=True)


def _thread_seconds(process: psutil.Process) -> dict[int, float]:
    return {thread.id: thread.user_time + thread.system_time for thread in process.threads()}


def _summary(ordered: Sequence[float]) -> dict[str, float]:
    found = {"median": median(ordered), "p99": ordered[len(ordered) * 99 // 100], "max": ordered[-1]}
    return {name: round(1000 * value, 2) for name, value in found.items()}
