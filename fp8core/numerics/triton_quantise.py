"""Block-FP8 quantisers in Triton, equal byte for byte to the torch reference in `e4m3`; `triton_e4m3` says why."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8core.numerics.e4m3 import TILE, ScaleRule
from fp8core.numerics.triton_e4m3 import (
    RowCodes,
    TileCodes,
    codes_of,
    larger,
    quarters_of_tile,
    scale_and_inverse,
    store_row_groups,
    store_tile,
)

_FLOAT32_MAX = tl.constexpr(torch.finfo(torch.float32).max)

_ROWS_PER_PROGRAM = 32
# Two programs of 256 threads then fit on a multiprocessor; one cannot load while it computes.
_REGISTERS = 128


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
    values = _load(x, row, column, rows, columns)
    store_row_groups(codes, scales, not_finite, values, row, column, tl.program_id(0), rows, columns, scale_pitch, pow2)


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
    amax = tl.reduce(tl.reduce(tl.abs(values), 1, larger), 0, larger)
    scale, inverse = scale_and_inverse(amax, pow2)
    tl.store(codes + at, codes_of(values, scale, inverse, pow2), mask=inside)
    tl.store(scales + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), scale)
    tl.store(not_finite, 1, mask=~(amax <= _FLOAT32_MAX))


@triton.jit
def _load(x: tl.tensor, row: tl.tensor, column: tl.tensor, rows: tl.tensor, columns: tl.tensor) -> tl.tensor:
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0).to(tl.float32)


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
    across, down = tl.program_id(0), tl.program_id(1)
    column, row = quarters_of_tile(across, down, tile)
    a = _load(x, row, column, rows, columns)
    b = _load(x, row + 1, column, rows, columns)
    c = _load(x, row + 2, column, rows, columns)
    d = _load(x, row + 3, column, rows, columns)
    # fmt: off
    store_tile(
        a, b, c, d, across, down, row_codes, row_scales, column_words, column_scales, not_finite, rows, columns,
        row_scale_pitch, column_word_pitch, column_scale_pitch, pow2, tile,
    )
    # fmt: on


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
    out = RowCodes.empty(rows, columns, x.device)
    grid = (out.scales.shape[0], triton.cdiv(rows, _ROWS_PER_PROGRAM))
    with torch.cuda.device_of(x):
        _rows_kernel[grid](
            x, *out, not_finite, rows, columns, out.scales.stride(0), rule == "pow2", _ROWS_PER_PROGRAM, TILE
        )
    return out.result()


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
    out = TileCodes.empty(rows, columns, x.device)
    with torch.cuda.device_of(x):
        _rows_and_columns_kernel[out.tiles](
            x, *out.arguments(not_finite), rule == "pow2", TILE, num_warps=8, maxnreg=_REGISTERS
        )
    return out.result()


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
