"""One axis of a chart: limits that hold all values, places on the page, and round numbers as ticks."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fp8core.report.charts import Scale

TICKS = 5
_LANE_SHARE = 0.10
_MAX_DECADES = 12


@dataclass(frozen=True)
class Axis:
    """Maps values to pixels between `start` and `end`.

    low, high: limits (of a log axis: both positive). lane: whether zeros have a lane of their own at the start.
    """

    scale: Scale
    low: float
    high: float
    start: float
    end: float
    lane: bool = False
    integers: bool = False

    @classmethod
    def of(cls, values: Iterable[float], scale: Scale, start: float, end: float, margin: float = 0.04) -> "Axis":
        """An axis that holds all finite values, with `margin` of its length on both sides; [0, 1] when there are none.

        Of a log axis, more than 12 decades below the largest value count as zero.
        """
        finite = [value for value in values if math.isfinite(value)]
        if scale == "log":
            return _log_axis(finite, start, end)
        low, high = min(finite, default=0.0), max(finite, default=1.0)
        integers = bool(finite) and all(value == int(value) for value in finite)
        if low == high:
            # One value: a round neighbourhood of it, in which its digits can be read.
            pad = 0.5 if integers else abs(low) * 0.1 or 0.5
            return cls(scale, low - pad, high + pad, start, end, integers=integers)
        pad = margin * (high - low)
        return cls(scale, low - pad, high + pad, start, end, integers=integers)

    def place(self, value: float) -> float:
        """The pixel of a finite value."""
        if self.scale == "linear":
            share = (value - self.low) / (self.high - self.low)
        elif value < self.low:
            share = 0.35 * _LANE_SHARE
        else:
            floor = _LANE_SHARE if self.lane else 0.0
            share = floor + (1 - floor) * math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[tuple[float, str]]:
        """Round values within the limits, and how they are written."""
        if self.scale == "log":
            return self._log_ticks()
        step = _round_step((self.high - self.low) / TICKS)
        if self.integers:
            step = max(1.0, step)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        return [(i * step, _written(i * step, digits)) for i in range(first, last + 1)]

    def _log_ticks(self) -> list[tuple[float, str]]:
        zero = [(0.0, "0")] if self.lane else []
        decades = math.log10(self.high / self.low)
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        factors = (1,) if decades > 2.5 else (1, 2, 5)
        stride = max(1, math.ceil(decades / (TICKS + 2)))
        values = [factor * 10.0**power for power in range(first, last + 1, stride) for factor in factors]
        inside = [value for value in values if self.low * (1 - 1e-9) <= value <= self.high * (1 + 1e-9)]
        return zero + [(value, short(value)) for value in inside]


def short(value: float) -> str:
    """A number for people: four digits, an exponent below 0.0001 and from 1e9 on; what is not finite by its name."""
    if not math.isfinite(value):
        return str(value)
    if 1e4 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    mantissa, marked, exponent = f"{value:.4g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if marked else mantissa


def _log_axis(finite: list[float], start: float, end: float) -> Axis:
    positive = [value for value in finite if value > 0]
    if not positive:
        return Axis("linear", 0.0, 1.0, start, end)
    high = max(positive)
    low = max(min(positive), high / 10.0**_MAX_DECADES)
    lane = any(value < low for value in finite)
    if high / low < 4:
        return Axis("log", low / 2, high * 2, start, end, lane)
    return Axis("log", low / 1.3, high * 1.3, start, end, lane)


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 0.8 * rough)


def _written(value: float, digits: int) -> str:
    if abs(value) >= 10_000 or (digits > 5 and value):
        return short(value)
    return f"{value:.{digits}f}" if value else "0"
