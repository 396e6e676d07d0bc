"""Per-layer scales of Q, K and V, and the statistics they are calibrated from.

A scale multiplies codes back: stored = e4m3(x / scale). There is no default: a scale that was never calibrated does
not exist, and one that is zero, negative or not finite cannot be made.

Statistics are histograms of magnitudes by the leading bits of their FP32 patterns, for percentiles of streamed tensors.
A bucket is one exponent and three bits of mantissa. Its upper edge is at most 1/8 above its lower one, and no logarithm
decides where an element falls. Counts are integers, so histograms of batches add up to that of their union, in any
order.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from fp8core.numerics.dispatch import with_kernel
from fp8core.numerics.e4m3 import scale_from_amax
from fp8core.numerics.recipe import E4M3_MAX, ScaleRule

BUCKETS = 1 << 11
DROPPED_BITS = 20
# Places in an int64 row of a tally: the bits of the largest magnitude, elements beyond the limit, all elements. From
# COUNTS on come the elements of each bucket. Bucket 0 is not kept: it is what the others leave (`counts_of`).
AMAX, SATURATED, ELEMENTS, COUNTS = 0, 1, 2, 4
TALLY = COUNTS + BUCKETS


@dataclass(frozen=True)
class MagnitudeHistogram:
    """Magnitudes of many elements.

    Attributes:
        amax: the largest, NaN or infinite if an element was.
        first: index of the bucket of `counts[0]`; bucket b holds the FP32 numbers of bit patterns from b * 2^20 up to
            (b + 1) * 2^20.
        counts: elements per bucket, without the empty buckets on either side.
    """

    amax: float
    first: int
    counts: tuple[int, ...]

    @classmethod
    def of(cls, amax: float, dense: Tensor) -> "MagnitudeHistogram":
        """From int64 counts [2048] of at least one element."""
        occupied = dense.nonzero()
        assert len(occupied), "a histogram of no elements"
        first, last = int(occupied[0]), int(occupied[-1])
        return cls(amax, first, tuple(dense[first : last + 1].tolist()))

    @classmethod
    def of_largest(cls, amax: float, elements: int) -> "MagnitudeHistogram":
        """Of elements of which the largest alone is known: all of them in its bucket."""
        pattern = int(torch.tensor(amax, dtype=torch.float32).view(torch.int32).item())
        return cls(amax, pattern >> DROPPED_BITS, (elements,))

    def __add__(self, other: "MagnitudeHistogram") -> "MagnitudeHistogram":
        # NaN compares false with everything: torch's maximum keeps it.
        amax = torch.maximum(torch.tensor(self.amax).double(), torch.tensor(other.amax).double()).item()
        return MagnitudeHistogram.of(amax, self._dense() + other._dense())

    def percentile(self, percent: float) -> float:
        """A magnitude that at least `percent` of the elements do not exceed: the upper edge of their bucket, or amax.

        At most 1/8 above the nearest-rank percentile of normal FP32 numbers, exactly amax for 100. NaN or infinity when
        an element was: neither is hidden.
        """
        assert 0 < percent <= 100, f"percentile {percent} is not in (0, 100]"
        if not math.isfinite(self.amax):
            return self.amax
        rank = math.ceil(sum(self.counts) * percent / 100)
        bucket = self.first + bisect_left(list(accumulate(self.counts)), rank)
        return min(_upper_edge(bucket), self.amax)

    def _dense(self) -> Tensor:
        counts = torch.zeros(BUCKETS, dtype=torch.int64)
        counts[self.first : self.first + len(self.counts)] = torch.tensor(self.counts)
        return counts


def count_magnitudes(magnitudes: Tensor) -> Tensor:
    """Elements per bucket, int64 [2048], of non-negative FP32 values of any shape."""
    return torch.bincount(magnitudes.view(torch.int32).flatten() >> DROPPED_BITS, minlength=BUCKETS)


@with_kernel("magnitudes")
def tally(into: Tensor, x: Tensor, valid: Tensor, limit: float) -> None:
    """Add the magnitudes of the valid tokens' elements to one row of tallies, without waiting for a GPU.

    Args:
        into: int64 [TALLY], changed in place.
        x: FP32 or BF16 [B, heads, T, d].
        valid: bool [B, T].
        limit: larger magnitudes are counted as saturated.
    """
    into[COUNTS + 1 :] += count_magnitudes(_add_extremes(into, x, valid, limit))[1:]


@with_kernel("magnitudes")
def tally_amax(into: Tensor, x: Tensor, valid: Tensor, limit: float) -> None:
    """`tally` without the counts of the buckets: as fast as a GPU reads memory."""
    _add_extremes(into, x, valid, limit)


def _add_extremes(into: Tensor, x: Tensor, valid: Tensor, limit: float) -> Tensor:
    """Magnitudes in FP32, zero where not valid, after amax, saturation and elements were added."""
    magnitudes = x.detach().abs().float().masked_fill(~valid[:, None, :, None], 0.0)
    # The patterns of magnitudes are ordered as they are, and those of NaN are the largest.
    into[AMAX] = torch.maximum(into[AMAX], magnitudes.view(torch.int32).amax())
    into[SATURATED] += (magnitudes > limit).sum()
    into[ELEMENTS] += valid.sum() * (x.shape[1] * x.shape[3])
    return magnitudes


def amax_of(tallies: Tensor) -> Tensor:
    """Largest magnitudes, FP32 [...], of tallies [..., TALLY]."""
    return tallies[..., AMAX].to(torch.int32).view(torch.float32)


def counts_of(tallies: Tensor) -> Tensor:
    """Elements per bucket, int64 [..., 2048], of tallies [..., TALLY]."""
    counts = tallies[..., COUNTS:].clone()
    counts[..., 0] = tallies[..., ELEMENTS] - counts[..., 1:].sum(-1)
    return counts


def _upper_edge(bucket: int) -> float:
    """The number after the largest of a bucket (its infinity for the last finite one)."""
    return torch.tensor((bucket + 1) << DROPPED_BITS, dtype=torch.int32).view(torch.float32).item()


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
"""Of all layers, by layer; none where attention has none."""


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

    def __getstate__(self) -> dict[str, Tensor]:
        # Another process may have no GPU.
        return {"_tallies": self._tallies.cpu()}

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
        """The histograms that cover all elements; needs tokens as `amax`."""
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
    """Scales that cover amax * margin. Raises GroupNotFinite: a statistic is NaN or infinite."""
    values = torch.tensor([[layer.q, layer.k, layer.v] for layer in amax]) * margin
    return [LayerScales(*row) for row in scale_from_amax(values, rule).tolist()]


def scale_distance(used: Sequence[LayerScales], fresh: Sequence[LayerScales]) -> float:
    """Mean |log2(used / fresh)| over layers and Q, K and V: 0 where they agree, 1 where all are twice as large."""
    assert len(used) == len(fresh), "scales of another model"
    pairs = [(getattr(u, name), getattr(f, name)) for u, f in zip(used, fresh, strict=True) for name in "qkv"]
    return math.fsum(abs(math.log2(u / f)) for u, f in pairs) / len(pairs)
