"""The content of charts, apart from how they are drawn: `figures` for a page, `drawing` for a picture.

A style is a number. It stands for a colour of Okabe and Ito's palette (jfly.uni-koeln.de/color), which colour-blind
readers can tell apart, and for a dash and a marker.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from fp8core.alignment.bounds import BOUND_METRICS, StopBounds
from fp8core.metric import CurveSection, Form, Metric
from fp8core.metrics.registry import METRICS, find_metric
from fp8core.rl.alignment_metrics import TMPE
from fp8core.store.metrics import STEP, History

# Without yellow, which is too light for lines on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000")
ALARM = "#B3261E"
MISSING = "-"
"""Shown where there is no value."""


@dataclass(frozen=True)
class Series:
    """Points of one name, in the order of x."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: int

    def finite(self) -> list[tuple[float, float]]:
        return [(x, y) for x, y in zip(self.x, self.y, strict=True) if math.isfinite(x) and math.isfinite(y)]


@dataclass(frozen=True)
class Bound:
    """A horizontal line that values should stay below (or above), with its name."""

    label: str
    y: float


class Collapse(NamedTuple):
    """A vertical line at the last step before a policy collapsed."""

    label: str
    step: int


@dataclass(frozen=True)
class Chart:
    """Series over common axes; `include` are values of y that are on the axis in any case.

    On a log scale, values that are zero or less are drawn in a lane of their own below the others, labelled 0.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    bounds: Sequence[Bound] = ()
    y_scale: Literal["linear", "log"] = "linear"
    include: Sequence[float] = ()
    note: str = ""
    collapses: Sequence[Collapse] = ()

    @property
    def values(self) -> list[float]:
        return [y for series in self.series for _, y in series.finite()]


def short(value: float) -> str:
    """A number for people: four digits, an exponent below 0.0001 and from 1e9 on."""
    if not math.isfinite(value):
        return str(value)
    if 999.5 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    mantissa, mark, exponent = f"{value:.4g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if mark else mantissa


def format_tmpe(value: float) -> str:
    """The token multiplicative probability error: exact equality is told from an error too small for 6 digits."""
    if value == 1.0:
        return "1 exactly"
    if not math.isfinite(value):
        return short(value)
    return f"{value:.6f}" if abs(value - 1.0) >= 5e-7 else f"1{value - 1.0:+.0e}"


def three_decimals(value: float) -> str:
    """A reward or an accuracy: three decimals, and fewer of a large one."""
    return f"{value:.3f}" if abs(value) < 100 else short(value)


_FORMS: Mapping[Form, Callable[[float], str]] = {
    "short": short,
    "decimals": three_decimals,
    "tenths": "{:.1f}".format,
    "whole": "{:,.0f}".format,
    "exact": format_tmpe,
}


def format_value(value: float, form: Form) -> str:
    return _FORMS[form](value)


def count_text(number: int, noun: str) -> str:
    """A number of things, as `1 step` and `2 steps`."""
    plural = f"{noun}{'es' if noun.endswith('s') else 's'}"
    return f"{number} {noun if number == 1 else plural}"


def colour(style: int) -> str:
    return COLOURS[style % len(COLOURS)]


def split_constant(charts: Iterable[Chart]) -> tuple[list[Chart], list[str]]:
    """The charts whose values differ, and sentences about those that have one value."""
    varying = list[Chart]()
    titles = defaultdict[str, list[str]](list)
    for chart in charts:
        values = {y for series in chart.series for _, y in series.finite()}
        if len(values) > 1:
            varying.append(chart)
        elif values:
            (value,) = values
            exact = float(short(value).replace(",", "")) == value
            titles[f"{'Exactly' if exact else 'About'} {short(value)} wherever measured"].append(chart.title)
    return varying, [f"{value}: {'; '.join(names)}." for value, names in titles.items()]


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
