"""The content of charts, apart from how they are drawn: `figures` for a page, `drawing` for a picture.

A style is a number. It stands for a colour of Okabe and Ito's palette, which colour-blind readers can tell apart
(jfly.uni-koeln.de/color). It stands for a dash and a marker too, so that lines differ in grey.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

# Without yellow, which is too light for lines on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000")
GREY = "#767676"
REFERENCE = -1
"""The style of a line that is no measurement, such as a diagonal."""

POINTS_OF_A_SERIES = 400


@dataclass(frozen=True)
class Series:
    """Points of one name, in the order of x; what is not finite is left out.

    `line` joins points with markers, `dots` does not join them. `outline` is the upper edge of a histogram: y holds
    from its x to the next one.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: int
    mark: Literal["line", "dots", "outline"] = "line"

    def finite(self) -> list[tuple[float, float]]:
        return [(x, y) for x, y in zip(self.x, self.y, strict=True) if math.isfinite(x) and math.isfinite(y)]


@dataclass(frozen=True)
class Bound:
    """A horizontal line that values should stay below (or above), with its name."""

    label: str
    y: float


@dataclass(frozen=True)
class Chart:
    """Series over common axes.

    On a log scale, values that are zero or less are drawn in a lane of their own below the others, labelled 0.
    `include` are values of y that are on the axis in any case. `note` is printed below the chart.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    bounds: Sequence[Bound] = ()
    y_scale: Literal["linear", "log"] = "linear"
    include: Sequence[float] = ()
    note: str = ""

    @property
    def values(self) -> list[float]:
        return [y for series in self.series for _, y in series.finite()]


def short(value: float) -> str:
    """A number for people: four digits, an exponent below 0.0001 and from 1e9 on; what is not finite by its name."""
    if not math.isfinite(value):
        return str(value)
    if 999.5 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    mantissa, marked, exponent = f"{value:.4g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if marked else mantissa


def counted(number: int, noun: str) -> str:
    """A number of things, as `1 step` and `2 steps`."""
    plural = f"{noun}{'es' if noun.endswith('s') else 's'}"
    return f"{number} {noun if number == 1 else plural}"


def colour(style: int) -> str:
    return GREY if style == REFERENCE else COLOURS[style % len(COLOURS)]


def thinned(series: Series) -> Series:
    """At most `POINTS_OF_A_SERIES` points that look like all: of each stretch the first, last, least and greatest.

    (Jugel et al., "M4: a visualization-oriented time series data aggregation", VLDB 2014.)
    """
    finite = series.finite()
    if len(finite) <= POINTS_OF_A_SERIES or series.mark != "line":
        return series
    size = math.ceil(len(finite) / (POINTS_OF_A_SERIES // 4))
    points: list[tuple[float, float]] = []
    for start in range(0, len(finite), size):
        part = range(start, min(start + size, len(finite)))
        chosen = {part[0], part[-1], min(part, key=lambda i: finite[i][1]), max(part, key=lambda i: finite[i][1])}
        points += [finite[i] for i in sorted(chosen)]
    return replace(series, x=[x for x, _ in points], y=[y for _, y in points])


def bucket_means(values: Sequence[float], buckets: int) -> list[float]:
    """Means of `buckets` stretches of nearly equal length, without what is not finite; NaN where nothing is."""
    edges = [round(i * len(values) / buckets) for i in range(buckets + 1)]
    finite = [[value for value in values[a:b] if math.isfinite(value)] for a, b in pairwise(edges)]
    return [math.fsum(part) / len(part) if part else math.nan for part in finite]


def collapsed(charts: Iterable[Chart]) -> tuple[list[Chart], list[str]]:
    """The charts that show something, and a sentence for each reason that the others have none to show.

    A chart whose points all have one value is told by that value, a chart without a point is not measured.
    """
    drawn = list[Chart]()
    told = defaultdict[str, list[str]](list)
    for chart in charts:
        values = {y for series in chart.series if series.style != REFERENCE for _, y in series.finite()}
        match len(values):
            case 0:
                told["Not measured"].append(chart.title)
            case 1:
                (value,) = values
                shown = short(value)
                rounded = float(shown.replace(",", "")) != value
                told[f"{'About' if rounded else 'Exactly'} {shown} wherever measured"].append(chart.title)
            case _:
                drawn.append(chart)
    return drawn, [f"{reason}: {'; '.join(titles)}." for reason, titles in told.items()]
