"""Residual sum, RMSNorm and its codes in Triton, and sums over rows in a fixed order.

The mean of squares and 1 / rms are FP64. One FMA multiplies an element by 1 / rms as the sum of two FP32 numbers. But
for a share of about 2^-24 that is the correctly rounded FP32 product, unless an rms is above 2^120. Nothing else is
contracted to an FMA, so the three forms of the forward give the same bits.

`column_sums` is the second stage of every gradient that all tokens contribute to. The first writes one row of partial
sums for each of its programs. Grouping and order depend on the shape alone."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8core.kernels.quantise import (
    ColumnCodes,
    RowCodes,
    codes_of,
    forward_rows,
    larger,
    quarters_of_tile,
    report,
    scale_and_inverse,
    store_columns,
    to_bf16,
    token_columns,
)
from fp8core.numerics.e4m3 import Codes, FiniteFlag, finite_check
from fp8core.numerics.recipe import AMAX_FLOOR, TILE, Grouping

_ROWS = 64
_COLUMNS = 32
_AMAX_FLOOR = tl.constexpr(AMAX_FLOOR)


@triton.jit
def _column_sums_kernel(
    x: tl.tensor, sums: tl.tensor, rows: tl.tensor, columns: tl.tensor, block: tl.constexpr, width: tl.constexpr
) -> None:
    column = tl.program_id(0) * width + tl.arange(0, width)
    total = tl.zeros([block, width], tl.float32)
    for start in range(0, rows, block):
        row = start + tl.arange(0, block)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        total += tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
    tl.store(sums + column, tl.sum(total, 0), mask=column < columns)


def column_sums(x: Tensor) -> Tensor:
    assert x.is_contiguous()
    assert x.numel() < 2**31
    sums = torch.empty(x.shape[1], device=x.device)
    with torch.cuda.device_of(x):
        _column_sums_kernel[(triton.cdiv(x.shape[1], _COLUMNS),)](x, sums, *x.shape, _ROWS, _COLUMNS)
    return sums


# Elements of a row that a warp holds.
_FORWARD_ELEMENTS = 1024
_BACKWARD_ELEMENTS = 256
_MOST_WARPS = 16
_TILE_REGISTERS = 128
# Two programs of 512 threads then fit on a multiprocessor.
_BACKWARD_REGISTERS = 64
# Programs of the backward, each of which adds up the gradient of the weight over its rows.
_BACKWARD_PROGRAMS = 512


@triton.jit
def _add_row(
    x: tl.tensor, added: tl.tensor, total: tl.tensor, at: tl.tensor, inside: tl.tensor, adds: tl.constexpr
) -> tl.tensor:
    """The residual stream in FP32: x, or its rounded sum with `added`, which is stored."""
    values = tl.load(x + at, mask=inside, other=0.0)
    if adds:
        other = tl.load(added + at, mask=inside, other=0.0)
        values = to_bf16(values.to(tl.float32) + other.to(tl.float32))
        tl.store(total + at, values, mask=inside)
    return values.to(tl.float32)


@triton.jit
def inverse_rms(squares: tl.tensor, columns: tl.constexpr, eps: tl.constexpr) -> tl.tuple:
    """1 / rms from FP64 sums of squares: rounded to FP32, and as the sum of two FP32 numbers that are not negative.

    Were the second negative, a negative zero would come out of the FMA as a positive one.
    """
    mean = squares * tl.full([], 1.0 / columns, tl.float64)
    inverse = tl.rsqrt(mean + tl.full([], eps, tl.float64))
    rounded = inverse.to(tl.float32)
    below = (rounded.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)
    high = tl.where(rounded.to(tl.float64) > inverse, below, rounded)
    return rounded, high, (inverse - high.to(tl.float64)).to(tl.float32)


@triton.jit
def normalise(values: tl.tensor, high: tl.tensor, low: tl.tensor, weight: tl.tensor) -> tl.tensor:
    """BF16 of values / rms * weight, from both parts of 1 / rms."""
    return to_bf16(tl.fma(values, high, values * low) * weight)


@triton.jit
def _row_inverse(values: tl.tensor, columns: tl.constexpr, eps: tl.constexpr) -> tl.tuple:
    wide = values.to(tl.float64)
    return inverse_rms(tl.sum(tl.sum(wide * wide, 1), 0), columns, eps)


@triton.jit
def _add_norm_kernel(
    x: tl.tensor, added: tl.tensor, weight: tl.tensor, total: tl.tensor, normed: tl.tensor, inverses: tl.tensor,
    columns: tl.constexpr, eps: tl.constexpr, adds: tl.constexpr, groups: tl.constexpr, group: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, groups)[:, None] * group + tl.arange(0, group)[None, :]
    inside, at = column < columns, row * columns + column
    values = _add_row(x, added, total, at, inside, adds)
    rounded, high, low = _row_inverse(values, columns, eps)
    scale = tl.load(weight + column, mask=inside, other=0.0)
    tl.store(normed + at, normalise(values, high, low, scale), mask=inside)
    tl.store(inverses + row, rounded)


@triton.jit
def _add_norm_row_codes_kernel(
    x: tl.tensor, added: tl.tensor, weight: tl.tensor, total: tl.tensor, codes: tl.tensor, scales: tl.tensor,
    inverses: tl.tensor, not_finite: tl.tensor, scale_pitch: tl.tensor, columns: tl.constexpr, eps: tl.constexpr,
    adds: tl.constexpr, pow2: tl.constexpr, groups: tl.constexpr, group: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    left = tl.arange(0, groups)
    column = left[:, None] * group + tl.arange(0, group)[None, :]
    inside, at = column < columns, row * columns + column
    values = _add_row(x, added, total, at, inside, adds)
    rounded, high, low = _row_inverse(values, columns, eps)
    tl.store(inverses + row, rounded)
    tl.store(inverses + tl.num_programs(0) + row, high)
    tl.store(inverses + 2 * tl.num_programs(0) + row, low)
    normed = normalise(values, high, low, tl.load(weight + column, mask=inside, other=0.0)).to(tl.float32)
    amax = tl.reduce(tl.abs(normed), 1, larger)
    scale, inverse = scale_and_inverse(amax, _AMAX_FLOOR, pow2)
    tl.store(codes + at, codes_of(normed, scale[:, None], inverse[:, None], _AMAX_FLOOR, pow2), mask=inside)
    tl.store(scales + left.to(tl.int64) * scale_pitch + row, scale, mask=left * group < columns)
    report(not_finite, amax)


@triton.jit
def _normed_quarter(
    total: tl.tensor, inverses: tl.tensor, scale: tl.tensor, row: tl.tensor, column: tl.tensor, rows: tl.tensor,
    columns: tl.tensor,
) -> tl.tensor:  # fmt: skip
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(total + row[:, None] * columns + column[None, :], mask=inside, other=0.0).to(tl.float32)
    high = tl.load(inverses + rows + row, mask=row < rows, other=0.0)
    low = tl.load(inverses + 2 * rows + row, mask=row < rows, other=0.0)
    return normalise(values, high[:, None], low[:, None], scale[None, :]).to(tl.float32)


@triton.jit
def _norm_column_codes_kernel(
    total: tl.tensor, inverses: tl.tensor, weight: tl.tensor, column_words: tl.tensor, column_scales: tl.tensor,
    rows: tl.tensor, columns: tl.tensor, column_word_pitch: tl.tensor, column_scale_pitch: tl.tensor,
    pow2: tl.constexpr, tile: tl.constexpr,
) -> None:  # fmt: skip
    # From the end, of which the sum is still in the L2 cache.
    across, down = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    column, row = quarters_of_tile(across, down, tile)
    scale = tl.load(weight + column, mask=column < columns, other=0.0)
    a = _normed_quarter(total, inverses, scale, row, column, rows, columns)
    b = _normed_quarter(total, inverses, scale, row + 1, column, rows, columns)
    c = _normed_quarter(total, inverses, scale, row + 2, column, rows, columns)
    d = _normed_quarter(total, inverses, scale, row + 3, column, rows, columns)
    store_columns(
        a, b, c, d, across, down, column_words, column_scales, columns, column_word_pitch, column_scale_pitch, None,
        pow2, tile,
    )  # fmt: skip


@triton.jit
def _upstream(
    grad_normed: tl.tensor, grad_total: tl.tensor, total: tl.tensor, at: tl.tensor, inside: tl.tensor,
    adds: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    direct = tl.load(grad_normed + at, mask=inside, other=0.0)
    around = tl.load(grad_total + at, mask=inside, other=0.0) if adds else direct
    return direct, around, tl.load(total + at, mask=inside, other=0.0)


@triton.jit
def _backward_kernel(
    grad_normed: tl.tensor, grad_total: tl.tensor, total: tl.tensor, weight: tl.tensor, inverses: tl.tensor,
    grad: tl.tensor, partial_sums: tl.tensor, rows: tl.tensor, rows_per_program: tl.tensor, columns: tl.constexpr,
    adds: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    column = tl.arange(0, block)
    inside = column < columns
    scale = tl.load(weight + column, mask=inside, other=0.0)
    weight_sum = tl.zeros([block], tl.float32)
    start = tl.program_id(0).to(tl.int64) * rows_per_program
    stop = tl.minimum(start + rows_per_program, rows)
    direct, around, values = _upstream(grad_normed, grad_total, total, start * columns + column, inside, adds)
    for row in range(start, stop):
        at = row * columns + column
        # The next row is on its way while this one is reduced; after the last one, that once more.
        after = tl.minimum(row + 1, stop - 1) * columns + column
        next_direct, next_around, next_values = _upstream(grad_normed, grad_total, total, after, inside, adds)
        inverse = tl.load(inverses + row)
        upstream, normed = direct.to(tl.float32), values.to(tl.float32) * inverse
        weight_sum += upstream * normed
        scaled = upstream * scale
        mean = tl.sum(scaled * normed, 0) * (1.0 / columns)
        found = inverse * (scaled - normed * mean)
        if adds:
            found += around.to(tl.float32)
        tl.store(grad + at, to_bf16(found), mask=inside)
        direct, around, values = next_direct, next_around, next_values
    tl.store(partial_sums + tl.program_id(0).to(tl.int64) * columns + column, weight_sum, mask=inside)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    x, other, total = _streams(x, delta)
    rows, columns = x.shape
    normed = torch.empty_like(x)
    inverses = torch.empty(rows, device=x.device)
    adds = delta is not None
    groups = _groups(columns)
    with torch.cuda.device_of(x):
        _add_norm_kernel[(rows,)](
            x, other, weight, total, normed, inverses, columns, eps, adds, groups, TILE, **_options(columns)
        )
    return total, normed, inverses


def add_norm_row_codes(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, rows: Grouping, flag: FiniteFlag | None = None
) -> tuple[Tensor, Codes]:
    with finite_check(x.device, flag) as not_finite:
        total, codes, _inverses = _row_pass(x, delta, weight, eps, rows, not_finite)
    return total, codes


def add_norm_codes(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    rows: Grouping,
    columns: Grouping,
    flag: FiniteFlag | None = None,
) -> tuple[Tensor, Codes, Codes, Tensor]:
    with finite_check(x.device, flag) as not_finite:
        total, by_row, inverses = _row_pass(x, delta, weight, eps, rows, not_finite)
    (tokens, hidden), pow2 = total.shape, token_columns(columns)
    out = ColumnCodes.empty(tokens, hidden, total.device)
    words = out.words
    with torch.cuda.device_of(total):
        _norm_column_codes_kernel[(triton.cdiv(hidden, TILE), out.scales.shape[0])](
            total, inverses, weight, words, out.scales, tokens, hidden, words.stride(0), out.scales.stride(0),
            pow2, TILE, num_warps=8, maxnreg=_TILE_REGISTERS, enable_fp_fusion=False,
        )  # fmt: skip
    return total, by_row, out.result(tokens), inverses[0]


def _row_pass(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, grouping: Grouping, not_finite: Tensor
) -> tuple[Tensor, Codes, Tensor]:
    """The sum, the codes of its norm, and 1 / rms as of `inverse_rms`, FP32 [3, rows]."""
    x, other, total = _streams(x, delta)
    rows, columns = x.shape
    out = RowCodes.empty(rows, columns, x.device)
    groups = _groups(columns)
    inverses = torch.empty(3, rows, device=x.device)
    with torch.cuda.device_of(x):
        _add_norm_row_codes_kernel[(rows,)](
            x, other, weight, total, *out, inverses, not_finite, out.scales.stride(0), columns, eps,
            delta is not None, forward_rows(grouping), groups, TILE, **_options(columns),
        )  # fmt: skip
    return total, out.result(), inverses


def add_norm_backward(
    grad_normed: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    grad_normed = grad_normed.contiguous()
    total = total.contiguous()
    rows, columns = grad_normed.shape
    grad = torch.empty_like(grad_normed)
    other = grad_normed if grad_total is None else grad_total.contiguous()
    rows_per_program = triton.cdiv(rows, _BACKWARD_PROGRAMS)
    partial_sums = torch.empty(triton.cdiv(rows, rows_per_program), columns, device=grad.device)
    block = triton.next_power_of_2(columns)
    with torch.cuda.device_of(grad):
        _backward_kernel[(partial_sums.shape[0],)](
            grad_normed, other, total, weight, inverse, grad, partial_sums, rows, rows_per_program, columns,
            grad_total is not None, block, **_backward_options(block),
        )  # fmt: skip
    return grad, column_sums(partial_sums)


def _streams(x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """x, what is added to it and room for the sum; without an addend all three are x."""
    assert x.dtype == torch.bfloat16
    x = x.contiguous()
    return (x, x, x) if delta is None else (x, delta.contiguous(), torch.empty_like(x))


def _groups(columns: int) -> int:
    return int(triton.next_power_of_2(triton.cdiv(columns, TILE)))


def _options(columns: int) -> dict[str, int | bool]:
    return {"num_warps": _warps(columns, _FORWARD_ELEMENTS), "enable_fp_fusion": False}


def _backward_options(block: int) -> dict[str, int | bool]:
    warps = _warps(block, _BACKWARD_ELEMENTS)
    # Longer rows than 16 warps hold in that way need the registers of a whole multiprocessor.
    registers = _BACKWARD_REGISTERS if block <= warps * _BACKWARD_ELEMENTS else 2 * _BACKWARD_REGISTERS
    return {"num_warps": warps, "maxnreg": registers, "enable_fp_fusion": False}


def _warps(columns: int, elements: int) -> int:
    return int(min(_MOST_WARPS, max(1, triton.next_power_of_2(columns) // elements)))
