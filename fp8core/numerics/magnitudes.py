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

BUCKETS = 1 << 11
_DROPPED_BITS = 20


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
    return torch.bincount(magnitudes.view(torch.int32).flatten() >> _DROPPED_BITS, minlength=BUCKETS)


def _upper_edge(bucket: int) -> float:
    """The number after the largest of a bucket (its infinity for the last finite one)."""
    return torch.tensor((bucket + 1) << _DROPPED_BITS, dtype=torch.int32).view(torch.float32).item()
