"""The verdict on FP8 against BF16: checks of measured trainings against the bounds of `parity`, and their sum.

A variant without all of its numbers cannot pass: a run cut short is NOT ENOUGH DATA. One check beyond its bound is FAIL
whatever else is missing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final, Literal

from fp8core.config.parity import Limit, ParityConfig
from fp8core.parity.golden import Golden
from fp8core.parity.interval import mean_interval
from fp8core.parity.measure import LEAST_STEPS_OF_A_SLOPE, Measured
from fp8core.parity.variants import BASELINE, STRESS, VARIANTS

PASS: Final = "PASS"
FAIL: Final = "FAIL"
NOT_ENOUGH: Final = "NOT ENOUGH DATA"
NOT_JUDGED: Final = "not judged"
Outcome = Literal["PASS", "FAIL", "NOT ENOUGH DATA", "not judged"]
PREFLIGHT = "preflight"
_SHOWN_MISTAKES = 3


@dataclass(frozen=True)
class Check:
    """One thing that was judged: whose it is, what was found, what it had to be, and why that.

    `number` is what was found where that is a number, for charts and comparisons.
    """

    variant: str
    name: str
    outcome: Outcome
    found: str
    bound: str
    reason: str
    number: float | None = None


@dataclass(frozen=True)
class Verdict:
    """All checks; `outcome` is what they add up to."""

    checks: tuple[Check, ...]

    @property
    def outcome(self) -> Outcome:
        """FAIL when a check failed, else NOT ENOUGH DATA when one lacks data, else PASS."""
        outcomes = {check.outcome for check in self.checks}
        if FAIL in outcomes:
            return FAIL
        return NOT_ENOUGH if NOT_ENOUGH in outcomes else PASS

    @property
    def failed(self) -> list[Check]:
        """The checks that are beyond their bounds."""
        return [check for check in self.checks if check.outcome == FAIL]

    @property
    def headline(self) -> str:
        """The outcome and what made it, in a line."""
        made = [
            f"{check.variant}: {check.name} {check.found}" for check in self.checks if check.outcome == self.outcome
        ]
        return self.outcome if self.outcome == PASS else f"{self.outcome}: {'; '.join(made)}"


def judge(
    measured: Sequence[Measured],
    golden: Golden,
    config: ParityConfig,
    *,
    variants: Sequence[str],
    seeds: Sequence[int],
    platform: str,
    failures: Mapping[tuple[str, int], str],
) -> Verdict:
    """The verdict.

    Args:
        measured: every training that there is, in any order.
        golden: how the correction did on its golden vectors.
        config: the bounds.
        variants: names of all that were asked for; each is judged, whether it was measured or not.
        seeds: all that were asked for.
        platform: where the rollout engine computes: `cpu`, or a GPU as `sm_90`. On a CPU speed is not judged.
        failures: why a training failed, by variant and seed.
    """
    by_variant = {name: [one for one in measured if one.variant == name] for name in variants}
    checks = [_golden_check(golden)]
    for name in variants:
        runs = by_variant[name]
        checks.append(_complete(name, runs, seeds, failures))
        checks += _alignment(name, runs, config)
        checks.append(_updates(name, runs))
        checks.append(_memory(name, runs, config))
        if name not in (BASELINE, STRESS):
            checks.append(_gap(name, runs, by_variant.get(BASELINE, []), config))
            checks.append(_speed(name, runs, by_variant.get(BASELINE, []), config, platform))
    return Verdict(tuple(checks))


def _golden_check(golden: Golden) -> Check:
    found = f"{golden.tokens - len(golden.wrong)} of {golden.tokens} weights right"
    if golden.wrong:
        found += f" ({'; '.join(golden.wrong[:_SHOWN_MISTAKES])})"
    reason = "a wrong correction trains on, and shows late"
    return Check(PREFLIGHT, "golden vectors", FAIL if golden.wrong else PASS, found, "all", reason)


def _complete(
    name: str, runs: Sequence[Measured], seeds: Sequence[int], failures: Mapping[tuple[str, int], str]
) -> Check:
    """What failed is a failure; what was cut short, or has not begun, may still come."""
    failed = [f"seed {seed}: {reason}" for (variant, seed), reason in failures.items() if variant == name]
    if failed:
        return Check(name, "complete", FAIL, "; ".join(failed), "all", "a training that fails in FP8 has no parity")
    whole = [seed for seed in seeds if any(run.seed == seed and run.whole for run in runs)]
    outcome: Outcome = PASS if len(whole) == len(seeds) else NOT_ENOUGH
    found = f"{len(whole)} of {len(seeds)} seeds trained to their last step"
    return Check(name, "complete", outcome, found, "all", "a run cut short shows nothing of what comes later")


def _alignment(name: str, runs: Sequence[Measured], config: ParityConfig) -> Iterator[Check]:
    error = config.error_matched if VARIANTS[name].matched else config.error_mismatched
    yield _worst(name, "largest probability error", [v for run in runs for v in run.errors], max, error)
    yield _worst(name, "largest k3 divergence", [v for run in runs for v in run.k3], max, config.k3)
    ess = [v for run in runs for v in run.ess]
    yield _worst(name, "smallest effective sample size", ess, min, config.effective_sample_size)
    weights = {"mismatch": [run.weights for run in runs], "updates": [run.ratios for run in runs]}
    for of, values in weights.items():
        yield _mean_weight(name, f"mean weight of the {of}", [v for some in values for v in some], config)
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
    return Check(name, what, FAIL if beyond else PASS, f"{value:.8g}", bound, limit.reason, value)


def _mean_weight(name: str, what: str, values: Sequence[float], config: ParityConfig) -> Check:
    limit = config.mean_weight
    bound = f"1 ± {limit.limit:g}"
    if len(values) < 2:
        return Check(name, what, NOT_ENOUGH, f"measured at {len(values)} steps", bound, limit.reason)
    low, high = mean_interval(values, config.confidence)
    mean = fmean(values)
    found = f"{mean:.6g} ({low:.6g} to {high:.6g})"
    # The distance from 1, on the side of the mean.
    nearest, farthest = (1 - high, 1 - low) if mean < 1 else (low - 1, high - 1)
    outcome = _placed(limit.limit - farthest, limit.limit - nearest)
    return Check(name, what, outcome, found, bound, limit.reason, mean)


def _placed(low: float, high: float) -> Outcome:
    """PASS for an interval above 0, FAIL for one below; across it, more data will tell."""
    if low >= 0:
        return PASS
    return FAIL if high < 0 else NOT_ENOUGH


def _updates(name: str, runs: Sequence[Measured]) -> Check:
    idle = [f"seed {run.seed}, step {step}" for run in runs for step in run.idle]
    reason = "an update with a gradient changes the policy, or it was skipped"
    if not any(run.steps[0] for run in runs):
        return Check(name, "skipped updates", NOT_ENOUGH, "not measured", "none", reason)
    found = ", ".join(idle) if idle else "none"
    return Check(name, "skipped updates", FAIL if idle else PASS, found, "none", reason, float(len(idle)))


def _memory(name: str, runs: Sequence[Measured], config: ParityConfig) -> Check:
    limit = config.memory_slope
    bound, slopes = f"<= {limit.limit:g} MiB a step", [run.slope for run in runs if run.slope is not None]
    if not slopes:
        found = f"not measured over {LEAST_STEPS_OF_A_SLOPE} steps"
        return Check(name, "memory slope", NOT_ENOUGH, found, bound, limit.reason)
    slope = median(slopes)
    outcome: Outcome = FAIL if slope > limit.limit else PASS
    return Check(name, "memory slope", outcome, f"{slope:.3g} MiB a step", bound, limit.reason, slope)


def _gap(name: str, runs: Sequence[Measured], baseline: Sequence[Measured], config: ParityConfig) -> Check:
    limit, what = config.accuracy_gap, "held-out accuracy minus BF16"
    bound = f">= -{limit.limit:g}"
    of_seed = {run.seed: run.accuracy for run in baseline if run.whole and run.accuracy is not None}
    gaps = [
        run.accuracy - of_seed[run.seed]
        for run in runs
        if run.whole and run.accuracy is not None and run.seed in of_seed
    ]
    if len(gaps) < 2:
        return Check(name, what, NOT_ENOUGH, f"{len(gaps)} seeds are no interval", bound, limit.reason)
    low, high = mean_interval(gaps, config.confidence)
    outcome = _placed(low + limit.limit, high + limit.limit)
    found = f"{fmean(gaps):+.4f} ({low:+.4f} to {high:+.4f}, {len(gaps)} seeds)"
    return Check(name, what, outcome, found, bound, limit.reason, fmean(gaps))


def _speed(
    name: str, runs: Sequence[Measured], baseline: Sequence[Measured], config: ParityConfig, platform: str
) -> Check:
    limit, what = config.speed_ratio, "generation speed, of BF16's"
    bound = f">= {limit.limit:g}"
    ours, theirs = ([run.speed for run in side if run.speed is not None] for side in (runs, baseline))
    if not ours or not theirs:
        outcome: Outcome = NOT_JUDGED if platform == "cpu" else NOT_ENOUGH
        return Check(name, what, outcome, "not measured", bound, limit.reason)
    ratio = fmean(ours) / fmean(theirs)
    if platform == "cpu":
        return Check(name, what, NOT_JUDGED, f"{ratio:.3g} on a CPU", bound, limit.reason, ratio)
    outcome = FAIL if ratio < limit.limit else PASS
    return Check(name, what, outcome, f"{ratio:.3g} on {platform}", bound, limit.reason, ratio)
