"""Histograms of magnitudes by the leading bits of their FP32 patterns, for percentiles of streamed tensors.

A bucket is one exponent and three bits of mantissa: its upper edge is at most 1/8 above its lower one, and no
logarithm decides where an element falls. Counts are integers, so histograms of batches add up to that of their union,
in any order.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from fp8core.numerics.kernel_choice import has_kernels

BUCKETS = 1 << 11
DROPPED_BITS = 20
# What an int64 row of a tally holds at which place: the bits of the largest magnitude, elements beyond the limit, all
# elements, and from COUNTS on those of each bucket. Bucket 0 is not kept: it is what the others leave (`counts_of`).
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

        At most 1/8 above the nearest-rank percentile of normal FP32 numbers, exactly amax for 100, and NaN or infinity
        when an element was: what is not finite is not hidden.
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


def tally(into: Tensor, x: Tensor, valid: Tensor, limit: float) -> None:
    """Add the magnitudes of the valid tokens' elements to one row of tallies, without waiting for a GPU.

    Args:
        into: int64 [TALLY], changed in place.
        x: FP32 or BF16 [B, heads, T, d].
        valid: bool [B, T].
        limit: larger magnitudes are counted as saturated.
    """
    if has_kernels(x):
        from fp8core.numerics import triton_magnitudes

        triton_magnitudes.tally(into, x, valid, limit)
        return
    into[COUNTS + 1 :] += count_magnitudes(_add_extremes(into, x, valid, limit))[1:]


def tally_amax(into: Tensor, x: Tensor, valid: Tensor, limit: float) -> None:
    """`tally` without the counts of the buckets: as fast as a GPU reads memory."""
    if has_kernels(x):
        from fp8core.numerics import triton_magnitudes

        triton_magnitudes.tally_amax(into, x, valid, limit)
        return
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
