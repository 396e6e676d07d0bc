"""The results of a training, as `summary.json` has them."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from fp8core.report.chart import counted
from fp8core.store.metrics import (
    COMPARED,
    GAP,
    GAP_ACCURACY,
    GAP_BF16,
    GAP_DIFFERENCE,
    GAP_HIGH,
    GAP_KL,
    GAP_LOW,
    GAP_PROMPTS,
    GAP_SAME,
    GAP_SHIFT,
    HELDOUT,
    REWARD,
    SIGNAL,
    TMPE,
    TOKENS,
    TOKENS_DIFFERING,
    History,
    Interval,
    series,
)

REPORT, CURVES = "report.html", "curves.png"

EDGE_STEPS = 10
Learning = Literal["learned", "learned its prompts alone", "not learned", "got worse", "too short to tell"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Overhead(_Frozen):
    """Milliseconds of a step in which no task ran."""

    median: float
    mean: float


class ComparedTokens(NamedTuple):
    """The tokens on which both policies were compared, and their share of all; 0 and 1 where that is not known."""

    tokens: int
    share: float

    @property
    def words(self) -> str:
        if self.share < 1:
            return f"the {self.tokens:,} tokens that were compared, {100 * self.share:.2g} % of all"
        return f"all {self.tokens:,} tokens" if self.tokens else "all tokens"


class PrecisionGap(_Frozen):
    """FP8 and BF16 of the same weights, at step 0.

    `nats` is the mean |d| of a sampled token. `difference` is of accuracies, FP8 - BF16, with its 95 % interval. `kl`,
    `same_choice` and `answer_shift` are as in `evaluation.measure.PartCost`.
    """

    nats: float
    accuracy: float
    bf16_accuracy: float
    difference: float
    difference_low: float
    difference_high: float
    prompts: int
    kl: float
    same_choice: float
    answer_shift: float | None = None

    @property
    def difference_words(self) -> str:
        interval = f"[{self.difference_low:+.3f}, {self.difference_high:+.3f}]"
        return f"{self.difference:+.3f} {interval} on {counted(self.prompts, 'prompt')}"


class Summary(_Frozen):
    """The result of a run, as `--json` writes it; None where nothing was measured, or there is nothing to diagnose.

    `reward_first10` and `reward_last10` are means of `reward_edge_steps` steps: ten, or half of a shorter run.
    """

    run: str
    mlflow_run_id: str
    chain_head: str
    weights_digest: str
    steps: int
    reward_first10: float | None
    reward_last10: float | None
    reward_edge_steps: int
    heldout_first: float | None
    heldout_last: float | None
    tmpe_max: float | None
    tokens_differing: int
    tokens_compared: int = 0
    tokens_compared_share: float = 1.0
    steps_without_signal: int
    diagnosis: str | None = None
    precision_gap: PrecisionGap | None = None
    bounds: str
    bounds_crossed: int | None
    overhead_ms_per_step: Overhead | None
    seconds: dict[str, float]


def precision_gap(history: History) -> PrecisionGap | None:
    row = next((row for row in history if GAP in row), None)
    if row is None:
        return None
    return PrecisionGap(
        nats=row[GAP],
        accuracy=row[GAP_ACCURACY],
        bf16_accuracy=row[GAP_BF16],
        difference=row[GAP_DIFFERENCE],
        difference_low=row[GAP_LOW],
        difference_high=row[GAP_HIGH],
        prompts=int(row[GAP_PROMPTS]),
        kl=row[GAP_KL],
        same_choice=row[GAP_SAME],
        answer_shift=row.get(GAP_SHIFT),
    )


def compared_tokens(history: History) -> ComparedTokens:
    rows = [row for row in history if COMPARED in row]
    count, written = (int(sum(row.get(name, 0.0) for row in rows)) for name in (COMPARED, TOKENS))
    return ComparedTokens(count, min(1.0, count / written) if written else 1.0)


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


def summarise(
    history: History,
    overheads: Sequence[float],
    *,
    run: str,
    mlflow_run_id: str,
    chain_head: str,
    weights_digest: str,
    total_seconds: float,
    task_seconds: Mapping[str, float],
    bounds: str,
    bounds_crossed: int | None,
    diagnosis: str | None = None,
) -> Summary:
    """Summarise a run by all of its steps; `overheads` are milliseconds that those of this process spent outside tasks.

    `bounds` is what the run was held to, after the bounds that it crossed. `bounds_crossed` is how often; None: nothing
    was judged.
    """
    _, rewards = series(history, REWARD)
    _, heldout = series(history, HELDOUT)
    _, tmpe = series(history, TMPE)
    _, differing = series(history, TOKENS_DIFFERING)
    _, signals = series(history, SIGNAL)
    compared = compared_tokens(history)
    return Summary(
        run=run,
        mlflow_run_id=mlflow_run_id,
        chain_head=chain_head,
        weights_digest=weights_digest,
        steps=len(rewards),
        reward_first10=first_steps(rewards) if rewards else None,
        reward_last10=last_steps(rewards) if rewards else None,
        reward_edge_steps=edge_steps(len(rewards)) if rewards else 0,
        heldout_first=heldout[0] if heldout else None,
        heldout_last=heldout[-1] if heldout else None,
        tmpe_max=max(tmpe, default=None),
        tokens_differing=int(sum(differing)),
        tokens_compared=compared.tokens,
        tokens_compared_share=compared.share,
        steps_without_signal=signals.count(0.0),
        diagnosis=diagnosis,
        precision_gap=precision_gap(history),
        bounds=bounds,
        bounds_crossed=bounds_crossed,
        overhead_ms_per_step=Overhead(median=median(overheads), mean=fmean(overheads)) if overheads else None,
        seconds={**task_seconds, "total": total_seconds},
    )
