"""Block-FP8 quantisers in Triton, and what every kernel that writes block-FP8 codes shares with them.

What makes the bytes those of `numerics.e4m3`:

- amax keeps NaN (`max.NaN`), and a group whose amax is not finite sets the caller's flag.
- `pow2`: the scale is amax with its exponent changed, in integers. x / 2^k is the product with 2^-k.
- `fp32`: 1 / scale is rounded correctly once per group. Its product is corrected twice by its FMA residual (Markstein,
  "Computation of elementary functions on the IBM RISC System/6000 processor", 1990). So is amax / 448. The residual
  underflows for |x| < 2^-101: below a scale of 2^-60 both are multiplied by 2^64 first.
- E4M3 comes from `cvt.rn.satfinite`. Triton's interpreter truncates; for it the rounding is written out.

Each program holds a 128 x 128 tile as four interleaved quarters (rows 4i, 4i + 1, 4i + 2, 4i + 3). So a thread packs
four codes of one column into a word, and the transposition moves words.

Scales lie group by group (`[groups, rows]`, padded to 16 bytes), as Hopper's block-scaled GEMMs read them."""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8core.numerics.e4m3 import Codes, FiniteFlag, finite_check, round_up
from fp8core.numerics.grouped import ExpertRows
from fp8core.numerics.recipe import AMAX_FLOOR, E4M3_MAX, GRADIENT_FLOOR, TILE, Grouping

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def to_bf16(x: tl.tensor) -> tl.tensor:
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    return x.to(tl.bfloat16)


@triton.jit
def to_e4m3(x: tl.tensor) -> tl.tensor:
    """E4M3 of FP32; magnitudes above 448 saturate."""
    if INTERPRETED:
        # As `e4m3.round_to_e4m3`, which gives the reason.
        clamped = tl.minimum(tl.maximum(x, -448.0), 448.0)
        exponent = tl.maximum(clamped.to(tl.int32, bitcast=True) & 0x7F800000, (127 - 6) << 23)
        magic = (exponent + (20 << 23) + 0x00400000).to(tl.float32, bitcast=True)
        sign = x.to(tl.int32, bitcast=True) & -0x80000000
        x = (((clamped + magic) - magic).to(tl.int32, bitcast=True) & 0x7FFFFFFF | sign).to(tl.float32, bitcast=True)
    return x.to(tl.float8e4nv)


_E4M3_MAX = tl.constexpr(E4M3_MAX)
_E4M3_MAX_INVERSE = tl.constexpr((1 / torch.tensor(E4M3_MAX)).item())
_AMAX_FLOOR = tl.constexpr(AMAX_FLOOR)
_GRADIENT_FLOOR = tl.constexpr(GRADIENT_FLOOR)
# Divisions of smaller values are made of their products with 2^64.
_SMALL = tl.constexpr(2.0**-60)
_UP = tl.constexpr(2.0**64)
_DOWN = tl.constexpr(2.0**-64)
_LEAST_AMAX = tl.constexpr(E4M3_MAX * 2.0**-60)
_FLOAT32_MAX = tl.constexpr(torch.finfo(torch.float32).max)

# Both the row pitch of column codes and that of scales: what a tensor map needs.
_PITCH_BYTES = 16


@triton.jit
def larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """The larger value, NaN if there is one."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _quotient(x: tl.tensor, divisor: tl.tensor, inverse: tl.tensor) -> tl.tensor:
    # Residuals with this sign keep that of zeros; a product with -1 is a negation, where Triton's minus is 0 - x.
    minus_x, minus_inverse = x * -1.0, inverse * -1.0
    quotient = x * inverse
    quotient = tl.fma(tl.fma(quotient, divisor, minus_x), minus_inverse, quotient)
    return tl.fma(tl.fma(quotient, divisor, minus_x), minus_inverse, quotient)


@triton.jit
def scale_and_inverse(amax: tl.tensor, floor: tl.constexpr, pow2: tl.constexpr) -> tl.tuple:
    floored = tl.maximum(amax, floor)
    if pow2:
        # 448 is 1.75 * 2^8: the exponent of amax less 8, and one more where its mantissa exceeds 1.75.
        bits = ((floored.to(tl.int32, bitcast=True) + 0x001FFFFF) & 0x7F800000) - 0x04000000
        # The exponent fields of 2^k and 2^-k add up to 254.
        return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)
    if floor > _LEAST_AMAX:
        scale = _quotient(floored, _E4M3_MAX, _E4M3_MAX_INVERSE)
    else:
        up, down = _up_and_down(floored)
        scale = _quotient(floored * up, _E4M3_MAX, _E4M3_MAX_INVERSE) * down
    return scale, tl.div_rn(1.0, scale)


@triton.jit
def _up_and_down(x: tl.tensor) -> tl.tuple:
    return tl.where(x < _SMALL, _UP, 1.0), tl.where(x < _SMALL, _DOWN, 1.0)


@triton.jit
def codes_of(x: tl.tensor, scale: tl.tensor, inverse: tl.tensor, floor: tl.constexpr, pow2: tl.constexpr) -> tl.tensor:
    """E4M3 codes of FP32 values under a scale of an amax from `floor` on, and its reciprocal."""
    if pow2:
        return to_e4m3(x * inverse)
    if floor > _LEAST_AMAX:
        return to_e4m3(_quotient(x, scale, inverse))
    up, down = _up_and_down(scale)
    return to_e4m3(_quotient(x * up, scale * up, inverse * down))


@triton.jit
def report(not_finite: tl.tensor, amax: tl.tensor) -> None:
    """Set the flag where a largest magnitude is NaN or infinite."""
    tl.store(not_finite + tl.zeros_like(amax).to(tl.int32), 1, mask=~(amax <= _FLOAT32_MAX))


@triton.jit
def store_row_groups(
    codes: tl.tensor, scales: tl.tensor, not_finite: tl.tensor, values: tl.tensor, row: tl.tensor, column: tl.tensor,
    group: tl.tensor, rows: tl.tensor, columns: tl.tensor, scale_pitch: tl.tensor, pow2: tl.constexpr,
) -> None:  # fmt: skip
    """Quantise a 1 x 128 group a row, with a forward's floor: values FP32 [rows, 128]; `group` counts from the left."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    amax = tl.reduce(tl.abs(values), 1, larger)
    scale, inverse = scale_and_inverse(amax, _AMAX_FLOOR, pow2)
    quotients = codes_of(values, scale[:, None], inverse[:, None], _AMAX_FLOOR, pow2)
    tl.store(codes + row[:, None] * columns + column[None, :], quotients, mask=inside)
    tl.store(scales + group.to(tl.int64) * scale_pitch + row, scale, mask=row < rows)
    report(not_finite, amax)


@triton.jit
def _store_quarter(
    codes: tl.tensor, values: tl.tensor, row: tl.tensor, column: tl.tensor, rows: tl.tensor, columns: tl.tensor,
    floor: tl.constexpr, pow2: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    amax = tl.reduce(tl.abs(values), 1, larger)
    scale, inverse = scale_and_inverse(amax, floor, pow2)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    quotients = codes_of(values, scale[:, None], inverse[:, None], floor, pow2)
    tl.store(codes + row[:, None] * columns + column[None, :], quotients, mask=inside)
    return amax


@triton.jit
def _byte(x: tl.tensor, scale: tl.tensor, inverse: tl.tensor, pow2: tl.constexpr) -> tl.tensor:
    return codes_of(x, scale, inverse, _GRADIENT_FLOOR, pow2).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def quarters_of_tile(across: tl.tensor, down: tl.tensor, tile: tl.constexpr) -> tl.tuple:
    """Columns [tile] and rows [tile / 4] of a tile's first quarter; those of the others are 1, 2 and 3 further."""
    column = across.to(tl.int64) * tile + tl.arange(0, tile)
    return column, 4 * (down.to(tl.int64) * (tile // 4) + tl.arange(0, tile // 4))


@triton.jit
def store_columns(
    a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, across: tl.tensor, down: tl.tensor, column_words: tl.tensor,
    column_scales: tl.tensor, columns: tl.tensor, column_word_pitch: tl.tensor, column_scale_pitch: tl.tensor,
    spans: tl.tensor, pow2: tl.constexpr, tile: tl.constexpr,
) -> None:  # fmt: skip
    """Quantise the quarters a, b, c, d of a tile (FP32 [tile / 4, tile], finite, zero outside) by columns. With `spans`
    those of a part lie together."""
    column, _row = quarters_of_tile(across, down, tile)
    largest = larger(larger(tl.abs(a), tl.abs(b)), larger(tl.abs(c), tl.abs(d)))
    scale, inverse = scale_and_inverse(tl.reduce(largest, 0, larger), _GRADIENT_FLOOR, pow2)
    tl.store(column_scales + down.to(tl.int64) * column_scale_pitch + column, scale, mask=column < columns)
    scale, inverse = scale[None, :], inverse[None, :]
    low = _byte(a, scale, inverse, pow2) | (_byte(b, scale, inverse, pow2) << 8)
    high = _byte(c, scale, inverse, pow2) | (_byte(d, scale, inverse, pow2) << 8)
    words = tl.trans(low | (high << 16))
    quarter: tl.constexpr = tile // 4
    if spans is not None:
        first = tl.load(spans + 2 * down)
        column_words += first.to(tl.int64) * quarter * columns
        column_word_pitch = tl.load(spans + 2 * down + 1) * quarter
        down -= first
    word = down.to(tl.int64) * quarter + tl.arange(0, quarter)
    inside = (column < columns)[:, None] & (word < column_word_pitch)[None, :]
    tl.store(column_words + column[:, None] * column_word_pitch + word[None, :], words, mask=inside)


@triton.jit
def store_tile(
    a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, across: tl.tensor, down: tl.tensor, row_codes: tl.tensor,
    row_scales: tl.tensor, column_words: tl.tensor, column_scales: tl.tensor, not_finite: tl.tensor, rows: tl.tensor,
    columns: tl.tensor, row_scale_pitch: tl.tensor, column_word_pitch: tl.tensor, column_scale_pitch: tl.tensor,
    spans: tl.tensor, floor: tl.constexpr, pow2: tl.constexpr, columns_pow2: tl.constexpr, tile: tl.constexpr,
) -> None:  # fmt: skip
    """Quantise quarters a, b, c, d (FP32 [tile / 4, tile], zero outside) by rows (with `floor`) and by columns."""
    column, row = quarters_of_tile(across, down, tile)
    amax_a = _store_quarter(row_codes, a, row, column, rows, columns, floor, pow2)
    amax_b = _store_quarter(row_codes, b, row + 1, column, rows, columns, floor, pow2)
    amax_c = _store_quarter(row_codes, c, row + 2, column, rows, columns, floor, pow2)
    amax_d = _store_quarter(row_codes, d, row + 3, column, rows, columns, floor, pow2)
    # In the order of the rows: a join makes a new last dimension.
    amax = tl.reshape(tl.join(tl.join(amax_a, amax_c), tl.join(amax_b, amax_d)), [tile])
    scale, _inverse = scale_and_inverse(amax, floor, pow2)
    every_row = down.to(tl.int64) * tile + tl.arange(0, tile)
    tl.store(row_scales + across.to(tl.int64) * row_scale_pitch + every_row, scale, mask=every_row < rows)
    report(not_finite, amax)
    store_columns(
        a, b, c, d, across, down, column_words, column_scales, columns, column_word_pitch, column_scale_pitch, spans,
        columns_pow2, tile,
    )  # fmt: skip


class RowCodes(NamedTuple):
    """Room for 1 x 128 groups: codes [rows, columns] and scales [groups, rows padded to the pitch]."""

    codes: Tensor
    scales: Tensor

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device) -> "RowCodes":
        codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=device)
        return cls(codes, _scales(rows, columns, device))

    def result(self) -> tuple[Tensor, Tensor]:
        return self.codes, self.scales.t()[: self.codes.shape[0]]


class ColumnCodes(NamedTuple):
    """Room for 128 x 1 groups of [rows, columns]: codes [columns, rows padded to the pitch] and scales likewise."""

    codes: Tensor
    scales: Tensor

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device) -> "ColumnCodes":
        pitch = round_up(rows, _PITCH_BYTES)
        codes = torch.empty(columns, pitch, dtype=torch.float8_e4m3fn, device=device)
        return cls(codes, _scales(columns, rows, device))

    @property
    def words(self) -> Tensor:
        return self.codes.view(torch.int32)

    def result(self, rows: int) -> tuple[Tensor, Tensor]:
        return self.codes[:, :rows].contiguous(), self.scales.t()[: self.codes.shape[0]]


class TileCodes(NamedTuple):
    """Room for what `store_tile` writes of a matrix."""

    by_row: RowCodes
    by_column: ColumnCodes

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device) -> "TileCodes":
        return cls(RowCodes.empty(rows, columns, device), ColumnCodes.empty(rows, columns, device))

    @property
    def tiles(self) -> tuple[int, int]:
        return self.by_row.scales.shape[0], self.by_column.scales.shape[0]

    def arguments(self, not_finite: Tensor, spans: Tensor | None) -> tuple[Any, ...]:
        (codes, scales), words, column_scales = self.by_row, self.by_column.words, self.by_column.scales
        pitches = scales.stride(0), words.stride(0), column_scales.stride(0)
        return codes, scales, words, column_scales, not_finite, *codes.shape, *pitches, spans

    def result(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        return self.by_row.result(), self.by_column.result(self.by_row.codes.shape[0])


def _scales(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.empty(triton.cdiv(columns, TILE), round_up(rows, _PITCH_BYTES // 4), device=device)


_ROWS_PER_PROGRAM = 32
# Two programs of 256 threads then fit on a multiprocessor; one cannot load while it computes.
_REGISTERS = 128


@triton.jit
def _rows_kernel(
    x: tl.tensor, codes: tl.tensor, scales: tl.tensor, not_finite: tl.tensor, rows: tl.tensor, columns: tl.tensor,
    scale_pitch: tl.tensor, pow2: tl.constexpr, block: tl.constexpr, group: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * block + tl.arange(0, block)
    column = tl.program_id(0) * group + tl.arange(0, group)
    values = _load(x, row, column, rows, columns)
    store_row_groups(codes, scales, not_finite, values, row, column, tl.program_id(0), rows, columns, scale_pitch, pow2)


@triton.jit
def _tiles_kernel(
    x: tl.tensor, codes: tl.tensor, scales: tl.tensor, not_finite: tl.tensor, rows: tl.tensor, columns: tl.tensor,
    pow2: tl.constexpr, tile: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * tile + tl.arange(0, tile)
    column = tl.program_id(0) * tile + tl.arange(0, tile)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None] * columns + column[None, :]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    amax = tl.reduce(tl.reduce(tl.abs(values), 1, larger), 0, larger)
    scale, inverse = scale_and_inverse(amax, _AMAX_FLOOR, pow2)
    tl.store(codes + at, codes_of(values, scale, inverse, _AMAX_FLOOR, pow2), mask=inside)
    tl.store(scales + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), scale)
    tl.store(not_finite, 1, mask=~(amax <= _FLOAT32_MAX))


@triton.jit
def _load(x: tl.tensor, row: tl.tensor, column: tl.tensor, rows: tl.tensor, columns: tl.tensor) -> tl.tensor:
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _load_token(
    x: tl.tensor, row: tl.tensor, column: tl.tensor, rows: tl.tensor, columns: tl.tensor, slots: tl.tensor,
    none: tl.tensor, k: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Rows of x, or with `slots` those of the tokens that have them; zeros where there is none."""
    if slots is not None:
        slot = tl.load(slots + row, mask=row < rows, other=none)
        row = tl.where(slot < none, slot // k, rows).to(tl.int64)
    return _load(x, row, column, rows, columns)


@triton.jit(do_not_specialize=["none"])
def _rows_and_columns_kernel(
    x: tl.tensor, row_codes: tl.tensor, row_scales: tl.tensor, column_words: tl.tensor, column_scales: tl.tensor,
    not_finite: tl.tensor, rows: tl.tensor, columns: tl.tensor, row_scale_pitch: tl.tensor,
    column_word_pitch: tl.tensor, column_scale_pitch: tl.tensor, spans: tl.tensor, slots: tl.tensor, none: tl.tensor,
    k: tl.constexpr, floor: tl.constexpr, pow2: tl.constexpr, columns_pow2: tl.constexpr, tile: tl.constexpr,
) -> None:  # fmt: skip
    across, down = tl.program_id(0), tl.program_id(1)
    column, row = quarters_of_tile(across, down, tile)
    a = _load_token(x, row, column, rows, columns, slots, none, k)
    b = _load_token(x, row + 1, column, rows, columns, slots, none, k)
    c = _load_token(x, row + 2, column, rows, columns, slots, none, k)
    d = _load_token(x, row + 3, column, rows, columns, slots, none, k)
    store_tile(
        a, b, c, d, across, down, row_codes, row_scales, column_words, column_scales, not_finite, rows, columns,
        row_scale_pitch, column_word_pitch, column_scale_pitch, spans, floor, pow2, columns_pow2, tile,
    )  # fmt: skip


def row_codes(x: Tensor, grouping: Grouping, flag: FiniteFlag | None = None) -> Codes:
    x = _checked(x)
    rows, columns = x.shape
    out = RowCodes.empty(rows, columns, x.device)
    grid = (out.scales.shape[0], triton.cdiv(rows, _ROWS_PER_PROGRAM))
    pitch = out.scales.stride(0)
    pow2 = forward_rows(grouping)
    with torch.cuda.device_of(x), finite_check(x.device, flag) as not_finite:
        _rows_kernel[grid](x, *out, not_finite, rows, columns, pitch, pow2, _ROWS_PER_PROGRAM, TILE)
    return out.result()


def row_and_column_codes(
    x: Tensor, rows: Grouping, columns: Grouping, flag: FiniteFlag | None = None, spans: Tensor | None = None
) -> tuple[Codes, Codes]:
    return _row_and_column_codes(x, len(x), (spans, None, 0, 1), (rows, columns), flag)


def gathered_row_and_column_codes(
    x: Tensor, by_expert: ExpertRows, rows: Grouping, columns: Grouping, flag: FiniteFlag | None = None
) -> tuple[Codes, Codes]:
    places = by_expert.spans, by_expert.slots, by_expert.places.numel(), by_expert.k
    return _row_and_column_codes(x, len(by_expert.slots), places, (rows, columns), flag)


def _row_and_column_codes(
    x: Tensor, count: int, places: tuple[Any, ...], groupings: tuple[Grouping, Grouping], flag: FiniteFlag | None
) -> tuple[Codes, Codes]:
    """Of so many rows; `places`: the kernel's `spans`, `slots`, `none` and `k`."""
    x = _checked(x)
    out = TileCodes.empty(count, x.shape[1], x.device)
    spans, *tokens = places
    with torch.cuda.device_of(x), finite_check(x.device, flag) as not_finite:
        _rows_and_columns_kernel[out.tiles](
            x, *out.arguments(not_finite, spans), *tokens, *rows_and_columns(*groupings), TILE, num_warps=8,
            maxnreg=_REGISTERS,
        )  # fmt: skip
    return out.result()


def tile_codes(x: Tensor, grouping: Grouping, flag: FiniteFlag | None = None) -> Codes:
    assert (grouping.rows, grouping.columns, grouping.floor) == (TILE, TILE, AMAX_FLOOR), f"no kernel for {grouping}"
    rows, columns = x.shape
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format)
    scales = torch.empty(triton.cdiv(rows, TILE), triton.cdiv(columns, TILE), device=x.device)
    if not rows:  # One of several ranks may have none.
        return codes, scales
    x = _checked(x)
    with torch.cuda.device_of(x), finite_check(x.device, flag) as not_finite:
        _tiles_kernel[scales.shape[::-1]](
            x, codes, scales, not_finite, rows, columns, grouping.rule == "pow2", TILE, num_warps=8
        )
    return codes, scales


@triton.jit
def _transpose_kernel(
    codes: tl.tensor, transposed: tl.tensor, rows: tl.tensor, columns: tl.tensor, tile: tl.constexpr
) -> None:
    matrix = tl.program_id(2).to(tl.int64) * rows * columns
    row = tl.program_id(1).to(tl.int64) * tile + tl.arange(0, tile)
    column = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    inside_rows, inside_columns = row < rows, column < columns
    at = matrix + row[:, None] * columns + column[None, :]
    x = tl.load(codes + at, mask=inside_rows[:, None] & inside_columns[None, :], other=0)
    to = matrix + column[:, None] * rows + row[None, :]
    tl.store(transposed + to, x.trans(1, 0), mask=inside_columns[:, None] & inside_rows[None, :])


def transpose(weight: Codes) -> Codes:
    codes, scales = weight
    assert codes.is_contiguous(), "codes that are part of others"
    *count, rows, columns = codes.shape
    transposed = codes.new_empty(*count, columns, rows)
    grid = triton.cdiv(columns, TILE), triton.cdiv(rows, TILE), math.prod(count)
    with torch.cuda.device_of(codes):
        # torch copies single bytes, at a tenth of the memory's speed.
        _transpose_kernel[grid](codes.view(torch.uint8), transposed.view(torch.uint8), rows, columns, TILE, num_warps=8)
    return transposed, scales.mT.contiguous()


def forward_rows(grouping: Grouping) -> bool:
    """True for powers of two."""
    assert (grouping.rows, grouping.columns, grouping.floor) == (1, TILE, AMAX_FLOOR), f"no kernel for {grouping}"
    return grouping.rule == "pow2"


def rows_and_columns(rows: Grouping, columns: Grouping) -> tuple[float, bool, bool]:
    """The floor of the rows, and whether scales of rows and columns are powers of two, for `store_tile`."""
    assert (rows.rows, rows.columns) == (1, TILE), f"no kernel for {rows}"
    return rows.floor, rows.rule == "pow2", token_columns(columns)


def token_columns(grouping: Grouping) -> bool:
    assert (grouping.rows, grouping.columns, grouping.floor) == (1, TILE, GRADIENT_FLOOR), f"no kernel for {grouping}"
    return grouping.rule == "pow2"


def _checked(x: Tensor) -> Tensor:
    assert x.dim() == 2, f"a matrix is quantised, not {tuple(x.shape)}"
    assert x.dtype in (torch.bfloat16, torch.float32), f"BF16 or FP32 is quantised, not {x.dtype}"
    assert x.numel(), "a matrix without elements has no amax"
    return x.contiguous()
