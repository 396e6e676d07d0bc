"""Per-layer scales of Q, K and V, stored = e4m3(x / scale), and the statistics they are calibrated from."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8core.numerics.dispatch import with_kernel
from fp8core.numerics.e4m3 import scale_from_amax
from fp8core.numerics.recipe import E4M3_MAX, ScaleRule

# Places in a tally: the bits of the largest magnitude, elements beyond the limit, all elements. A fourth one aligns it.
AMAX = 0
SATURATED = 1
ELEMENTS = 2
TALLY = 4


@with_kernel("magnitudes")
def tally(into: Tensor, x: Tensor, valid: Tensor, limit: float) -> None:
    """Add FP32 or BF16 [B, heads, T, d] to a tally, int64 [TALLY], where `valid`, bool [B, T], is true. Magnitudes
    above `limit` are saturated."""
    magnitudes = x.detach().abs().float().masked_fill(~valid[:, None, :, None], 0.0)
    # The patterns of magnitudes are ordered as they are, and those of NaN are the largest.
    into[AMAX] = torch.maximum(into[AMAX], magnitudes.view(torch.int32).amax())
    into[SATURATED] += (magnitudes > limit).sum()
    into[ELEMENTS] += valid.sum() * (x.shape[1] * x.shape[3])


@dataclass(frozen=True)
class LayerScales:
    q: float
    k: float
    v: float

    def __post_init__(self) -> None:
        for name, value in (("q", self.q), ("k", self.k), ("v", self.v)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"scale of {name} is {value}; it must be positive and finite")


Scales = Sequence[LayerScales]
"""By layer; none where attention has none."""


@dataclass(frozen=True)
class LayerAmax:
    q: float
    k: float
    v: float


class KvStatistics:
    """Amax and saturation of Q, K and V per layer over valid tokens, whatever the batches; on the device until they are
    read."""

    def __init__(self, num_layers: int, device: torch.device | str = "cpu") -> None:
        self._tallies = torch.zeros(num_layers, 3, TALLY, dtype=torch.int64, device=device)

    def __getstate__(self) -> dict[str, Tensor]:
        # Another process may have no GPU.
        return {"_tallies": self._tallies.cpu()}

    def observe(
        self, layer: int, tensors: tuple[Tensor, Tensor, Tensor], valid: Tensor, scales: LayerScales | None
    ) -> None:
        """Add one layer's q, k, v, each [B, heads, T, d]; `valid` is bool [B, T]."""
        limits = (math.inf,) * 3 if scales is None else tuple(E4M3_MAX * s for s in (scales.q, scales.k, scales.v))
        for into, x, limit in zip(self._tallies[layer], tensors, limits, strict=True):
            tally(into, x, valid, limit)

    def combine(self, largest: Callable[[Tensor], object], total: Callable[[Tensor], object]) -> None:
        """Make them those of several processes, by two reductions in place."""
        amax = self._tallies[..., AMAX].contiguous()
        largest(amax)
        total(self._tallies)
        self._tallies[..., AMAX] = amax

    def amax(self) -> list[LayerAmax]:
        return [LayerAmax(*row) for row in self._read()[..., AMAX].to(torch.int32).view(torch.float32).tolist()]

    def saturated_share(self) -> float:
        tallies = self._read()
        return int(tallies[..., SATURATED].sum()) / int(tallies[..., ELEMENTS].sum())

    def _read(self) -> Tensor:
        tallies = self._tallies.cpu()
        assert bool((tallies[..., ELEMENTS] > 0).all()), "no tokens were observed"
        return tallies


def average_amax(previous: list[LayerAmax], current: list[LayerAmax], weight: float) -> list[LayerAmax]:
    assert len(previous) == len(current), "calibration of another model"
    return [
        LayerAmax(*(weight * old + (1 - weight) * new for old, new in ((p.q, c.q), (p.k, c.k), (p.v, c.v))))
        for p, c in zip(previous, current, strict=True)
    ]


def scales_from_statistics(amax: list[LayerAmax], margin: float, rule: ScaleRule) -> list[LayerScales]:
    """Scales that cover amax * margin. Raises GroupNotFinite: a statistic is NaN or infinite."""
    values = torch.tensor([[layer.q, layer.k, layer.v] for layer in amax]) * margin
    return [LayerScales(*row) for row in scale_from_amax(values, rule).tolist()]


def scale_distance(ours: Sequence[LayerScales], fresh: Sequence[LayerScales]) -> float:
    """Mean |log2(used / fresh)|: 1 where all are twice as large."""
    assert len(ours) == len(fresh), "scales of another model"
    pairs = [(getattr(u, name), getattr(f, name)) for u, f in zip(ours, fresh, strict=True) for name in "qkv"]
    return math.fsum(abs(math.log2(u / f)) for u, f in pairs) / len(pairs)
