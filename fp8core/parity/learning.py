"""Learning of a variant beside BF16: differences of learning curves, paired by seed and prompt, with intervals.

Evaluations of one training are correlated: what is right at one step is mostly right at the next. So a curve never
counts as many values. Each pair of trainings gives one difference a prompt, or one delay, and intervals are over seeds
(and prompts).

Intervals of means are Student's t: over seeds, and over steps, which are correlated.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev

import numpy as np
from numpy.typing import NDArray


def mean_interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Interval of the mean of independent values; at least two."""
    assert len(values) > 1, "a spread needs two values"
    half = t_quantile(0.5 + confidence / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def block_means(values: Sequence[float]) -> list[float]:
    """Means of consecutive blocks of about the square root of the number of values; what is left joins the last block.

    Steps of one training are correlated, so they are no independent values. Means of blocks that are longer than the
    correlation nearly are (batch means; Law, Simulation Modeling and Analysis, section 9.5.3).
    """
    length = max(1, math.isqrt(len(values)))
    starts = [block * length for block in range(len(values) // length)]
    return [fmean(values[start : None if start == starts[-1] else start + length]) for start in starts]


@cache
def t_quantile(probability: float, degrees: int) -> float:
    """The value that a t-distributed variable stays below with `probability` (0.5 to 1, exclusive)."""
    assert 0.5 <= probability < 1, "the upper half"
    low, high = 0.0, 1.0
    while _central(high, degrees) < 2 * probability - 1:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _central(middle, degrees) < 2 * probability - 1 else (low, middle)
    return high


def _central(t: float, degrees: int) -> float:
    """P(|T| <= t) for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(1 + odd, degrees, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


@dataclass(frozen=True, eq=False)
class LearningCurve:
    """Held-out scores of one training: steps, ids of the prompts, and scores [step, prompt]."""

    steps: tuple[int, ...]
    prompts: tuple[str, ...]
    scores: NDArray[np.float64]

    @property
    def accuracies(self) -> list[float]:
        """Of each step."""
        return [float(value) for value in self.scores.mean(axis=1)]

    def mean_of_last(self, count: int) -> float:
        """Accuracy over the last `count` evaluations."""
        return float(self.scores[-count:].mean())


@dataclass(frozen=True)
class Pair:
    """Curves of one seed: a variant's, and BF16's."""

    variant: LearningCurve
    baseline: LearningCurve

    def __post_init__(self) -> None:
        assert self.variant.steps == self.baseline.steps, "both were evaluated at the same steps"
        assert self.variant.prompts == self.baseline.prompts, "both answered the same prompts"


@dataclass(frozen=True)
class Estimate:
    """A mean over pairs with its interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Delay:
    """Steps that variants need beyond BF16's to reach an accuracy.

    estimate: None with fewer than two pairs that can be compared. baseline: mean of BF16's steps. unreached: variants
    that never reach it where BF16 does; they count with their last step, which is less than they need.
    """

    estimate: Estimate | None
    baseline: float
    unreached: int


def curve_difference(pairs: Sequence[Pair], confidence: float) -> Estimate:
    """Accuracy of variants minus BF16, the mean of all evaluations after the first update; two pairs at least."""
    return _difference(pairs, lambda curve: curve.scores[1:] if len(curve.steps) > 1 else curve.scores, confidence)


def end_difference(pairs: Sequence[Pair], last: int, confidence: float) -> Estimate:
    """Accuracy of variants minus BF16, the mean of the last `last` evaluations; two pairs at least."""
    return _difference(pairs, lambda curve: curve.scores[-last:], confidence)


def delay(pairs: Sequence[Pair], reach: float, confidence: float) -> Delay:
    """Steps to reach an accuracy, of variants minus BF16. A pair in which neither reaches it is left out."""
    differences, baselines, unreached = [], [], 0
    for pair in pairs:
        ours, theirs = (steps_to_reach(curve, reach) for curve in (pair.variant, pair.baseline))
        if ours is None and theirs is None:
            continue
        unreached += ours is None
        end = float(pair.baseline.steps[-1])
        differences.append((end if ours is None else ours) - (end if theirs is None else theirs))
        baselines.append(end if theirs is None else theirs)
    if len(differences) < 2:
        return Delay(None, fmean(baselines) if baselines else math.inf, unreached)
    return Delay(Estimate(fmean(differences), *mean_interval(differences, confidence)), fmean(baselines), unreached)


def steps_to_reach(curve: LearningCurve, reach: float) -> float | None:
    """Where the straight line between two evaluations first crosses an accuracy; None when none does."""
    before = None
    for step, accuracy in zip(curve.steps, curve.accuracies, strict=True):
        if accuracy >= reach:
            if before is None:
                return float(step)
            return before[0] + (step - before[0]) * (reach - before[1]) / (accuracy - before[1])
        before = (float(step), accuracy)
    return None


def _difference(
    pairs: Sequence[Pair], window: Callable[[LearningCurve], NDArray[np.float64]], confidence: float
) -> Estimate:
    table = np.stack([(window(pair.variant) - window(pair.baseline)).mean(axis=0) for pair in pairs])
    return crossed_interval(table, confidence)


def crossed_interval(table: NDArray[np.float64], confidence: float) -> Estimate:
    """Interval of the mean of [seed, prompt], of which both are samples of more: two seeds at least.

    The variance is that of two crossed random effects, (MS_seeds + MS_prompts - MS_rest) / cells (Searle, Casella and
    McCulloch, Variance Components, 1992, chapter 4). It is never less than seeds alone make it. Degrees of freedom are
    those of the seeds, the fewer.
    """
    seeds, prompts = table.shape
    assert seeds > 1, "a spread needs two seeds"
    mean = float(table.mean())
    rows, columns = table.mean(axis=1), table.mean(axis=0)
    variance = prompts * float(rows.var(ddof=1))
    if prompts > 1:
        of_prompts = seeds * float(columns.var(ddof=1))
        rest = float(((table - rows[:, None] - columns + mean) ** 2).sum()) / ((seeds - 1) * (prompts - 1))
        variance += max(0.0, of_prompts - rest)
    half = t_quantile(0.5 + confidence / 2, seeds - 1) * math.sqrt(variance / table.size)
    return Estimate(mean, mean - half, mean + half)
