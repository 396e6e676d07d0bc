"""`numerics.support` in Triton, without a sort.

A threshold is the smallest logit above which there is less than the limit of top-k (tokens) or of top-p (probability).
Programs first sum above `_PIVOTS` values between which it must lie, in blocks of all rows at once. The logits between
two of them, a few, are then put together, and one program a row bisects their bits. Sums are whole numbers in FP64:
neither their order nor the pivots change a result."""

import math

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8core.kernels.softmax import _ALIGNED, _BLOCK, _OPTIONS, _place
from fp8core.numerics.support import LOWEST_EXPONENT, POLYNOMIAL, UNIT_BITS, exponent_factor
from fp8core.numerics.truncation import Truncation

_PIVOTS = 8
_LIST_BLOCK = 2048
# Of what top-p leaves out. Of less, the rounding of top_p is a part that counts.
_LEAST_REST = 2.0**-16

_P0, _P1, _P2, _P3, _P4, _P5 = (tl.constexpr(coefficient) for coefficient in POLYNOMIAL)
_LOWEST_EXPONENT = tl.constexpr(LOWEST_EXPONENT)
_EXPONENT_BIAS = tl.constexpr(127 + UNIT_BITS)
_VALUE_BITS = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _masses(exponents: tl.tensor) -> tl.tensor:
    exponents = tl.maximum(exponents, _LOWEST_EXPONENT)
    whole = tl.floor(exponents)
    rest = exponents - whole
    power = ((((_P0 * rest + _P1) * rest + _P2) * rest + _P3) * rest + _P4) * rest + _P5
    power = power * rest + 1.0
    scale = ((whole.to(tl.int32) + _EXPONENT_BIAS) << 23).to(tl.float32, bitcast=True)
    return tl.floor(power * scale).to(tl.float64)


@triton.jit
def _key(x: tl.tensor) -> tl.tensor:
    """int32 in the order of FP32 values; its own inverse on bits."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ _VALUE_BITS, bits)


@triton.jit
def _range_of(
    row: tl.tensor, tops: tl.tensor, bottoms: tl.tensor, floors: tl.tensor, reach: tl.tensor, parts: tl.tensor,
    padded: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """The largest logit, and one that is no larger than the threshold."""
    part = tl.arange(0, padded)
    at = row.to(tl.int64) * parts + part
    top = tl.max(tl.load(tops + at, mask=part < parts, other=float("-inf")), 0)
    bottom = tl.min(tl.load(bottoms + at, mask=part < parts, other=float("inf")), 0)
    return top, tl.maximum(tl.maximum(bottom, top - reach), tl.load(floors + row))


@triton.jit
def _amounts(
    x: tl.tensor, top: tl.tensor, floor: tl.tensor, factor: tl.tensor, min_exponent: tl.tensor, counts: tl.constexpr
) -> tl.tensor:
    """A token's part of the sum: 1, or its probability in the support so far."""
    if counts:
        amounts = tl.where(x > float("-inf"), 1.0, 0.0).to(tl.float64)
    else:
        exponents = (x - top) * factor
        amounts = tl.where((x >= floor) & (exponents >= min_exponent), _masses(exponents), 0.0)
    return amounts


@triton.jit
def _bracket(
    row: tl.tensor, low: tl.tensor, top: tl.tensor, sums: tl.tensor, parts: tl.tensor, limit: tl.tensor,
    counts: tl.constexpr, padded: tl.constexpr, pivots: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Two values: the threshold is above the first and not above the second. The sum above the second, the limit."""
    part = tl.arange(0, padded)
    at = sums + (row.to(tl.int64) * parts + part) * pivots
    total = tl.sum(tl.load(at, mask=part < parts, other=0.0), 0)
    bound = total * 0.0 + limit if counts else total * limit
    below = tl.where(total >= bound, _before(low), float("-inf"))
    beyond = top
    above = total * 0.0
    for i in tl.static_range(1, pivots):
        pivot = low + (top - low) * (i / pivots)
        found = tl.sum(tl.load(at + i, mask=part < parts, other=0.0), 0)
        below = tl.where(found >= bound, tl.maximum(below, pivot), below)
        is_closer = (found < bound) & (pivot < beyond)
        above = tl.where(is_closer, found, above)
        beyond = tl.where(is_closer, pivot, beyond)
    return below, beyond, above, bound


@triton.jit
def _before(x: tl.tensor) -> tl.tensor:
    key = _key(x) - 1
    return tl.where(key < 0, key ^ _VALUE_BITS, key).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["pitch", "vocabulary"])
def _ranges_kernel(
    logits: tl.tensor, pitch: tl.tensor, vocabulary: tl.tensor, tops: tl.tensor, bottoms: tl.tensor,
    aligned: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    start, size = _place(row, pitch, vocabulary, aligned)
    column = part * block + tl.arange(0, block)
    x = tl.load(logits + start + column, mask=column < size, other=float("-inf"))
    at = row.to(tl.int64) * tl.num_programs(1) + part
    tl.store(tops + at, tl.max(x, 0))
    tl.store(bottoms + at, tl.min(tl.where(x > float("-inf"), x, float("inf")), 0))


@triton.jit(do_not_specialize=["pitch", "vocabulary", "reach", "factor", "min_exponent"])
def _sums_kernel(
    logits: tl.tensor, pitch: tl.tensor, vocabulary: tl.tensor, tops: tl.tensor, bottoms: tl.tensor, floors: tl.tensor,
    reach: tl.tensor, factor: tl.tensor, min_exponent: tl.tensor, sums: tl.tensor, counts: tl.constexpr,
    padded: tl.constexpr, pivots: tl.constexpr, aligned: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    """The sum of a block, and that above each pivot."""
    row, part = tl.program_id(0), tl.program_id(1)
    parts = tl.num_programs(1)
    top, low = _range_of(row, tops, bottoms, floors, reach, parts, padded)
    start, size = _place(row, pitch, vocabulary, aligned)
    column = part * block + tl.arange(0, block)
    x = tl.load(logits + start + column, mask=column < size, other=float("-inf"))
    amounts = _amounts(x, top, tl.load(floors + row), factor, min_exponent, counts)
    at = sums + (row.to(tl.int64) * parts + part) * pivots
    tl.store(at, tl.sum(amounts, 0))
    for i in tl.static_range(1, pivots):
        pivot = low + (top - low) * (i / pivots)
        tl.store(at + i, tl.sum(tl.where(x > pivot, amounts, 0.0), 0))


@triton.jit(do_not_specialize=["pitch", "vocabulary", "reach", "limit"])
def _candidates_kernel(
    logits: tl.tensor, pitch: tl.tensor, vocabulary: tl.tensor, tops: tl.tensor, bottoms: tl.tensor, floors: tl.tensor,
    reach: tl.tensor, sums: tl.tensor, limit: tl.tensor, lists: tl.tensor, lengths: tl.tensor, counts: tl.constexpr,
    padded: tl.constexpr, pivots: tl.constexpr, aligned: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    """Logits that may be the threshold, in any order."""
    row, part = tl.program_id(0), tl.program_id(1)
    parts = tl.num_programs(1)
    top, low = _range_of(row, tops, bottoms, floors, reach, parts, padded)
    below, beyond, _, _ = _bracket(row, low, top, sums, parts, limit, counts, padded, pivots)
    start, size = _place(row, pitch, vocabulary, aligned)
    column = part * block + tl.arange(0, block)
    x = tl.load(logits + start + column, mask=column < size, other=float("-inf"))
    inside = (x > below) & (x <= beyond) & (x >= low)
    length = tl.sum(inside.to(tl.int32), 0)
    first = tl.atomic_add(lengths + row, length)
    place = first + tl.cumsum(inside.to(tl.int32), 0) - 1
    tl.store(lists + row.to(tl.int64) * size + place, x, mask=inside)


@triton.jit(do_not_specialize=["vocabulary", "reach", "factor", "min_exponent", "limit", "parts"])
def _threshold_kernel(
    lists: tl.tensor, lengths: tl.tensor, vocabulary: tl.tensor, tops: tl.tensor, bottoms: tl.tensor, floors: tl.tensor,
    reach: tl.tensor, factor: tl.tensor, min_exponent: tl.tensor, sums: tl.tensor, limit: tl.tensor, parts: tl.tensor,
    counts: tl.constexpr, padded: tl.constexpr, pivots: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    """Raise the row's floor to its threshold."""
    row = tl.program_id(0)
    top, low = _range_of(row, tops, bottoms, floors, reach, parts, padded)
    below, beyond, above, bound = _bracket(row, low, top, sums, parts, limit, counts, padded, pivots)
    floor = tl.load(floors + row)
    length = tl.load(lengths + row)
    source = lists + row.to(tl.int64) * vocabulary
    # Keys below which there is too much, and where there is not.
    too_low, enough = _key(below).to(tl.int64), _key(beyond).to(tl.int64)
    if below > float("-inf"):
        while enough - too_low > 1:
            middle = (too_low + enough) >> 1
            total = above
            for first in range(0, length, block):
                at = first + tl.arange(0, block)
                x = tl.load(source + at, mask=at < length, other=float("-inf"))
                amounts = _amounts(x, top, floor, factor, min_exponent, counts)
                total += tl.sum(tl.where(_key(x).to(tl.int64) > middle, amounts, 0.0), 0)
            if total < bound:
                enough = middle
            else:
                too_low = middle
        key = enough.to(tl.int32)
        bits = tl.where(key < 0, key ^ _VALUE_BITS, key)
        tl.store(floors + row, tl.maximum(floor, bits.to(tl.float32, bitcast=True)))


@triton.jit(do_not_specialize=["pitch", "vocabulary", "factor", "min_exponent"])
def _mask_kernel(
    logits: tl.tensor, pitch: tl.tensor, vocabulary: tl.tensor, tops: tl.tensor, floors: tl.tensor, factor: tl.tensor,
    min_exponent: tl.tensor, targets: tl.tensor, out: tl.tensor, padded: tl.constexpr, aligned: tl.constexpr,
    block: tl.constexpr,
) -> None:  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    parts = tl.num_programs(1)
    each = tl.arange(0, padded)
    top = tl.max(tl.load(tops + row.to(tl.int64) * parts + each, mask=each < parts, other=float("-inf")), 0)
    start, size = _place(row, pitch, vocabulary, aligned)
    column = part * block + tl.arange(0, block)
    x = tl.load(logits + start + column, mask=column < size, other=float("-inf"))
    outside = (x < tl.load(floors + row)) | ((x - top) * factor < min_exponent)
    if targets is not None:
        outside = outside & (column != tl.load(targets + row))
    tl.store(out + row.to(tl.int64) * size + column, tl.where(outside, float("-inf"), x), mask=column < size)


def truncated(
    logits: Tensor, temperature: float, truncation: Truncation | None, targets: Tensor | None = None
) -> Tensor:
    if truncation is None:
        return logits
    assert (logits.dtype, logits.stride(1)) == (torch.float32, 1), "logits are rows of FP32"
    rows, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, _BLOCK)
    grid = rows, parts
    padded = triton.next_power_of_2(parts)
    aligned = _ALIGNED if logits.stride(0) % _ALIGNED == 0 and vocabulary % _ALIGNED == 0 else 1
    # Lists of candidates until it is the result.
    out = torch.empty(rows, vocabulary, device=logits.device)
    if not rows:
        return out
    given = logits, logits.stride(0), vocabulary
    tops, bottoms = torch.empty(2, rows, parts, device=logits.device).unbind()
    floors = torch.full((rows,), -torch.inf, device=logits.device)
    measure = exponent_factor(temperature), truncation.min_exponent
    with torch.cuda.device_of(logits):
        _ranges_kernel[grid](*given, tops, bottoms, aligned, _BLOCK, **_OPTIONS)
        for limit, reach, counts in _limits(truncation, temperature, vocabulary):
            sums = torch.empty(rows, parts, _PIVOTS, dtype=torch.float64, device=logits.device)
            lengths = torch.zeros(rows, dtype=torch.int32, device=logits.device)
            bounds = tops, bottoms, floors, reach
            form = counts, padded, _PIVOTS
            _sums_kernel[grid](*given, *bounds, *measure, sums, *form, aligned, _BLOCK, **_OPTIONS)
            _candidates_kernel[grid](*given, *bounds, sums, limit, out, lengths, *form, aligned, _BLOCK, **_OPTIONS)
            _threshold_kernel[(rows,)](
                out, lengths, vocabulary, *bounds, *measure, sums, limit, parts, *form, _LIST_BLOCK, **_OPTIONS
            )
        _mask_kernel[grid](*given, tops, floors, *measure, targets, out, padded, aligned, _BLOCK, **_OPTIONS)
    return out


def _limits(truncation: Truncation, temperature: float, vocabulary: int) -> list[tuple[float, float, bool]]:
    """For each search: its limit, how far below the largest logit the threshold may lie, and whether tokens count."""
    limits = []
    if truncation.top_k is not None:
        limits.append((float(truncation.top_k), math.inf, True))
    if truncation.top_p < 1:
        rest = 1 - truncation.top_p
        # All tokens that are less likely than this are less than what is left out.
        reach = temperature * (math.log(vocabulary / rest) + 0.01) if rest > _LEAST_REST else math.inf
        limits.append((float(np.float32(truncation.top_p)), reach, False))
    return limits
