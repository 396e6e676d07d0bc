"""The content of charts, apart from how they are drawn: `figures` for a page, `drawing` for a picture.

A style is a number. It stands for a colour of Okabe and Ito's palette (jfly.uni-koeln.de/color), which colour-blind
readers can tell apart, and for a dash and a marker.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fp8core.metric import Form

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


def whole(value: float) -> str:
    return f"{value:,.0f}"


_FORMS: Mapping[Form, Callable[[float], str]] = {
    "short": short,
    "decimals": three_decimals,
    "tenths": "{:.1f}".format,
    "whole": whole,
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
