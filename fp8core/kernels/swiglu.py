"""SwiGLU, its codes and its backward in Triton.

silu is FP32, with the processor's exponential (a relative error of about 2^-22). Nothing is contracted to an FMA, so
all forms give the same bits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8core.kernels.quantise import (
    INTERPRETED,
    RowCodes,
    TileCodes,
    forward_rows,
    quarters_of_tile,
    rows_and_columns,
    store_row_groups,
    store_tile,
    to_bf16,
)
from fp8core.numerics.e4m3 import Codes, FiniteFlag, finite_check, row_and_column_codes
from fp8core.numerics.grouped import ExpertRows
from fp8core.numerics.recipe import TILE, Grouping

_ROWS_PER_PROGRAM = 32
_BACKWARD_ROWS_PER_PROGRAM = 16
_TILE_REGISTERS = 128
# 1 / (1 + 2^(x * -log2(e)))
_SIGMOID = tl.constexpr(
    """{
    .reg .f32 t;
    mul.rn.f32 t, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 t, t;
    add.rn.f32 t, t, 0f3F800000;
    rcp.approx.ftz.f32 $0, t;
    }"""
)


@triton.jit
def _sigmoid(x: tl.tensor) -> tl.tensor:
    if INTERPRETED:  # which has no inline assembly
        return 1.0 / (1.0 + tl.exp(-x))
    # Triton's exponential and quotient take three times as many instructions, for subnormals that are added to 1 and
    # quotients below 2^-126.
    return tl.inline_asm_elementwise(_SIGMOID, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _activated(gate: tl.tensor, sigmoid: tl.tensor) -> tl.tensor:
    return to_bf16(gate * sigmoid).to(tl.float32)


@triton.jit
def _load(x: tl.tensor, at: tl.tensor, inside: tl.tensor) -> tl.tensor:
    return tl.load(x + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _product(gate_up: tl.tensor, row: tl.tensor, column: tl.tensor, rows: tl.tensor, columns: tl.tensor) -> tl.tensor:
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None] * (2 * columns) + column[None, :]
    gate, up = _load(gate_up, at, inside), _load(gate_up, at + columns, inside)
    return to_bf16(_activated(gate, _sigmoid(gate)) * up)


@triton.jit
def _gate_gradient(grad: tl.tensor, gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    sigmoid = _sigmoid(gate)
    return to_bf16(grad * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid))))


@triton.jit
def _up_gradient(grad: tl.tensor, gate: tl.tensor) -> tl.tensor:
    return to_bf16(grad * _activated(gate, _sigmoid(gate)))


@triton.jit
def _forward_kernel(
    gate_up: tl.tensor, out: tl.tensor, rows: tl.tensor, columns: tl.tensor, block: tl.constexpr, group: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * block + tl.arange(0, block)
    column = tl.program_id(0) * group + tl.arange(0, group)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    values = _product(gate_up, row, column, rows, columns)
    tl.store(out + row[:, None] * columns + column[None, :], values, mask=inside)


@triton.jit(do_not_specialize=["none"])
def _row_codes_kernel(
    gate_up: tl.tensor, codes: tl.tensor, scales: tl.tensor, not_finite: tl.tensor, rows: tl.tensor, columns: tl.tensor,
    scale_pitch: tl.tensor, slots: tl.tensor, none: tl.tensor, pow2: tl.constexpr, block: tl.constexpr,
    group: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * block + tl.arange(0, block)
    if slots is not None:
        # Nothing is read or written beyond the last row.
        row = tl.where(tl.load(slots + row, mask=row < rows, other=none) < none, row, rows)
        if tl.min(row, 0) == rows:
            return
    column = tl.program_id(0) * group + tl.arange(0, group)
    values = _product(gate_up, row, column, rows, columns).to(tl.float32)
    store_row_groups(codes, scales, not_finite, values, row, column, tl.program_id(0), rows, columns, scale_pitch, pow2)


@triton.jit
def _codes_kernel(
    gate_up: tl.tensor, row_codes: tl.tensor, row_scales: tl.tensor, column_words: tl.tensor, column_scales: tl.tensor,
    not_finite: tl.tensor, rows: tl.tensor, columns: tl.tensor, row_scale_pitch: tl.tensor,
    column_word_pitch: tl.tensor, column_scale_pitch: tl.tensor, spans: tl.tensor, floor: tl.constexpr,
    pow2: tl.constexpr, columns_pow2: tl.constexpr, tile: tl.constexpr,
) -> None:  # fmt: skip
    across, down = tl.program_id(0), tl.program_id(1)
    column, row = quarters_of_tile(across, down, tile)
    a = _product(gate_up, row, column, rows, columns).to(tl.float32)
    b = _product(gate_up, row + 1, column, rows, columns).to(tl.float32)
    c = _product(gate_up, row + 2, column, rows, columns).to(tl.float32)
    d = _product(gate_up, row + 3, column, rows, columns).to(tl.float32)
    store_tile(
        a, b, c, d, across, down, row_codes, row_scales, column_words, column_scales, not_finite, rows, columns,
        row_scale_pitch, column_word_pitch, column_scale_pitch, spans, floor, pow2, columns_pow2, tile,
    )  # fmt: skip


@triton.jit
def _backward_kernel(
    grad: tl.tensor, gate_up: tl.tensor, out: tl.tensor, rows: tl.tensor, columns: tl.tensor, block: tl.constexpr,
    group: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * block + tl.arange(0, block)
    column = tl.program_id(0) * group + tl.arange(0, group)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    upstream = _load(grad, row[:, None] * columns + column[None, :], inside)
    at = row[:, None] * (2 * columns) + column[None, :]
    gate, up = _load(gate_up, at, inside), _load(gate_up, at + columns, inside)
    tl.store(out + at, _gate_gradient(upstream, gate, up), mask=inside)
    tl.store(out + at + columns, _up_gradient(upstream, gate), mask=inside)


@triton.jit
def _gradient_quarter(
    grad: tl.tensor, gate_up: tl.tensor, of_up: tl.tensor, row: tl.tensor, column: tl.tensor, rows: tl.tensor,
    half: tl.tensor,
) -> tl.tensor:  # fmt: skip
    # Both halves are whole tiles: no column is outside.
    inside = (row < rows)[:, None]
    upstream = _load(grad, row[:, None] * half + column[None, :], inside)
    at = row[:, None] * (2 * half) + column[None, :]
    gate = _load(gate_up, at, inside)
    found = _up_gradient(upstream, gate) if of_up else _gate_gradient(upstream, gate, _load(gate_up, at + half, inside))
    return found.to(tl.float32)


@triton.jit
def _backward_codes_kernel(
    grad: tl.tensor, gate_up: tl.tensor, row_codes: tl.tensor, row_scales: tl.tensor, column_words: tl.tensor,
    column_scales: tl.tensor, not_finite: tl.tensor, rows: tl.tensor, columns: tl.tensor, row_scale_pitch: tl.tensor,
    column_word_pitch: tl.tensor, column_scale_pitch: tl.tensor, spans: tl.tensor, floor: tl.constexpr,
    pow2: tl.constexpr, columns_pow2: tl.constexpr, tile: tl.constexpr,
) -> None:  # fmt: skip
    of_up, across, down = tl.program_id(0) % 2, tl.program_id(0) // 2, tl.program_id(1)
    column, row = quarters_of_tile(across, down, tile)
    half = columns // 2
    a = _gradient_quarter(grad, gate_up, of_up == 1, row, column, rows, half)
    b = _gradient_quarter(grad, gate_up, of_up == 1, row + 1, column, rows, half)
    c = _gradient_quarter(grad, gate_up, of_up == 1, row + 2, column, rows, half)
    d = _gradient_quarter(grad, gate_up, of_up == 1, row + 3, column, rows, half)
    across += of_up * (half // tile)
    store_tile(
        a, b, c, d, across, down, row_codes, row_scales, column_words, column_scales, not_finite, rows, columns,
        row_scale_pitch, column_word_pitch, column_scale_pitch, spans, floor, pow2, columns_pow2, tile,
    )  # fmt: skip


def swiglu(gate_up: Tensor) -> Tensor:
    gate_up, rows, columns = _halves(gate_up)
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device=gate_up.device)
    grid = (triton.cdiv(columns, TILE), triton.cdiv(rows, _ROWS_PER_PROGRAM))
    with torch.cuda.device_of(gate_up):
        _forward_kernel[grid](gate_up, out, rows, columns, _ROWS_PER_PROGRAM, TILE, enable_fp_fusion=False)
    return out


def swiglu_row_codes(
    gate_up: Tensor, rows: Grouping, flag: FiniteFlag | None = None, by_expert: ExpertRows | None = None
) -> Codes:
    gate_up, tokens, width = _halves(gate_up)
    out = RowCodes.empty(tokens, width, gate_up.device)
    grid = (out.scales.shape[0], triton.cdiv(tokens, _ROWS_PER_PROGRAM))
    pow2 = forward_rows(rows)
    slots, none = (None, 0) if by_expert is None else (by_expert.slots, by_expert.places.numel())
    with torch.cuda.device_of(gate_up), finite_check(gate_up.device, flag) as not_finite:
        _row_codes_kernel[grid](
            gate_up, *out, not_finite, tokens, width, out.scales.stride(0), slots, none, pow2, _ROWS_PER_PROGRAM, TILE,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out.result()


def swiglu_codes(
    gate_up: Tensor, rows: Grouping, columns: Grouping, flag: FiniteFlag | None = None, spans: Tensor | None = None
) -> tuple[Codes, Codes]:
    gate_up, tokens, width = _halves(gate_up)
    out = TileCodes.empty(tokens, width, gate_up.device)
    rules = rows_and_columns(rows, columns)
    with torch.cuda.device_of(gate_up), finite_check(gate_up.device, flag) as not_finite:
        _codes_kernel[out.tiles](gate_up, *out.arguments(not_finite, spans), *rules, TILE, **_TILE_OPTIONS)
    return out.result()


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    gate_up, rows, columns = _halves(gate_up)
    out = torch.empty_like(gate_up)
    grid = (triton.cdiv(columns, TILE), triton.cdiv(rows, _BACKWARD_ROWS_PER_PROGRAM))
    with torch.cuda.device_of(gate_up):
        _backward_kernel[grid](
            grad.contiguous(), gate_up, out, rows, columns, _BACKWARD_ROWS_PER_PROGRAM, TILE, enable_fp_fusion=False
        )  # fmt: skip
    return out


def swiglu_backward_codes(
    grad: Tensor,
    gate_up: Tensor,
    rows: Grouping,
    columns: Grouping,
    flag: FiniteFlag | None = None,
    spans: Tensor | None = None,
) -> tuple[Codes, Codes]:
    gate_up, tokens, width = _halves(gate_up)
    # Where gate and up share a group of columns, one tile has both gradients: not worth a kernel.
    if width % TILE:
        return row_and_column_codes(swiglu_backward(grad, gate_up), rows, columns, flag, spans)
    out = TileCodes.empty(tokens, 2 * width, gate_up.device)
    rules = rows_and_columns(rows, columns)
    with torch.cuda.device_of(gate_up), finite_check(gate_up.device, flag) as not_finite:
        _backward_codes_kernel[out.tiles](
            grad.contiguous(), gate_up, *out.arguments(not_finite, spans), *rules, TILE, **_TILE_OPTIONS
        )
    return out.result()


_TILE_OPTIONS = {"num_warps": 8, "maxnreg": _TILE_REGISTERS, "enable_fp_fusion": False}


def _halves(gate_up: Tensor) -> tuple[Tensor, int, int]:
    assert gate_up.dtype == torch.bfloat16
    rows, columns = gate_up.shape
    return gate_up.contiguous(), rows, columns // 2
