"""Per-layer scales of Q, K and V, and the statistics they are calibrated from.

A scale multiplies codes back: stored = e4m3(x / scale). There is no default: a scale that was never calibrated does
not exist, and one that is zero, negative or not finite cannot be made.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8core.numerics.e4m3 import E4M3_MAX, ScaleRule, scale_from_amax


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
    """Largest magnitudes of one layer's query, key and value tensors over the tokens that were seen."""

    q: float
    k: float
    v: float


class KvStatistics:
    """Streams amax and saturation of Q, K and V per layer over the valid tokens of many batches."""

    def __init__(self, num_layers: int) -> None:
        self._amax = torch.zeros(num_layers, 3)
        self._saturated = torch.zeros(num_layers, 3, dtype=torch.float64)
        self._elements = torch.zeros(num_layers, 3, dtype=torch.float64)

    def observe(
        self, layer: int, tensors: tuple[Tensor, Tensor, Tensor], valid: Tensor, scales: LayerScales | None
    ) -> None:
        """Add one layer's q, k, v, each [B, heads, T, d]; `valid` is bool [B, T]."""
        for i, x in enumerate(tensors):
            magnitude = x.detach().abs().masked_fill(~valid[:, None, :, None], 0.0)
            self._amax[layer, i] = torch.maximum(self._amax[layer, i], magnitude.amax())
            self._elements[layer, i] += float(valid.sum()) * x.shape[1] * x.shape[3]
            if scales is not None:
                limit = E4M3_MAX * (scales.q, scales.k, scales.v)[i]
                self._saturated[layer, i] += float((magnitude > limit).sum())

    def amax(self) -> list[LayerAmax]:
        """Largest magnitude per layer; at least one token must have been observed."""
        assert bool((self._elements > 0).all()), "no tokens were observed"
        return [LayerAmax(*row) for row in self._amax.tolist()]

    def saturated_share(self) -> float:
        """Share of elements beyond the scales they were observed with (none without scales); needs tokens as `amax`."""
        assert bool((self._elements > 0).all()), "no tokens were observed"
        return float(self._saturated.sum() / self._elements.sum())


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
