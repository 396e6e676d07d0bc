"""The declaration of a metric: what a value means, and where people see it.

A module that computes metrics declares them as `METRICS`, and `fp8core.metrics.registry` lists those modules. MLflow's
names, the report's charts and numbers, the console's columns and the docs' lists of metrics come from declarations.
"""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

Row = Mapping[str, float]
"""The metrics of a step: name -> value."""
Form = Literal["short", "decimals", "tenths", "whole", "exact"]
"""How a value is written: four digits, three decimals, one decimal, thousands with commas, `1 exactly`."""
CurveSection = Literal["learning", "signals", "alignment", "ahead", "scales", "own"]
"""Of the report: what a curve tells about."""
Summary = Literal["first", "last", "first steps", "last steps", "mean", "sum", "max", "min", "zeros"]
"""How the values of a run become one number; `first steps` and `last steps` are means of ten steps at an end."""


@dataclass(frozen=True)
class Curve:
    """The chart of a metric over the steps of a run; in section `own` the name of the metric is its title.

    y_label: else the unit of the metric. over: the name of a metric that the value is divided by. include: values that
    are on the y axis in any case. bounds: label -> y of a horizontal line. parts: each part that a `*` stands for has a
    line; else the largest value has one.
    """

    section: CurveSection
    title: str = ""
    _: KW_ONLY
    y_label: str = ""
    over: str = ""
    log: bool = False
    include: tuple[float, ...] = ()
    bounds: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    parts: bool = False


class Column(NamedTuple):
    """A column of the console's line for a step."""

    title: str
    width: int


@dataclass(frozen=True)
class Metric:
    """A metric of a step.

    name: in stored metrics; `*` stands for a layer, an age, a turn or another such part. text: of the docs, with what
    to change where a value looks wrong. unit: of the y axis. ideal: the value without any error. headline: its name
    below `core/` in trackers, which sort names; without, it is below `detail/`. headline_from_ideal: trackers show the
    value minus the ideal. of_checkpoint: a checkpoint in MLflow has it, too. numbers: rows of the report's table.
    """

    name: str
    text: str = ""
    _: KW_ONLY
    unit: str = ""
    better: Literal["higher", "lower", ""] = ""
    ideal: float | None = None
    headline: str = ""
    headline_from_ideal: bool = False
    of_checkpoint: bool = False
    form: Form = "short"
    curve: Curve | None = None
    column: Column | None = None
    numbers: Mapping[str, Summary] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return self.name.partition("/")[2]

    @property
    def own(self) -> bool:
        """A step of the user's own measured it, so that nothing is declared."""
        return not self.text

    def headline_value(self, value: float) -> float:
        return value - (self.ideal or 0.0) if self.headline_from_ideal else value

    def values(self, row: Row) -> list[float]:
        """The values of a step: one or none, or several where the name has a `*`."""
        if "*" not in self.name:
            return [row[self.name]] if self.name in row else []
        return [value for name, value in row.items() if fnmatchcase(name, self.name)]

    def chart_value(self, row: Row) -> float:
        """The y of a step that has the metric: the largest value, or its distance from an ideal other than 0."""
        value = max(self.values(row))
        if self.curve is not None and self.curve.over:
            value /= row.get(self.curve.over) or math.nan
        return abs(value - self.ideal) if self.ideal else value
