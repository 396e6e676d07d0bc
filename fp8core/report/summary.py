"""The results of a training, as `summary.json` has them."""

from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

from fp8core.metrics.reward import REWARD, SIGNAL
from fp8core.metrics.rollout import TOKENS
from fp8core.rl.alignment_metrics import COMPARED_TOKENS, TMPE, TOKENS_DIFFERING
from fp8core.store.metrics import HELDOUT, History, Interval, series

REPORT = "report.html"
CURVES = "curves.png"

EDGE_STEPS = 10
Learning = Literal["learned", "learned its prompts alone", "not learned", "got worse", "too short to tell"]


class ComparedTokens(NamedTuple):
    """The tokens on which both policies were compared, and their share of all; 0 and 1 where that is not known."""

    tokens: int
    share: float

    @property
    def words(self) -> str:
        if self.share < 1:
            return f"the {self.tokens:,} tokens that were compared, {100 * self.share:.2g} % of all"
        return f"all {self.tokens:,} tokens" if self.tokens else "all tokens"


def compared_tokens(history: History) -> ComparedTokens:
    rows = [row for row in history if COMPARED_TOKENS.name in row]
    count, total = (int(sum(row.get(name, 0.0) for row in rows)) for name in (COMPARED_TOKENS.name, TOKENS.name))
    return ComparedTokens(count, min(1.0, count / total) if total else 1.0)


def edge_steps(steps: int) -> int:
    """The number of steps at each end of a run that are averaged: ten, or half of a short run's."""
    return max(1, min(EDGE_STEPS, steps // 2))


def first_steps(values: Sequence[float]) -> float:
    return fmean(values[: edge_steps(len(values))])


def last_steps(values: Sequence[float]) -> float:
    return fmean(values[-edge_steps(len(values)) :])


def union_seconds(intervals: Iterable[Interval]) -> float:
    """Length of the union of [start, end] intervals, which may overlap and come in any order."""
    total = 0.0
    covered_to = float("-inf")
    for start, end in sorted(intervals):
        assert start <= end, f"interval [{start}, {end}] ends before it starts"
        total += max(0.0, end - max(start, covered_to))
        covered_to = max(covered_to, end)
    return total


def overhead_ms(step_interval: Interval, task_intervals: Iterable[Interval]) -> float:
    """Milliseconds of the step outside the union of its tasks."""
    start, end = step_interval
    inside = [(max(start, first), min(end, last)) for first, last in task_intervals if first < end and last > start]
    return 1000.0 * (end - start - union_seconds(inside))


def summarise(history: History, overheads: Sequence[float]) -> dict[str, Any]:
    """The results of all steps of a run, None where nothing was measured.

    `reward_first10` and `reward_last10` are means of `reward_edge_steps` steps: ten, or half of a shorter run.
    `overheads` are milliseconds in which no task ran, of the steps of this process.
    """
    _, rewards = series(history, REWARD.name)
    _, heldout = series(history, HELDOUT.name)
    _, tmpe = series(history, TMPE.name)
    return {
        "steps": len(rewards),
        "reward_first10": first_steps(rewards) if rewards else None,
        "reward_last10": last_steps(rewards) if rewards else None,
        "reward_edge_steps": edge_steps(len(rewards)) if rewards else 0,
        "heldout_first": heldout[0] if heldout else None,
        "heldout_last": heldout[-1] if heldout else None,
        "tmpe_max": max(tmpe, default=None),
        "tokens_differing": int(sum(series(history, TOKENS_DIFFERING.name)[1])),
        "tokens_compared": compared_tokens(history).tokens,
        "steps_without_signal": series(history, SIGNAL.name)[1].count(0.0),
        "overhead_ms_per_step": {"median": median(overheads), "mean": fmean(overheads)} if overheads else None,
    }
