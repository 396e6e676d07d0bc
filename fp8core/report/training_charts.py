"""The charts of trainings: metrics over steps, and tokens under both policies."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fp8core.alignment.bounds import BOUNDED, StopBounds
from fp8core.report.chart import REFERENCE, Bound, Chart, Series, collapsed, short
from fp8core.report.tokens import TokenSample
from fp8core.rewards.scorer import OUTCOMES
from fp8core.store.metrics import (
    CUT_OFF,
    ENTROPY,
    ESS,
    GRAD_NORM,
    HELDOUT,
    K3,
    LAG_ESS,
    LENGTH,
    OUTCOME,
    OUTSIDE_CLIP,
    REWARD,
    SIGNAL,
    STALENESS,
    STEP,
    TMPE,
    TOKENS,
    TOKENS_DIFFERING,
    History,
)

SCATTERED, LARGEST_SCATTERED = 1200, 200
_HISTOGRAM_BINS = 61
_COVERED_BY_HISTOGRAM = 0.999
Row = Mapping[str, float]
Bounds = Mapping[str, Sequence[Bound]]
"""By metric, in the units of its curve; they replace those of the curve."""


@dataclass(frozen=True)
class Curve:
    """A value drawn over the steps of a run: `value` takes the metrics of a step, `metric` must be among them."""

    title: str
    y_label: str
    metric: str
    value: Callable[[Row], float] | None = None
    log: bool = False
    include: tuple[float, ...] = ()
    bounds: tuple[Bound, ...] = ()
    note: str = ""

    def of(self, row: Row) -> float:
        return row[self.metric] if self.value is None else self.value(row)


LEARNING = (
    Curve("Reward", "mean reward of the step", REWARD, include=(0.0, 1.0)),
    Curve("Held-out accuracy", "share of unseen prompts right", HELDOUT, include=(0.0, 1.0)),
    Curve("Completion length", "tokens, mean of the step", LENGTH, include=(0.0,)),
    Curve("Entropy of the policy", "nats per token", ENTROPY, include=(0.0,)),
    Curve("Gradient norm", "norm before clipping", GRAD_NORM, include=(0.0,)),
)

SIGNALS = (
    Curve("Groups with a signal", "share of prompts whose rewards differ", SIGNAL, include=(0.0, 1.0)),
    Curve("Cut-off completions", "share that reached max_new_tokens", CUT_OFF, include=(0.0, 1.0)),
    *(Curve(f"Outcome: {name}", "share of completions", f"{OUTCOME}{name}", include=(0.0, 1.0)) for name in OUTCOMES),
)

# NeMo RL judges its nightly runs by 1.05 in BF16 and 1.1 in FP8, and calls KL errors below 1e-3 acceptable
# (docs/guides/grpo.md and docs/adding-new-models.md there).
ALIGNMENT = (
    Curve(
        "Token multiplicative probability error - 1",
        "mean exp|d| - 1",
        TMPE,
        lambda row: row[TMPE] - 1.0,
        log=True,
        bounds=(Bound("NeMo RL, BF16: 0.05", 0.05), Bound("NeMo RL, FP8: 0.1", 0.1)),
        note="d = log p - log g of a token: training policy p, rollout policy g. 0: equal bit for bit.",
    ),
    Curve(
        "Divergence of training from rollout policy (k3)",
        "k3 estimate of KL(g, p), nats",
        K3,
        log=True,
        bounds=(Bound("NeMo RL: 0.001", 1e-3),),
    ),
    Curve(
        "Effective sample size that is lost",
        "1 - ESS / tokens",
        ESS,
        lambda row: 1.0 - row[ESS],
        log=True,
        note="Of importance weights truncated at 2; 0: all weights are equal.",
    ),
    Curve(
        "Tokens that differ",
        "share that is not bit-equal",
        TOKENS_DIFFERING,
        lambda row: row[TOKENS_DIFFERING] / (row.get("alignment/tokens") or math.nan),
        include=(0.0, 1.0),
    ),
)
WORST_TOKEN = Curve(
    "Largest difference of a token", "max |d| of the step, nats", "alignment/logprob_abs_diff_max", log=True
)
KV_CURVES = (
    Curve("Saturated elements of Q, K and V", "share beyond the scale", "kv/saturated_share", log=True),
    Curve("Lag of the scales", "mean |log2(used / fresh)|", "kv/lag_error", include=(0.0, 1.0)),
)
# Of runs that generate ahead.
_HIDDEN = "rollout/tokens_beside_update"
_AHEAD = (
    Curve("Staleness of tokens", "versions, mean of the step", STALENESS, include=(0.0, 1.0)),
    Curve(
        "Generation beside the update",
        "tokens of the step's own",
        _HIDDEN,
        lambda row: row[_HIDDEN] / (row.get(TOKENS) or math.nan),
        include=(0.0, 1.0),
        note="Tokens that were written beside the update, over those that it learned from. 1: nothing waits.",
    ),
)
_BY_AGE = (
    Curve(
        "Effective sample size by age",
        "ESS / tokens",
        LAG_ESS,
        include=(0.0, 1.0),
        note="Of the policy before the update against that which wrote a token; 1: they are equal.",
    ),
    Curve(
        "Clip fraction by age",
        "share of tokens",
        OUTSIDE_CLIP,
        include=(0.0,),
        note="Tokens whose ratio of these two policies is beyond loss.clip_low or loss.clip_high.",
    ),
)
"""The metric of each has a suffix for the age."""


def curve_chart(curve: Curve, runs: Sequence[tuple[str, History]], bounds: Sequence[Bound] = ()) -> Chart:
    """A metric over the steps of runs (label, history). `bounds` replace those of the curve, in its units."""
    series = []
    for style, (label, history) in enumerate(runs):
        rows = [row for row in history if curve.metric in row]
        series.append(Series(label, [row[STEP] for row in rows], [curve.of(row) for row in rows], style))
    scale: Literal["log", "linear"] = "log" if curve.log else "linear"
    lines = bounds or curve.bounds
    return Chart(curve.title, "step", curve.y_label, series, lines, scale, curve.include, curve.note)


def training_charts(label: str, history: History, bounds: StopBounds | None) -> list[Chart]:
    lines = bound_lines([(label, bounds)])
    return [curve_chart(curve, [(label, history)], lines.get(curve.metric, ())) for curve in (*LEARNING, ALIGNMENT[0])]


def token_charts(samples: Sequence[tuple[str, TokenSample | None]]) -> tuple[list[Chart], list[str]]:
    """The charts of the tokens of runs, as `collapsed`; one sentence a run where all tokens are bit-equal."""
    present = [(style, label, sample) for style, (label, sample) in enumerate(samples) if sample is not None]
    if not present or any(np.any(sample.difference != 0) for _, _, sample in present):
        return collapsed((difference_histogram(present), logprob_scatter(present), difference_by_position(present)))
    return [], [
        f"{label}: all {len(sample.position):,} tokens of {_steps(sample)} are bit-equal under both policies."
        for _, label, sample in present
    ]


Samples = Sequence[tuple[int, str, TokenSample]]
"""Style, label and tokens of each run."""


def difference_histogram(samples: Samples) -> Chart:
    magnitudes = np.concatenate([np.abs(sample.difference) for _, _, sample in samples] or [np.zeros(1)])
    reach = float(np.quantile(magnitudes, _COVERED_BY_HISTOGRAM))
    edges = np.linspace(-1.0, 1.0, _HISTOGRAM_BINS + 1) * (reach or 1e-6)
    series = list[Series]()
    notes = list[str]()
    for style, label, sample in samples:
        d = sample.difference
        share = np.histogram(d, edges)[0] / len(d)
        series.append(Series(label, edges.tolist(), [*share.tolist(), 0.0], style, "outline"))
        outside = np.mean(np.abs(d) > edges[-1])
        tokens = f"{len(d):,} tokens of {_steps(sample)}"
        notes.append(f"{label}: {tokens}, {np.mean(d == 0):.1%} exactly 0, {outside:.2%} outside.")
    return Chart(
        "Difference of a token's log-probs",
        "d = log p - log g (nats): training minus rollout",
        "share of tokens",
        series,
        y_scale="log",
        note=" ".join(notes),
    )


def logprob_scatter(samples: Samples) -> Chart:
    series = list[Series]()
    lowest = -1e-3
    for style, label, sample in samples:
        count = len(sample.position)
        largest = np.argsort(-np.abs(sample.difference), kind="stable")[:LARGEST_SCATTERED].tolist()
        chosen = sorted({*range(0, count, max(1, -(-count // SCATTERED))), *largest})
        rollout, training = sample.rollout[chosen].tolist(), sample.training[chosen].tolist()
        lowest = min([lowest, *rollout, *training])
        series.append(Series(label, rollout, training, style, "dots"))
    series.append(Series("equal", [lowest, 0.0], [lowest, 0.0], REFERENCE))
    return Chart(
        "Log-probs of tokens under both policies",
        "log-prob under the rollout policy (nats)",
        "under the training policy (nats)",
        series,
        note=f"At most {SCATTERED} tokens of a run, evenly chosen, and the {LARGEST_SCATTERED} that differ most.",
    )


def difference_by_position(samples: Samples) -> Chart:
    """Mean |d| by a token's place in its completion: each place up to 32, then ever wider stretches."""
    series = []
    for style, label, sample in samples:
        end = int(sample.position.max()) + 1
        wide = np.geomspace(33, max(end, 33), 33).astype(np.int64)
        edges = np.unique(np.minimum([*range(33), *wide, end], end))
        counts = np.histogram(sample.position, edges)[0]
        sums = np.histogram(sample.position, edges, weights=np.abs(sample.difference))[0]
        seen = counts > 0
        series.append(Series(label, edges[:-1][seen].tolist(), (sums[seen] / counts[seen]).tolist(), style))
    return Chart(
        "Difference by position in the completion",
        "token of the completion, from 0",
        "mean |d|, nats",
        series,
        y_scale="log",
    )


def ahead_charts(runs: Sequence[tuple[str, History]]) -> list[Chart]:
    """Staleness, what an update hides, and by age sample size and clip; none where no run generates ahead."""
    ahead = [(label, history) for label, history in runs if any(STALENESS in row for row in history)]
    if not ahead:
        return []
    return [*(curve_chart(curve, runs) for curve in _AHEAD), *(_by_age(curve, ahead) for curve in _BY_AGE)]


def _by_age(curve: Curve, runs: Sequence[tuple[str, History]]) -> Chart:
    series = list[Series]()
    prefix = f"{curve.metric}_age_"
    for label, history in runs:
        names = {name for row in history for name in row if name.startswith(prefix)}
        for name in sorted(names, key=lambda name: int(name.removeprefix(prefix).partition("_")[0])):
            rows = [row for row in history if name in row]
            age = f"age {name.removeprefix(prefix).replace('_', ' to ')}"
            shown = age if len(runs) == 1 else f"{label}, {age}"
            series.append(Series(shown, [row[STEP] for row in rows], [row[name] for row in rows], len(series)))
    return Chart(curve.title, "step", curve.y_label, series, include=curve.include, note=curve.note)


def _steps(sample: TokenSample) -> str:
    first, last = sample.steps[0], sample.steps[-1]
    return f"step {first}" if first == last else f"steps {first} to {last}"


# The chart of differing tokens shows their share, the bound is a count.
_NAMES = {metric: name for name, metric in BOUNDED.items() if name != "tokens_differing"}


def bound_lines(runs: Sequence[tuple[str, StopBounds | None]]) -> Bounds:
    """A line for each bound that a run (label, bounds) has; one that not all runs have names those that do."""
    found: dict[str, list[Bound]] = {}
    for curve in ALIGNMENT:
        holders: dict[float, list[str]] = defaultdict(list)
        for label, bounds in runs:
            name = _NAMES.get(curve.metric, "")
            if bounds is not None and name in bounds.limits:
                holders[curve.of({curve.metric: bounds.limits[name]})].append(label)
        for value, labels in holders.items():
            whose = "" if len(labels) == len(runs) else f" of {', '.join(labels)}"
            found.setdefault(curve.metric, []).append(Bound(f"stop{whose}: {short(value)}", value))
    return found
