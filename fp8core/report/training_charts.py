"""The charts of trainings: metrics over steps, and tokens under both policies."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fp8core.alignment.bounds import BOUNDED, StopBounds
from fp8core.report.chart import Bound, Chart, Series, short
from fp8core.report.tokens import TokenSample
from fp8core.rewards.scorer import OUTCOMES
from fp8core.store import metrics
from fp8core.store.metrics import History

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
    Curve("Reward", "mean reward of the step", metrics.REWARD, include=(0.0, 1.0)),
    Curve("Held-out accuracy", "share of unseen prompts right", metrics.HELDOUT, include=(0.0, 1.0)),
    Curve("Completion length", "tokens, mean of the step", metrics.LENGTH, include=(0.0,)),
    Curve("Entropy of the policy", "nats per token", metrics.ENTROPY, include=(0.0,)),
    Curve("Gradient norm", "norm before clipping", metrics.GRAD_NORM, include=(0.0,)),
)

SIGNALS = (
    Curve("Groups with a signal", "share of prompts whose rewards differ", metrics.SIGNAL, include=(0.0, 1.0)),
    Curve("Cut-off completions", "share that reached max_new_tokens", metrics.CUT_OFF, include=(0.0, 1.0)),
    *(
        Curve(f"Outcome: {name}", "share of completions", f"{metrics.OUTCOME}{name}", include=(0.0, 1.0))
        for name in OUTCOMES
    ),
)

# NeMo RL judges its nightly runs by 1.05 in BF16 and 1.1 in FP8, and calls KL errors below 1e-3 acceptable
# (docs/guides/grpo.md and docs/adding-new-models.md there).
ALIGNMENT = (
    Curve(
        "Token multiplicative probability error - 1",
        "mean exp|d| - 1",
        metrics.TMPE,
        lambda row: row[metrics.TMPE] - 1.0,
        log=True,
        bounds=(Bound("NeMo RL, BF16: 0.05", 0.05), Bound("NeMo RL, FP8: 0.1", 0.1)),
        note="d = log p - log g of a token: training policy p, rollout policy g. 0: equal bit for bit.",
    ),
    Curve(
        "Divergence of training from rollout policy (k3)",
        "k3 estimate of KL(g, p), nats",
        metrics.K3,
        log=True,
        bounds=(Bound("NeMo RL: 0.001", 1e-3),),
    ),
    Curve(
        "Effective sample size that is lost",
        "1 - ESS / tokens",
        metrics.ESS,
        lambda row: 1.0 - row[metrics.ESS],
        log=True,
        note="Of importance weights truncated at 2; 0: all weights are equal.",
    ),
    Curve(
        "Tokens that differ",
        "share that is not bit-equal",
        metrics.TOKENS_DIFFERING,
        lambda row: row[metrics.TOKENS_DIFFERING] / (row.get("alignment/tokens") or math.nan),
        include=(0.0, 1.0),
    ),
)
WORST_TOKEN = Curve(
    "Largest difference of a token", "max |d| of the step, nats", "alignment/logprob_abs_diff_max", log=True
)


def _largest_scale(name: str) -> Curve:
    prefix = f"kv/scale_{name[0]}_layer"
    return Curve(
        f"Scale of {name}",
        "largest of all layers",
        f"{prefix}0",
        lambda row: max(value for metric, value in row.items() if metric.startswith(prefix)),
        log=True,
    )


KV_CURVES = (
    *(_largest_scale(name) for name in ("queries", "keys", "values")),
    Curve("Saturated elements of Q, K and V", "share beyond the scale", "kv/saturated_share", log=True),
    Curve("Lag of the scales", "mean |log2(used / fresh)|", "kv/lag_error", include=(0.0, 1.0)),
)
_HIDDEN = "rollout/tokens_beside_update"
AHEAD = (
    Curve("Staleness of tokens", "versions, mean of the step", metrics.STALENESS, include=(0.0, 1.0)),
    Curve(
        "Generation beside the update",
        "tokens of the step's own",
        _HIDDEN,
        lambda row: row[_HIDDEN] / (row.get(metrics.TOKENS) or math.nan),
        include=(0.0, 1.0),
        note="Tokens that were written beside the update, over those that it learned from. 1: nothing waits.",
    ),
)


def curve_chart(curve: Curve, runs: Sequence[tuple[str, History]], bounds: Sequence[Bound] = ()) -> Chart:
    """A metric over the steps of runs (label, history). `bounds` replace those of the curve, in its units."""
    series = []
    for style, (label, history) in enumerate(runs):
        rows = [row for row in history if curve.metric in row]
        series.append(Series(label, [row[metrics.STEP] for row in rows], [curve.of(row) for row in rows], style))
    scale: Literal["log", "linear"] = "log" if curve.log else "linear"
    lines = bounds or curve.bounds
    return Chart(curve.title, "step", curve.y_label, series, lines, scale, curve.include, curve.note)


def training_charts(label: str, history: History, bounds: StopBounds | None) -> list[Chart]:
    lines = bound_lines([(label, bounds)])
    return [curve_chart(curve, [(label, history)], lines.get(curve.metric, ())) for curve in (*LEARNING, ALIGNMENT[0])]


def token_charts(samples: Sequence[tuple[str, TokenSample | None]]) -> tuple[list[Chart], list[str]]:
    """The differences of the tokens of runs, or one sentence a run where all tokens are bit-equal."""
    present = [(style, label, sample) for style, (label, sample) in enumerate(samples) if sample is not None]
    if any(np.any(sample.difference != 0) for _, _, sample in present):
        return [difference_histogram(present)], []
    return [], [
        f"{label}: all {len(sample.difference):,} tokens of {_steps(sample)} are bit-equal under both policies."
        for _, label, sample in present
    ]


def difference_histogram(samples: Sequence[tuple[int, str, TokenSample]]) -> Chart:
    """Of tokens with the style and label of their run."""
    magnitudes = np.concatenate([np.abs(sample.difference) for _, _, sample in samples])
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
