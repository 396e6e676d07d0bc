"""The numbers of each training of a parity run, and how two trainings differ.

Differences of learning curves are paired by seed and prompt. Evaluations of one training are correlated. So each pair
of trainings gives one difference a prompt, or one delay, and intervals are over seeds (and prompts).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from fp8core.config.run import RunConfig
from fp8core.config.training import CorrectionConfig
from fp8core.evaluation.measure import Estimate
from fp8core.report.run_data import RunData
from fp8core.report.run_verdict import rollout_speed
from fp8core.rollout.registry import engine_entry
from fp8core.store.artifacts import ArtifactError, ArtifactStore
from fp8core.store.ledger import START
from fp8core.store.metrics import ESS, HELDOUT, K3, TMPE, series

BASELINE = "bf16"
STRESS = "stress"
Side = Literal["bf16", "fp8", "fp8+kv"]

_FORMATS = {"bf16": ("bf16", "bf16"), "fp8": ("fp8_block", "bf16"), "fp8+kv": ("fp8_block", "fp8")}
_UNCORRECTED = {"correction.method": "none", "correction.preset": None, "precision.accept_mismatch": True}


@dataclass(frozen=True)
class Variant:
    """Formats of both sides, and what else differs from the configuration."""

    name: str
    rollout: Side
    training: Side
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def matched(self) -> bool:
        return self.rollout == self.training


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(BASELINE, "bf16", "bf16"),
        Variant("fp8-rollout", "fp8", "bf16", _UNCORRECTED),
        Variant("fp8-rollout-corrected", "fp8", "bf16"),
        Variant("fp8-rollout-kv", "fp8+kv", "bf16", _UNCORRECTED),
        Variant("fp8-rollout-kv-corrected", "fp8+kv", "bf16"),
        Variant("fp8-end-to-end", "fp8", "fp8"),
        Variant("fp8-end-to-end-kv", "fp8+kv", "fp8+kv"),
        # Many large updates on each rollout: raw importance weights must average 1.
        Variant(STRESS, "fp8+kv", "fp8+kv"),
        Variant("asynchronous", "fp8+kv", "fp8+kv", {"pipeline.mode": "asynchronous"}),
    )
}
"""By name, the baseline first."""


def variant_settings(variant: Variant, config: RunConfig, seed: int) -> dict[str, Any]:
    """Overrides of `config`, dotted keys, that make it the variant with a seed."""
    # The verdict judges alignment at the end, so bounds only warn.
    settings: dict[str, Any] = {"seed": seed, "alignment.stop.action": "warn"}
    for side, formats in (("rollout", variant.rollout), ("training", variant.training)):
        linear, kv_cache = _FORMATS[formats]
        settings |= {f"precision.{side}.linear": linear, f"precision.{side}.kv_cache": kv_cache}
    settings["precision.training.backward"] = None
    if variant.rollout != "fp8+kv":
        settings |= engine_entry(config).stock
    if config.correction.method == "none":
        settings |= {f"correction.{key}": value for key, value in CorrectionConfig().model_dump(mode="json").items()}
    if variant.name == STRESS:
        settings |= {
            "training.minibatches": min(8, config.rollout.prompts_per_step),
            "training.learning_rate": min(1.0, 10 * config.training.learning_rate),
        }
    return settings | dict(variant.settings)


WEIGHT, RATIO = "alignment/sampling_importance_ratio", "train/ratio_mean"


@dataclass(frozen=True, eq=False)
class LearningCurve:
    """Held-out scores of one training: steps, ids of the prompts, and scores [step, prompt]."""

    steps: tuple[int, ...]
    prompts: tuple[str, ...]
    scores: NDArray[np.float64]

    @property
    def accuracies(self) -> list[float]:
        return [float(value) for value in self.scores.mean(axis=1)]

    def mean_of_last(self, count: int) -> float:
        return float(self.scores[-count:].mean())


@dataclass(frozen=True)
class Measured:
    """One training. None, and an empty tuple: nothing was measured.

    steps: committed, and requested. accuracy: held-out, mean of the last evaluations. Errors, k3 (nats), ess
    (share), weights and ratios (mean raw importance weight of the mismatch and of the updates) have a value for each
    step. ratios are None for `gspo`, whose geometric mean is below 1. speed: generated tokens per second.
    """

    variant: str
    seed: int
    steps: tuple[int, int]
    accuracy: float | None
    curve: LearningCurve | None
    errors: tuple[float, ...]
    k3: tuple[float, ...]
    ess: tuple[float, ...]
    weights: tuple[float, ...]
    ratios: tuple[float, ...] | None
    speed: float | None

    @property
    def whole(self) -> bool:
        return self.steps[0] == self.steps[1]


def measure(run: RunData, variant: str, seed: int, last: int) -> Measured:
    """The numbers of a training; `last` held-out accuracies count as its end."""

    def values(metric: str) -> tuple[float, ...]:
        return tuple(series(run.history, metric)[1])

    accuracies = values(HELDOUT)
    return Measured(
        variant=variant,
        seed=seed,
        steps=(max(run.view.steps, default=START), run.requested or -1),
        accuracy=fmean(accuracies[-last:]) if accuracies else None,
        curve=learning_curve(run),
        errors=values(TMPE),
        k3=values(K3),
        ess=values(ESS),
        weights=values(WEIGHT),
        ratios=None if run.view.config is not None and run.view.config.loss.policy == "gspo" else values(RATIO),
        speed=rollout_speed(run),
    )


def learning_curve(run: RunData) -> LearningCurve | None:
    """Scores of all evaluations of a run; None when one of them is gone, or has no scores of the same prompts."""
    scores: dict[int, dict[str, float]] = {}
    store = ArtifactStore(run.view.folder)
    for commit in run.view.steps.values():
        for ref in (ref for ref in commit.artifacts.values() if ref.kind == "evaluation"):
            try:
                content = store.get_json(ref)
            except ArtifactError:
                return None
            if content:  # Steps between evaluations have an empty one.
                scores[commit.step] = content.get("scores", {})
    prompts = tuple(sorted(next(iter(scores.values()), {})))
    if not prompts or any(tuple(sorted(of)) != prompts for of in scores.values()):
        return None
    steps = tuple(sorted(scores))
    return LearningCurve(steps, prompts, np.array([[scores[step][prompt] for prompt in prompts] for step in steps]))


def mean_interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Interval of the mean of independent values; at least two."""
    assert len(values) > 1, "a spread needs two values"
    half = float(stats.sem(values) * stats.t.ppf(0.5 + confidence / 2, len(values) - 1))
    return fmean(values) - half, fmean(values) + half


def block_means(values: Sequence[float]) -> list[float]:
    """Means of blocks of about sqrt(n) values, which are nearly independent where steps are correlated.

    (Batch means; Law, Simulation Modeling and Analysis, section 9.5.3.) The last block takes the rest.
    """
    length = max(1, math.isqrt(len(values)))
    starts = [block * length for block in range(len(values) // length)]
    return [fmean(values[start : None if start == starts[-1] else start + length]) for start in starts]


@dataclass(frozen=True)
class Pair:
    """Curves with the same steps and prompts."""

    variant: LearningCurve
    baseline: LearningCurve


@dataclass(frozen=True)
class Delay:
    """Steps that variants need beyond BF16's to reach an accuracy.

    estimate: None with fewer than two pairs that can be compared. baseline: mean of BF16's steps. unreached: variants
    that never reach it where BF16 does; they count with their last step.
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
        end = float(pair.baseline.steps[-1])
        ours, theirs = (steps_to_reach(curve, reach) for curve in (pair.variant, pair.baseline))
        if ours is None and theirs is None:
            continue
        unreached += ours is None
        baselines.append(end if theirs is None else theirs)
        differences.append((end if ours is None else ours) - baselines[-1])
    if len(differences) < 2:
        return Delay(None, math.nan, unreached)
    estimate = Estimate(fmean(differences), *mean_interval(differences, confidence))
    return Delay(estimate, fmean(baselines), unreached)


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

    The variance is that of two crossed random effects, (MS_seeds + MS_prompts - MS_rest) / cells. (Searle, Casella and
    McCulloch, Variance Components, 1992, chapter 4.) It is never less than seeds alone make it.
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
    half = float(stats.t.ppf(0.5 + confidence / 2, seeds - 1)) * math.sqrt(variance / table.size)
    return Estimate(mean, mean - half, mean + half)
