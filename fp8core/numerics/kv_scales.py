"""Per-layer scales of Q, K and V, and the statistics they are calibrated from.

A scale multiplies codes back: stored = e4m3(x / scale). There is no default: a scale that was never calibrated does
not exist, and one that is zero, negative or not finite cannot be made.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8core.numerics.e4m3 import E4M3_MAX, ScaleRule, scale_from_amax
from fp8core.numerics.magnitudes import (
    AMAX,
    ELEMENTS,
    SATURATED,
    TALLY,
    MagnitudeHistogram,
    amax_of,
    counts_of,
    tally,
    tally_amax,
)


@dataclass(frozen=True)
class LayerScales:
    """Scales of one layer's query, key and value tensors."""

    q: float
    k: float
    v: float

    def __post_init__(self) -> None:
        for name, value in (("q", self.q), ("k", self.k), ("v", self.v)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"scale of {name} is {value}; it must be positive and finite")


@dataclass(frozen=True)
class LayerAmax:
    """Magnitudes of one layer's query, key and value tensors that scales shall cover: the largest seen, or less."""

    q: float
    k: float
    v: float


@dataclass(frozen=True)
class LayerHistograms:
    """Magnitudes of the elements of one layer's query, key and value tensors over the tokens that were seen."""

    q: MagnitudeHistogram
    k: MagnitudeHistogram
    v: MagnitudeHistogram


class KvStatistics:
    """Streams amax, histogram and saturation of Q, K and V per layer over the valid tokens of many batches.

    All three are maxima and counts: the split into batches and their order change nothing. They stay on the device of
    the tensors until they are read.
    """

    def __init__(self, num_layers: int, device: torch.device | str = "cpu") -> None:
        self._tallies = torch.zeros(num_layers, 3, TALLY, dtype=torch.int64, device=device)

    def observe(
        self, layer: int, tensors: tuple[Tensor, Tensor, Tensor], valid: Tensor, scales: LayerScales | None
    ) -> None:
        """Add one layer's q, k, v, each [B, heads, T, d]; `valid` is bool [B, T]."""
        limits = (math.inf,) * 3 if scales is None else tuple(E4M3_MAX * s for s in (scales.q, scales.k, scales.v))
        for into, x, limit in zip(self._tallies[layer], tensors, limits, strict=True):
            self._add(into, x, valid, limit)

    def combine(self, largest: Callable[[Tensor], object], total: Callable[[Tensor], object]) -> None:
        """Make them those of several processes, by two reductions in place over int64 tensors."""
        amax = self._tallies[..., AMAX].contiguous()
        largest(amax)
        total(self._tallies)
        self._tallies[..., AMAX] = amax

    def amax(self) -> list[LayerAmax]:
        """Largest magnitude per layer; at least one token must have been observed."""
        return [LayerAmax(*row) for row in amax_of(self._read()).tolist()]

    def histograms(self) -> list[LayerHistograms]:
        """Distribution of the magnitudes per layer; needs tokens as `amax`."""
        tallies = self._read()
        return [
            LayerHistograms(*(MagnitudeHistogram.of(a, c) for a, c in zip(amax, counts, strict=True)))
            for amax, counts in zip(amax_of(tallies).tolist(), counts_of(tallies), strict=True)
        ]

    def saturated_share(self) -> float:
        """Share of elements beyond the scales they were observed with (none without scales); needs tokens as `amax`."""
        tallies = self._read()
        return int(tallies[..., SATURATED].sum()) / int(tallies[..., ELEMENTS].sum())

    def _add(self, into: Tensor, x: Tensor, valid: Tensor, limit: float) -> None:
        tally(into, x, valid, limit)

    def _read(self) -> Tensor:
        tallies = self._tallies.cpu()
        assert bool((tallies[..., ELEMENTS] > 0).all()), "no tokens were observed"
        return tallies


class AmaxStatistics(KvStatistics):
    """Amax and saturation alone, as fast as a GPU reads memory: all that `calibration.statistic: amax` needs.

    Its histograms hold every element in the bucket of amax, so that every percentile of them is amax.
    """

    def _add(self, into: Tensor, x: Tensor, valid: Tensor, limit: float) -> None:
        tally_amax(into, x, valid, limit)

    def histograms(self) -> list[LayerHistograms]:
        """What covers all elements; needs tokens as `amax`."""
        tallies = self._read()
        rows = zip(amax_of(tallies).tolist(), tallies[..., ELEMENTS].tolist(), strict=True)
        return [
            LayerHistograms(*(MagnitudeHistogram.of_largest(a, n) for a, n in zip(amax, elements, strict=True)))
            for amax, elements in rows
        ]


def covered_amax(histograms: Sequence[LayerHistograms], percentile: float) -> list[LayerAmax]:
    """Magnitudes that `percentile` of the elements do not exceed (see `MagnitudeHistogram`); amax for 100."""
    return [LayerAmax(*(h.percentile(percentile) for h in (layer.q, layer.k, layer.v))) for layer in histograms]


def average_amax(previous: list[LayerAmax], current: list[LayerAmax], weight: float) -> list[LayerAmax]:
    """Exponential average over steps: weight * previous + (1 - weight) * current, layer by layer."""
    assert len(previous) == len(current), "calibration of another model"
    return [
        LayerAmax(*(weight * old + (1 - weight) * new for old, new in ((p.q, c.q), (p.k, c.k), (p.v, c.v))))
        for p, c in zip(previous, current, strict=True)
    ]


def scales_from_statistics(amax: list[LayerAmax], margin: float, rule: ScaleRule) -> list[LayerScales]:
    """Scales that cover amax * margin.

    Raises:
        GroupNotFinite: a statistic is NaN or infinite.
    """
    values = torch.tensor([[layer.q, layer.k, layer.v] for layer in amax]) * margin
    return [LayerScales(*row) for row in scale_from_amax(values, rule).tolist()]


def scale_distance(used: Sequence[LayerScales], fresh: Sequence[LayerScales]) -> float:
    """Mean |log2(used / fresh)| over layers and Q, K and V: 0 where they agree, 1 where all are twice as large."""
    assert len(used) == len(fresh), "scales of another model"
    pairs = [(getattr(u, name), getattr(f, name)) for u, f in zip(used, fresh, strict=True) for name in "qkv"]
    return math.fsum(abs(math.log2(u / f)) for u, f in pairs) / len(pairs)
