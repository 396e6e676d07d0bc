"""FP8 against BF16: the numbers of each training of a parity run, how two trainings differ, and the verdict.

Differences of learning curves are paired by seed and prompt. Evaluations of one training are correlated. So each pair
of trainings gives one difference a prompt, and intervals are over seeds (and prompts). A variant without all of its
numbers cannot pass: a run cut short is NOT ENOUGH DATA. One check beyond its bound is FAIL whatever else is missing.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from fp8core.config.parity import ParityConfig
from fp8core.config.run import RunConfig
from fp8core.config.training import CorrectionConfig
from fp8core.errors import printable_lines
from fp8core.evaluation.measure import CONFIDENCE, Estimate
from fp8core.metric import Metric
from fp8core.report.chart import MISSING, short
from fp8core.report.run_data import RunData
from fp8core.rl.alignment_metrics import ESS, K3, TMPE
from fp8core.rollout.registry import engine_entry
from fp8core.store.artifacts import ArtifactError, ArtifactStore
from fp8core.store.ledger import START
from fp8core.store.metrics import HELDOUT, series

BASELINE = "bf16"
Side = Literal["bf16", "fp8", "fp8+kv"]

_FORMATS = {"bf16": ("bf16", "bf16"), "fp8": ("fp8_block", "bf16"), "fp8+kv": ("fp8_block", "fp8")}
_NO_CORRECTION = {"correction.method": "none", "correction.preset": None, "precision.accept_mismatch": True}


class Variant(NamedTuple):
    """Formats of both sides, and what else differs from the configuration."""

    rollout: Side
    training: Side
    settings: Mapping[str, Any] = MappingProxyType({})

    @property
    def is_matched(self) -> bool:
        return self.rollout == self.training


# By name, the baseline first.
VARIANTS = {
    BASELINE: Variant("bf16", "bf16"),
    "fp8-rollout": Variant("fp8", "bf16", _NO_CORRECTION),
    "fp8-rollout-corrected": Variant("fp8", "bf16"),
    "fp8-end-to-end": Variant("fp8", "fp8"),
    "fp8-end-to-end-kv": Variant("fp8+kv", "fp8+kv"),
}


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
    return settings | dict(variant.settings)


@dataclass(frozen=True, eq=False)
class LearningCurve:
    """Held-out scores of one training: steps, ids of the prompts, and scores [step, prompt]."""

    steps: tuple[int, ...]
    prompts: tuple[str, ...]
    scores: NDArray[np.float64]

    @property
    def accuracies(self) -> list[float]:
        return [float(value) for value in self.scores.mean(axis=1)]


@dataclass(frozen=True)
class TrainingMeasurement:
    """One training. None, and an empty tuple: nothing was measured.

    steps: committed, and requested. accuracy: held-out, mean of the last evaluations. Errors, k3 (nats) and ess (share)
    have a value for each step.
    """

    variant: str
    seed: int
    steps: tuple[int, int]
    accuracy: float | None
    curve: LearningCurve | None
    errors: tuple[float, ...]
    k3: tuple[float, ...]
    ess: tuple[float, ...]

    @property
    def whole(self) -> bool:
        return self.steps[0] == self.steps[1]


def measure(run: RunData, variant: str, seed: int, last: int) -> TrainingMeasurement:
    """The numbers of a training; `last` held-out accuracies count as its end."""

    def values(metric: Metric) -> tuple[float, ...]:
        return tuple(series(run.history, metric.name)[1])

    accuracies = values(HELDOUT)
    return TrainingMeasurement(
        variant=variant,
        seed=seed,
        steps=(max(run.view.steps, default=START), run.requested or -1),
        accuracy=fmean(accuracies[-last:]) if accuracies else None,
        curve=learning_curve(run),
        errors=values(TMPE),
        k3=values(K3),
        ess=values(ESS),
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


@dataclass(frozen=True)
class Pair:
    """Curves with the same steps and prompts."""

    variant: LearningCurve
    baseline: LearningCurve


def curve_difference(pairs: Sequence[Pair]) -> Estimate:
    """Accuracy of variants minus BF16, the mean of all evaluations after the first update; two pairs at least."""
    return _difference(pairs, lambda curve: curve.scores[1:] if len(curve.steps) > 1 else curve.scores)


def end_difference(pairs: Sequence[Pair], last: int) -> Estimate:
    """Accuracy of variants minus BF16, the mean of the last `last` evaluations; two pairs at least."""
    return _difference(pairs, lambda curve: curve.scores[-last:])


def _difference(pairs: Sequence[Pair], window: Callable[[LearningCurve], NDArray[np.float64]]) -> Estimate:
    table = np.stack([(window(pair.variant) - window(pair.baseline)).mean(axis=0) for pair in pairs])
    return crossed_interval(table)


def crossed_interval(table: NDArray[np.float64]) -> Estimate:
    """Interval of the mean of [seed, prompt], of which both are samples of more: two seeds at least.

    The variance is that of two crossed random effects, (MS_seeds + MS_prompts - MS_rest) / cells. (Searle, Casella and
    McCulloch, Variance Components, 1992, chapter 4.) It is never less than seeds alone make it.
    """
    seeds, prompts = table.shape
    assert seeds > 1, "a spread needs two seeds"
    mean = float(table.mean())
    rows = table.mean(axis=1)
    columns = table.mean(axis=0)
    variance = prompts * float(rows.var(ddof=1))
    if prompts > 1:
        of_prompts = seeds * float(columns.var(ddof=1))
        rest = float(((table - rows[:, None] - columns + mean) ** 2).sum()) / ((seeds - 1) * (prompts - 1))
        variance += max(0.0, of_prompts - rest)
    half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, seeds - 1)) * math.sqrt(variance / table.size)
    return Estimate(mean, mean - half, mean + half)


PASS: Final = "PASS"
FAIL: Final = "FAIL"
NOT_ENOUGH: Final = "NOT ENOUGH DATA"
ParityOutcome = Literal["PASS", "FAIL", "NOT ENOUGH DATA"]


class Check(NamedTuple):
    variant: str
    name: str
    outcome: ParityOutcome
    found: str
    bound: str


def outcome_of(checks: Sequence[Check]) -> ParityOutcome:
    """FAIL when a check failed, else NOT ENOUGH DATA when one lacks data, else PASS."""
    outcomes = {check.outcome for check in checks}
    if FAIL in outcomes:
        return FAIL
    return NOT_ENOUGH if NOT_ENOUGH in outcomes else PASS


def headline_of(checks: Sequence[Check]) -> str:
    outcome = outcome_of(checks)
    lines = [f"{check.variant}: {check.name} {check.found}" for check in checks if check.outcome == outcome]
    return outcome if outcome == PASS else f"{outcome}: {'; '.join(lines)}"


def judge(
    measurements: Sequence[TrainingMeasurement],
    config: ParityConfig,
    *,
    variants: Sequence[str],
    seeds: Sequence[int],
    failures: Mapping[tuple[str, int], str],
) -> list[Check]:
    """Judge each requested variant, whether it was measured or not.

    `failures`: why a training failed, by variant and seed.
    """
    by_variant = {name: [one for one in measurements if one.variant == name] for name in variants}
    checks = list[Check]()
    for name in variants:
        runs = by_variant[name]
        checks.append(_complete(name, runs, seeds, failures))
        checks += _alignment(name, runs, config)
        if name != BASELINE:
            checks += _learning(name, runs, by_variant.get(BASELINE, []), config)
    return checks


def _complete(
    name: str, runs: Sequence[TrainingMeasurement], seeds: Sequence[int], failures: Mapping[tuple[str, int], str]
) -> Check:
    """A training that failed is a failure; one that was cut short, or has not begun, may still come."""
    reasons = [f"seed {seed}: {reason}" for (variant, seed), reason in failures.items() if variant == name]
    if reasons:
        return Check(name, "complete", FAIL, "; ".join(reasons), "all")
    whole = [seed for seed in seeds if any(run.seed == seed and run.whole for run in runs)]
    outcome: ParityOutcome = PASS if len(whole) == len(seeds) else NOT_ENOUGH
    share = f"{len(whole)} of {len(seeds)} seeds trained to their last step"
    return Check(name, "complete", outcome, share, "all")


def _alignment(name: str, runs: Sequence[TrainingMeasurement], config: ParityConfig) -> Iterator[Check]:
    error = config.error_matched if VARIANTS[name].is_matched else config.error_mismatched
    yield _worst(name, "largest probability error", [v for run in runs for v in run.errors], max, error)
    yield _worst(name, "largest k3 divergence", [v for run in runs for v in run.k3], max, config.k3)
    ess = [v for run in runs for v in run.ess]
    yield _worst(name, "smallest effective sample size", ess, min, config.effective_sample_size)


def _worst(
    name: str, what: str, values: Sequence[float], worst: Callable[[Sequence[float]], float], limit: float
) -> Check:
    sign = "<=" if worst is max else ">="
    bound = f"{sign} {limit:g}"
    if not values:
        return Check(name, what, NOT_ENOUGH, "not measured", bound)
    value = worst(values)
    beyond = value > limit if worst is max else value < limit
    text = "1 exactly" if value == 1 else f"{value:.8g}"
    return Check(name, what, FAIL if beyond else PASS, text, bound)


def _learning(
    name: str, runs: Sequence[TrainingMeasurement], baseline: Sequence[TrainingMeasurement], config: ParityConfig
) -> Iterator[Check]:
    pairs = _pairs(runs, baseline)
    what = "held-out accuracy minus BF16"
    enough = len(pairs) > 1
    curve = curve_difference(pairs) if enough else None
    end = end_difference(pairs, config.last_evaluations) if enough else None
    for check, gap, limit in ((what, curve, config.accuracy_gap), (f"{what}, at the end", end, config.end_gap)):
        bound = f">= -{limit:g}"
        if gap is None:
            yield Check(name, check, NOT_ENOUGH, f"{len(pairs)} pairs of seeds", bound)
        else:
            # An interval across the bound decides nothing.
            outcome: ParityOutcome = PASS if gap.low + limit >= 0 else FAIL if gap.high + limit < 0 else NOT_ENOUGH
            text = f"{gap.value:+.4f} ({gap.low:+.4f} to {gap.high:+.4f}, {len(pairs)} seeds)"
            yield Check(name, check, outcome, text, bound)


def _pairs(runs: Sequence[TrainingMeasurement], baseline: Sequence[TrainingMeasurement]) -> list[Pair]:
    """Curves of whole trainings of the same seed that were evaluated at the same steps with the same prompts."""
    curves = {run.seed: run.curve for run in baseline if run.whole and run.curve is not None}
    both = [(run.curve, curves[run.seed]) for run in runs if run.whole and run.curve is not None and run.seed in curves]
    return [Pair(*two) for two in both if (two[0].steps, two[0].prompts) == (two[1].steps, two[1].prompts)]


def parity_markdown(name: str, checks: Sequence[Check], measurements: Sequence[TrainingMeasurement]) -> str:
    of = {(one.variant, one.seed): one.accuracy for one in measurements if one.accuracy is not None}
    seeds = sorted({one.seed for one in measurements})
    accuracies = [
        (variant, *(short(of[variant, seed]) if (variant, seed) in of else MISSING for seed in seeds))
        for variant in dict.fromkeys(check.variant for check in checks)
    ]
    tables = [
        _table(["variant", "what", "", "found", "bound"], checks),
        _table(["held-out accuracy at the end", *(f"seed {seed}" for seed in seeds)], accuracies),
    ]
    return printable_lines("\n\n".join([f"**{name}**: {headline_of(checks)}", *tables])) + "\n"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    # A bar would end the cell.
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
