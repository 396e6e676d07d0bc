"""Block-FP8 quantisers in Triton, equal byte for byte to the torch reference in `e4m3`.

What makes the bytes equal:

- amax keeps NaN (`max.NaN`), and a group whose amax is not finite sets the caller's flag instead of raising.
- `pow2`: the scale is amax with its exponent changed, in integers; x / 2^k is the product with 2^-k, which is a normal
  number for every scale there is (2^-42 to 2^120).
- `fp32`: `div.rn` for every quotient would need more instructions than the memory leaves time for. Instead 1 / scale is
  rounded correctly once per group, and a product with it is corrected twice by its FMA residual, after which it is the
  correctly rounded quotient (Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor",
  1990). amax / 448 is made in the same way. The residual underflows for |x| < 2^-101 only, where the code is a zero of
  x's sign under any scale.
- E4M3 comes from `cvt.rn.satfinite`, to nearest even; a quotient exceeds 448 by one unit of FP32 at most.

Rows and columns are quantised from one read. Each program holds a 128 x 128 tile as four interleaved quarters (rows
4i, 4i + 1, 4i + 2, 4i + 3), so that a thread packs four codes of one column into a word and the transposition moves
words instead of bytes.

Scales of rows and columns lie group by group (`[groups, rows]`, padded to 16 bytes) and are returned as the transpose,
the layout that Hopper's block-scaled GEMMs read; their values and shape are those of the reference.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8core.numerics.e4m3 import AMAX_FLOOR, E4M3_MAX, TILE, ScaleRule

_E4M3_MAX = tl.constexpr(E4M3_MAX)
_E4M3_MAX_INVERSE = tl.constexpr((1 / torch.tensor(E4M3_MAX)).item())
_AMAX_FLOOR = tl.constexpr(AMAX_FLOOR)
_FLOAT32_MAX = tl.constexpr(torch.finfo(torch.float32).max)

_ROWS_PER_PROGRAM = 32
# Two programs of 256 threads then fit on a multiprocessor; one cannot load while it computes.
_REGISTERS = 128
# Both the row pitch of column codes and that of scales: what a tensor map needs.
_PITCH_BYTES = 16


@triton.jit
def _larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _quotient(x: tl.tensor, divisor: tl.tensor, inverse: tl.tensor) -> tl.tensor:
    # Residuals with this sign keep that of zeros; a product with -1 is a negation, where Triton's minus is 0 - x.
    minus_x, minus_inverse = x * -1.0, inverse * -1.0
    quotient = x * inverse
    quotient = tl.fma(tl.fma(quotient, divisor, minus_x), minus_inverse, quotient)
    return tl.fma(tl.fma(quotient, divisor, minus_x), minus_inverse, quotient)


@triton.jit
def _scale_and_inverse(amax: tl.tensor, pow2: tl.constexpr) -> tl.tuple:
    floored = tl.maximum(amax, _AMAX_FLOOR)
    if pow2:
        # 448 is 1.75 * 2^8: the exponent of amax less 8, and one more where its mantissa exceeds 1.75.
        bits = ((floored.to(tl.int32, bitcast=True) + 0x001FFFFF) & 0x7F800000) - 0x04000000
        # The exponent fields of 2^k and 2^-k add up to 254.
        return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)
    scale = _quotient(floored, _E4M3_MAX, _E4M3_MAX_INVERSE)
    return scale, tl.div_rn(1.0, scale)


@triton.jit
def _codes(x: tl.tensor, scale: tl.tensor, inverse: tl.tensor, pow2: tl.constexpr) -> tl.tensor:
    quotient = x * inverse if pow2 else _quotient(x, scale, inverse)
    return quotient.to(tl.float8e4nv)


@triton.jit
def _report(not_finite: tl.tensor, amax: tl.tensor) -> None:
    tl.store(not_finite + tl.zeros_like(amax).to(tl.int32), 1, mask=~(amax <= _FLOAT32_MAX))


@triton.jit
def _rows_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    not_finite: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    scale_pitch: tl.tensor,
    pow2: tl.constexpr,
    block: tl.constexpr,
    group: tl.constexpr,
) -> None:
    row = tl.program_id(1).to(tl.int64) * block + tl.arange(0, block)
    column = tl.program_id(0) * group + tl.arange(0, group)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None] * columns + column[None, :]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    amax = tl.reduce(tl.abs(values), 1, _larger)
    scale, inverse = _scale_and_inverse(amax, pow2)
    tl.store(codes + at, _codes(values, scale[:, None], inverse[:, None], pow2), mask=inside)
    tl.store(scales + tl.program_id(0).to(tl.int64) * scale_pitch + row, scale, mask=row < rows)
    _report(not_finite, amax)


@triton.jit
def _tiles_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    not_finite: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    pow2: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    row = tl.program_id(1).to(tl.int64) * tile + tl.arange(0, tile)
    column = tl.program_id(0) * tile + tl.arange(0, tile)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None] * columns + column[None, :]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    amax = tl.reduce(tl.reduce(tl.abs(values), 1, _larger), 0, _larger)
    scale, inverse = _scale_and_inverse(amax, pow2)
    tl.store(codes + at, _codes(values, scale, inverse, pow2), mask=inside)
    tl.store(scales + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), scale)
    tl.store(not_finite, 1, mask=~(amax <= _FLOAT32_MAX))


@triton.jit
def _quarter(x: tl.tensor, row: tl.tensor, column: tl.tensor, rows: tl.tensor, columns: tl.tensor) -> tl.tensor:
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_quarter(
    codes: tl.tensor,
    values: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    pow2: tl.constexpr,
) -> tl.tensor:
    amax = tl.reduce(tl.abs(values), 1, _larger)
    scale, inverse = _scale_and_inverse(amax, pow2)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    quotients = _codes(values, scale[:, None], inverse[:, None], pow2)
    tl.store(codes + row[:, None] * columns + column[None, :], quotients, mask=inside)
    return amax


@triton.jit
def _byte(x: tl.tensor, scale: tl.tensor, inverse: tl.tensor, pow2: tl.constexpr) -> tl.tensor:
    return _codes(x, scale, inverse, pow2).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def _rows_and_columns_kernel(
    x: tl.tensor,
    row_codes: tl.tensor,
    row_scales: tl.tensor,
    column_words: tl.tensor,
    column_scales: tl.tensor,
    not_finite: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    row_scale_pitch: tl.tensor,
    column_word_pitch: tl.tensor,
    column_scale_pitch: tl.tensor,
    pow2: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    across, down = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = across * tile + tl.arange(0, tile)
    word = down * (tile // 4) + tl.arange(0, tile // 4)
    row = 4 * word
    a = _quarter(x, row, column, rows, columns)
    b = _quarter(x, row + 1, column, rows, columns)
    c = _quarter(x, row + 2, column, rows, columns)
    d = _quarter(x, row + 3, column, rows, columns)

    amax_a = _store_quarter(row_codes, a, row, column, rows, columns, pow2)
    amax_b = _store_quarter(row_codes, b, row + 1, column, rows, columns, pow2)
    amax_c = _store_quarter(row_codes, c, row + 2, column, rows, columns, pow2)
    amax_d = _store_quarter(row_codes, d, row + 3, column, rows, columns, pow2)
    # In the order of the rows: a join makes a new last dimension.
    amax = tl.reshape(tl.join(tl.join(amax_a, amax_c), tl.join(amax_b, amax_d)), [tile])
    scale, _inverse = _scale_and_inverse(amax, pow2)
    every_row = down * tile + tl.arange(0, tile)
    tl.store(row_scales + across * row_scale_pitch + every_row, scale, mask=every_row < rows)
    _report(not_finite, amax)

    largest = _larger(_larger(tl.abs(a), tl.abs(b)), _larger(tl.abs(c), tl.abs(d)))
    scale, inverse = _scale_and_inverse(tl.reduce(largest, 0, _larger), pow2)
    tl.store(column_scales + down * column_scale_pitch + column, scale, mask=column < columns)
    scale, inverse = scale[None, :], inverse[None, :]
    low = _byte(a, scale, inverse, pow2) | (_byte(b, scale, inverse, pow2) << 8)
    high = _byte(c, scale, inverse, pow2) | (_byte(d, scale, inverse, pow2) << 8)
    words = tl.trans(low | (high << 16))
    inside = (column < columns)[:, None] & (word < column_word_pitch)[None, :]
    tl.store(column_words + column[:, None] * column_word_pitch + word[None, :], words, mask=inside)


def quantise_rows(x: Tensor, rule: ScaleRule, not_finite: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of 1 x 128 groups along the last dimension.

    Args:
        x: BF16 or FP32 [rows, columns] on a GPU; made contiguous.
        rule: scale rule.
        not_finite: int32 [1] on the same device; set to 1 when x holds NaN or infinity (the codes and scales of such
            a group mean nothing), else left alone.

    Returns:
        codes: float8_e4m3fn [rows, columns].
        scales: FP32 [rows, ceil(columns / 128)], column-major.
    """
    x = _checked(x)
    rows, columns = x.shape
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = _scales(rows, columns, x.device)
    grid = (scales.shape[0], triton.cdiv(rows, _ROWS_PER_PROGRAM))
    with torch.cuda.device_of(x):
        _rows_kernel[grid](
            x, codes, scales, not_finite, rows, columns, scales.stride(0), rule == "pow2", _ROWS_PER_PROGRAM, TILE
        )
    return codes, scales.t()[:rows]


def quantise_rows_and_columns(
    x: Tensor, rule: ScaleRule, not_finite: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Codes and scales of 1 x 128 groups and of 128 x 1 groups, from one read of the tensor.

    Args:
        x, rule, not_finite: as for `quantise_rows`.

    Returns:
        rows: as `quantise_rows`.
        columns: codes float8_e4m3fn [columns, rows] and scales FP32 [columns, ceil(rows / 128)] of the transpose; a
            number of rows that is no multiple of 16 costs a copy of the codes.
    """
    x = _checked(x)
    rows, columns = x.shape
    row_codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    row_scales = _scales(rows, columns, x.device)
    pitch = _round_up(rows, _PITCH_BYTES)
    column_codes = torch.empty(columns, pitch, dtype=torch.float8_e4m3fn, device=x.device)
    column_scales = _scales(columns, rows, x.device)
    words = column_codes.view(torch.int32)
    grid = (row_scales.shape[0], column_scales.shape[0])
    with torch.cuda.device_of(x):
        _rows_and_columns_kernel[grid](
            x,
            row_codes,
            row_scales,
            words,
            column_scales,
            not_finite,
            rows,
            columns,
            row_scales.stride(0),
            words.stride(0),
            column_scales.stride(0),
            rule == "pow2",
            TILE,
            num_warps=8,
            maxnreg=_REGISTERS,
        )
    by_column = column_codes[:, :rows].contiguous(), column_scales.t()[:columns]
    return (row_codes, row_scales.t()[:rows]), by_column


def quantise_tiles(x: Tensor, rule: ScaleRule, not_finite: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of 128 x 128 tiles; those at the lower and right edge may be smaller.

    Args:
        x, rule, not_finite: as for `quantise_rows`; x is [out, in].

    Returns:
        codes: float8_e4m3fn [out, in].
        scales: FP32 [ceil(out / 128), ceil(in / 128)], the layout of `weight_scale_inv`.
    """
    x = _checked(x)
    rows, columns = x.shape
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = torch.empty(triton.cdiv(rows, TILE), triton.cdiv(columns, TILE), device=x.device)
    with torch.cuda.device_of(x):
        _tiles_kernel[scales.shape[::-1]](
            x, codes, scales, not_finite, rows, columns, rule == "pow2", TILE, num_warps=8
        )
    return codes, scales


def _checked(x: Tensor) -> Tensor:
    assert x.dim() == 2, f"a matrix is quantised, not {tuple(x.shape)}"
    assert x.dtype in (torch.bfloat16, torch.float32), f"BF16 or FP32 is quantised, not {x.dtype}"
    assert x.numel(), "a matrix without elements has no amax"
    return x.contiguous()


def _scales(rows: int, columns: int, device: torch.device) -> Tensor:
    """Room for [groups, rows padded to the pitch]."""
    return torch.empty(triton.cdiv(columns, TILE), _round_up(rows, _PITCH_BYTES // 4), device=device)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
