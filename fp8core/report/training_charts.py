"""The charts of trainings: metrics over steps."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Literal

from fp8core.alignment.bounds import BOUND_METRICS, StopBounds
from fp8core.metric import CurveSection, Metric
from fp8core.metrics.registry import METRICS, find_metric
from fp8core.report.chart import Bound, Chart, Collapse, Series, short
from fp8core.rl.alignment_metrics import TMPE
from fp8core.store.metrics import STEP, History

Bounds = Mapping[str, Sequence[Bound]]
"""By metric, in the units of its curve; they replace those of the curve."""


def section_metrics(section: CurveSection, histories: Sequence[History] = ()) -> list[Metric]:
    """The metrics with a curve in a section of the report.

    Those of `own` are by name: of the run's verifiers, environment and own steps.
    """
    if section == "own":
        names = {name for history in histories for row in history for name in row if name != STEP}
        metrics = [replace(find_metric(name), name=name) for name in sorted(names)]
    else:
        metrics = list(METRICS)
    return [metric for metric in metrics if metric.curve is not None and metric.curve.section == section]


def curve_chart(
    metric: Metric,
    runs: Sequence[tuple[str, History]],
    bounds: Sequence[Bound] = (),
    collapses: Sequence[Collapse] = (),
) -> Chart:
    """A metric over the steps of runs (label, history). `bounds` replace those of its curve, in its units."""
    curve = metric.curve
    assert curve is not None, f"{metric.name} has no curve"
    lines = _lines_of_parts(metric, runs) if curve.parts else [(label, metric, history) for label, history in runs]
    series = []
    for style, (label, line, history) in enumerate(lines):
        rows = [row for row in history if line.values(row)]
        series.append(Series(label, [row[STEP] for row in rows], [line.chart_value(row) for row in rows], style))
    scale: Literal["log", "linear"] = "log" if curve.log else "linear"
    limits = bounds or [Bound(name, y) for name, y in curve.bounds.items()]
    y_label = curve.y_label or metric.unit
    title = curve.title or metric.name
    return Chart(title, "step", y_label, series, limits, scale, curve.include, curve.note, collapses)


def _lines_of_parts(metric: Metric, runs: Sequence[tuple[str, History]]) -> list[tuple[str, Metric, History]]:
    lines = []
    for label, history in runs:
        names = {name for row in history for name in row if fnmatchcase(name, metric.name)}
        for name in sorted(names):
            part = name.removeprefix(metric.name.removesuffix("*"))
            lines.append((part if len(runs) == 1 else f"{label}: {part}", replace(metric, name=name), history))
    return lines


def training_charts(
    label: str, history: History, bounds: StopBounds | None, collapses: Sequence[Collapse]
) -> list[Chart]:
    lines = bound_lines([(label, bounds)])
    shown = [*section_metrics("learning"), TMPE]
    return [curve_chart(metric, [(label, history)], lines.get(metric.name, ()), collapses) for metric in shown]


def bound_lines(runs: Sequence[tuple[str, StopBounds | None]]) -> Bounds:
    """A line for each bound that a run (label, bounds) has; one that not all runs have names those that do."""
    lines: dict[str, list[Bound]] = {}
    for name, metric in BOUND_METRICS.items():
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
