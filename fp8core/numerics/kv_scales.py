"""Per-layer scales of Q, K and V, and the statistics they are calibrated from.

A scale multiplies codes back: stored = e4m3(x / scale). There is no default: a scale that was never calibrated does
not exist, and one that is zero, negative or not finite cannot be made.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8core.numerics.e4m3 import E4M3_MAX, ScaleRule, scale_from_amax
from fp8core.numerics.magnitudes import BUCKETS, MagnitudeHistogram, count_magnitudes


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

    All three are maxima and counts: the split into batches and their order change nothing.
    """

    def __init__(self, num_layers: int) -> None:
        self._amax = torch.zeros(num_layers, 3)
        self._counts = torch.zeros(num_layers, 3, BUCKETS, dtype=torch.int64)
        self._saturated = torch.zeros(num_layers, 3, dtype=torch.float64)
        self._elements = torch.zeros(num_layers, 3, dtype=torch.float64)

    def observe(
        self, layer: int, tensors: tuple[Tensor, Tensor, Tensor], valid: Tensor, scales: LayerScales | None
    ) -> None:
        """Add one layer's q, k, v, each [B, heads, T, d]; `valid` is bool [B, T]."""
        for i, x in enumerate(tensors):
            magnitude = x.detach().abs().masked_fill(~valid[:, None, :, None], 0.0)
            self._amax[layer, i] = torch.maximum(self._amax[layer, i], magnitude.amax())
            elements = int(valid.sum()) * x.shape[1] * x.shape[3]
            self._elements[layer, i] += elements
            self._counts[layer, i] += count_magnitudes(magnitude.float())
            # What is not valid was counted as zeros.
            self._counts[layer, i, 0] -= magnitude.numel() - elements
            if scales is not None:
                limit = E4M3_MAX * (scales.q, scales.k, scales.v)[i]
                self._saturated[layer, i] += float((magnitude > limit).sum())

    def amax(self) -> list[LayerAmax]:
        """Largest magnitude per layer; at least one token must have been observed."""
        assert bool((self._elements > 0).all()), "no tokens were observed"
        return [LayerAmax(*row) for row in self._amax.tolist()]

    def histograms(self) -> list[LayerHistograms]:
        """Distribution of the magnitudes per layer; needs tokens as `amax`."""
        assert bool((self._elements > 0).all()), "no tokens were observed"
        return [
            LayerHistograms(*(MagnitudeHistogram.of(a, c) for a, c in zip(amax, counts, strict=True)))
            for amax, counts in zip(self._amax.tolist(), self._counts, strict=True)
        ]

    def saturated_share(self) -> float:
        """Share of elements beyond the scales they were observed with (none without scales); needs tokens as `amax`."""
        assert bool((self._elements > 0).all()), "no tokens were observed"
        return float(self._saturated.sum() / self._elements.sum())


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
