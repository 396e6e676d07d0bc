"""The verdict on FP8 against BF16: checks of measured trainings against the bounds of `parity`, and their sum.

A variant without all of its numbers cannot pass: a run cut short is NOT ENOUGH DATA. One check beyond its bound is FAIL
whatever else is missing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, JsonValue

from fp8core import durable
from fp8core.config.parity import Limit, ParityConfig
from fp8core.evaluation.measure import Estimate
from fp8core.parity.measure import (
    BASELINE,
    STRESS,
    VARIANTS,
    Measured,
    Pair,
    block_means,
    curve_difference,
    delay,
    end_difference,
    mean_interval,
)

PASS: Final = "PASS"
FAIL: Final = "FAIL"
NOT_ENOUGH: Final = "NOT ENOUGH DATA"
NOT_JUDGED: Final = "not judged"
ParityOutcome = Literal["PASS", "FAIL", "NOT ENOUGH DATA", "not judged"]


@dataclass(frozen=True)
class Check:
    """One thing that was judged. `number` is what was found, where that is a number."""

    variant: str
    name: str
    outcome: ParityOutcome
    found: str
    bound: str
    reason: str
    number: float | None = None


@dataclass(frozen=True)
class ParityVerdict:
    checks: tuple[Check, ...]

    @property
    def outcome(self) -> ParityOutcome:
        """FAIL when a check failed, else NOT ENOUGH DATA when one lacks data, else PASS."""
        outcomes = {check.outcome for check in self.checks}
        if FAIL in outcomes:
            return FAIL
        return NOT_ENOUGH if NOT_ENOUGH in outcomes else PASS

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.outcome == FAIL]

    @property
    def headline(self) -> str:
        made = [
            f"{check.variant}: {check.name} {check.found}" for check in self.checks if check.outcome == self.outcome
        ]
        return self.outcome if self.outcome == PASS else f"{self.outcome}: {'; '.join(made)}"


def judge(
    measured: Sequence[Measured],
    config: ParityConfig,
    *,
    variants: Sequence[str],
    seeds: Sequence[int],
    platform: str,
    failures: Mapping[tuple[str, int], str],
) -> ParityVerdict:
    """Judge each requested variant, whether it was measured or not; on the platform `cpu` speed is not judged.

    `failures`: why a training failed, by variant and seed.
    """
    by_variant = {name: [one for one in measured if one.variant == name] for name in variants}
    checks = list[Check]()
    for name in variants:
        runs = by_variant[name]
        checks.append(_complete(name, runs, seeds, failures))
        checks += _alignment(name, runs, config)
        if name not in (BASELINE, STRESS):
            checks += _learning(name, runs, by_variant.get(BASELINE, []), config)
            checks.append(_speed(name, runs, by_variant.get(BASELINE, []), config, platform))
    return ParityVerdict(tuple(checks))


def _complete(
    name: str, runs: Sequence[Measured], seeds: Sequence[int], failures: Mapping[tuple[str, int], str]
) -> Check:
    """A training that failed is a failure; one that was cut short, or has not begun, may still come."""
    failed = [f"seed {seed}: {reason}" for (variant, seed), reason in failures.items() if variant == name]
    if failed:
        return Check(name, "complete", FAIL, "; ".join(failed), "all", "a training that fails in FP8 has no parity")
    whole = [seed for seed in seeds if any(run.seed == seed and run.whole for run in runs)]
    outcome: ParityOutcome = PASS if len(whole) == len(seeds) else NOT_ENOUGH
    found = f"{len(whole)} of {len(seeds)} seeds trained to their last step"
    return Check(name, "complete", outcome, found, "all", "a run cut short shows nothing of what comes later")


def _alignment(name: str, runs: Sequence[Measured], config: ParityConfig) -> Iterator[Check]:
    error = config.error_matched if VARIANTS[name].matched else config.error_mismatched
    yield _worst(name, "largest probability error", [v for run in runs for v in run.errors], max, error)
    yield _worst(name, "largest k3 divergence", [v for run in runs for v in run.k3], max, config.k3)
    ess = [v for run in runs for v in run.ess]
    yield _worst(name, "smallest effective sample size", ess, min, config.effective_sample_size)
    weights = {"mismatch": [run.weights for run in runs]}
    ratios = [run.ratios for run in runs if run.ratios is not None]
    if len(ratios) == len(runs):
        weights["updates"] = ratios
    for of, values in weights.items():
        yield _mean_weight(name, f"mean weight of the {of}", [v for some in values for v in block_means(some)], config)
        yield _worst(name, f"largest weight of the {of}", [v for some in values for v in some], max, config.step_weight)


def _worst(
    name: str, what: str, values: Sequence[float], worst: Callable[[Sequence[float]], float], limit: Limit
) -> Check:
    sign = "<=" if worst is max else ">="
    bound = f"{sign} {limit.limit:g}"
    if not values:
        return Check(name, what, NOT_ENOUGH, "not measured", bound, limit.reason)
    value = worst(values)
    beyond = value > limit.limit if worst is max else value < limit.limit
    found = "1 exactly" if value == 1 else f"{value:.8g}"
    return Check(name, what, FAIL if beyond else PASS, found, bound, limit.reason, value)


def _mean_weight(name: str, what: str, values: Sequence[float], config: ParityConfig) -> Check:
    limit = config.mean_weight
    bound = f"1 ± {limit.limit:g}"
    if len(values) < 2:
        return Check(name, what, NOT_ENOUGH, f"{len(values)} blocks of steps", bound, limit.reason)
    low, high = mean_interval(values, config.confidence)
    mean = fmean(values)
    found = f"{mean:.6g} ({low:.6g} to {high:.6g})"
    # The distance from 1, on the side of the mean.
    nearest, farthest = (1 - high, 1 - low) if mean < 1 else (low - 1, high - 1)
    outcome = _placed(limit.limit - farthest, limit.limit - nearest)
    return Check(name, what, outcome, found, bound, limit.reason, mean)


def _placed(low: float, high: float) -> ParityOutcome:
    """PASS for an interval above 0, FAIL for one below; NOT ENOUGH DATA for one across it."""
    if low >= 0:
        return PASS
    return FAIL if high < 0 else NOT_ENOUGH


def _learning(
    name: str, runs: Sequence[Measured], baseline: Sequence[Measured], config: ParityConfig
) -> Iterator[Check]:
    """Accuracy over the whole curve and at its end, and where that is at its ceiling, the steps to get there."""
    pairs = _pairs(runs, baseline)
    what, enough = "held-out accuracy minus BF16", len(pairs) > 1
    curve = curve_difference(pairs, config.confidence) if enough else None
    end = end_difference(pairs, config.last_evaluations, config.confidence) if enough else None
    for check, gap, limit in ((what, curve, config.accuracy_gap), (f"{what}, at the end", end, config.end_gap)):
        bound = f">= -{limit.limit:g}"
        if gap is None:
            yield Check(name, check, NOT_ENOUGH, f"{len(pairs)} pairs of seeds", bound, limit.reason)
        else:
            outcome = _placed(gap.low + limit.limit, gap.high + limit.limit)
            yield Check(name, check, outcome, _shown(gap, "+.4f", len(pairs)), bound, limit.reason, gap.value)
    yield _delay(name, pairs, config)


def _pairs(runs: Sequence[Measured], baseline: Sequence[Measured]) -> list[Pair]:
    """Curves of whole trainings of the same seed that were evaluated at the same steps with the same prompts."""
    curves = {run.seed: run.curve for run in baseline if run.whole and run.curve is not None}
    both = [(run.curve, curves[run.seed]) for run in runs if run.whole and run.curve is not None and run.seed in curves]
    return [Pair(*two) for two in both if (two[0].steps, two[0].prompts) == (two[1].steps, two[1].prompts)]


def _delay(name: str, pairs: Sequence[Pair], config: ParityConfig) -> Check:
    """A policy that learns the same later ends as accurate: its delay is judged once BF16 is at its ceiling."""
    limit, what = config.delay, f"steps to reach {config.reach:g} beyond BF16's"
    relative = f"<= {limit.limit:g} of BF16's"
    if len(pairs) < 2:
        return Check(name, what, NOT_ENOUGH, f"{len(pairs)} pairs of seeds", relative, limit.reason)
    end = fmean(pair.baseline.mean_of_last(config.last_evaluations) for pair in pairs)
    if end < config.reach:
        return Check(name, what, NOT_JUDGED, f"BF16 ends at {end:.3g}", relative, limit.reason)
    found = delay(pairs, config.reach, config.confidence)
    if found.estimate is None:
        return Check(name, what, NOT_ENOUGH, "fewer than two pairs reach it", relative, limit.reason)
    longest = limit.limit * found.baseline
    bound = f"<= {longest:.3g}, {limit.limit:g} of BF16's {found.baseline:.3g}"
    outcome = _placed(longest - found.estimate.high, longest - found.estimate.low)
    words = _shown(found.estimate, "+.2f", len(pairs))
    if found.unreached:
        words += f"; {found.unreached} never reach it"
        # Their last step is less than they need: enough to fail, never to pass.
        outcome = NOT_ENOUGH if outcome == PASS else outcome
    return Check(name, what, outcome, words, bound, limit.reason, found.estimate.value)


def _shown(estimate: Estimate, form: str, seeds: int) -> str:
    return f"{estimate.value:{form}} ({estimate.low:{form}} to {estimate.high:{form}}, {seeds} seeds)"


def _speed(
    name: str, runs: Sequence[Measured], baseline: Sequence[Measured], config: ParityConfig, platform: str
) -> Check:
    limit, what = config.speed_ratio, "generation speed, of BF16's"
    bound = f">= {limit.limit:g}"
    ours, theirs = ([run.speed for run in side if run.speed is not None] for side in (runs, baseline))
    if not ours or not theirs:
        outcome: ParityOutcome = NOT_JUDGED if platform == "cpu" else NOT_ENOUGH
        return Check(name, what, outcome, "not measured", bound, limit.reason)
    ratio = fmean(ours) / fmean(theirs)
    if platform == "cpu":
        return Check(name, what, NOT_JUDGED, f"{ratio:.3g} on a CPU", bound, limit.reason, ratio)
    outcome = FAIL if ratio < limit.limit else PASS
    return Check(name, what, outcome, f"{ratio:.3g} on {platform}", bound, limit.reason, ratio)


RECORD = "verdict.json"


class ParityResult(BaseModel):
    """The content of verdict.json. `settings` are those of the configuration, before a variant changes them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    config: str
    ended: str
    outcome: ParityOutcome
    headline: str
    variants: tuple[str, ...]
    seeds: tuple[int, ...]
    code_version: str
    git: dict[str, JsonValue]
    versions: dict[str, str]
    hardware: dict[str, JsonValue]
    settings: dict[str, JsonValue]
    checks: tuple[Check, ...]


def write_result(result: ParityResult, folder: Path) -> None:
    durable.write_file(folder / RECORD, (result.model_dump_json(indent=2) + "\n").encode())
