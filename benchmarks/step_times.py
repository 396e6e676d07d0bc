"""When vLLM's steps of a rollout came: whether a slow one is slow throughout, or stands still now and then."""

import itertools
import time
from collections.abc import Iterable, Sequence
from statistics import median

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


def _summary(ordered: Sequence[float]) -> dict[str, float]:
    found = {"median": median(ordered), "p99": ordered[len(ordered) * 99 // 100], "max": ordered[-1]}
    return {name: round(1000 * value, 2) for name, value in found.items()}
