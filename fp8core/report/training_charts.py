"""The charts of trainings: metrics over steps, and tokens under both policies."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from fp8core.alignment.bounds import BOUNDED, StopBounds
from fp8core.metric import Metric
from fp8core.metrics.registry import METRICS, find_metric
from fp8core.report.chart import Bound, Chart, Series, short
from fp8core.report.tokens import TokenSample
from fp8core.rl.alignment_metrics import TMPE
from fp8core.store.metrics import STEP, History

_HISTOGRAM_BINS = 61
_COVERED_BY_HISTOGRAM = 0.999
Bounds = Mapping[str, Sequence[Bound]]
"""By metric, in the units of its curve; they replace those of the curve."""


def section_metrics(section: str, histories: Sequence[History] = ()) -> list[Metric]:
    """The metrics with a curve in a section of the report; those of users' own steps are `own`, by name."""
    if section == "own":
        names = {name for history in histories for row in history for name in row if name != STEP}
        return [metric for metric in map(find_metric, sorted(names)) if metric.own]
    return [metric for metric in METRICS if metric.curve is not None and metric.curve.section == section]


def curve_chart(metric: Metric, runs: Sequence[tuple[str, History]], bounds: Sequence[Bound] = ()) -> Chart:
    """A metric over the steps of runs (label, history). `bounds` replace those of its curve, in its units."""
    curve = metric.curve
    assert curve is not None, f"{metric.name} has no curve"
    series = []
    for style, (label, history) in enumerate(runs):
        rows = [row for row in history if metric.values(row)]
        series.append(Series(label, [row[STEP] for row in rows], [metric.chart_value(row) for row in rows], style))
    scale: Literal["log", "linear"] = "log" if curve.log else "linear"
    lines = bounds or [Bound(name, y) for name, y in curve.bounds.items()]
    y_label = curve.y_label or metric.unit
    return Chart(curve.title, "step", y_label, series, lines, scale, curve.include, curve.note)


def training_charts(label: str, history: History, bounds: StopBounds | None) -> list[Chart]:
    lines = bound_lines([(label, bounds)])
    shown = [*section_metrics("learning"), TMPE]
    return [curve_chart(metric, [(label, history)], lines.get(metric.name, ())) for metric in shown]


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
    first = sample.steps[0]
    last = sample.steps[-1]
    return f"step {first}" if first == last else f"steps {first} to {last}"


def bound_lines(runs: Sequence[tuple[str, StopBounds | None]]) -> Bounds:
    """A line for each bound that a run (label, bounds) has; one that not all runs have names those that do."""
    lines: dict[str, list[Bound]] = {}
    for name, metric in BOUNDED.items():
        holders: dict[float, list[str]] = defaultdict(list)
        for label, bounds in runs:
            if metric.curve is not None and bounds is not None and name in bounds.limits:
                holders[metric.chart_value({metric.name: bounds.limits[name]})].append(label)
        for value, labels in holders.items():
            # A chart of shares has no line of a bound that is a count.
            if math.isfinite(value):
                whose = "" if len(labels) == len(runs) else f" of {', '.join(labels)}"
                lines.setdefault(metric.name, []).append(Bound(f"stop{whose}: {short(value)}", value))
    return lines
