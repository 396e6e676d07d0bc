"""E4M3 rounding and block scales in plain torch: the reference every kernel is compared with.

E4M3 (FN variant): 1 sign, 4 exponent and 3 mantissa bits, bias 7; largest finite value 448, smallest normal 2^-6,
smallest subnormal 2^-9, no infinity. Rounding is to nearest, ties to even.

A quantised tensor is a pair: values on the E4M3 grid (in FP32) and scales: `x ~ grid * scale`. The last group or tile
may be partial. An all-zero group has grid 0 and the floor's scale. NaN and infinity are refused (`GroupNotFinite`). A
kernel sets a flag for them, and reading it waits for the device: a caller with a `FiniteFlag` checks it at the end."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fp8core.numerics.dispatch import with_kernel
from fp8core.numerics.recipe import AMAX_FLOOR, E4M3_MAX, TILE, Grouping, ScaleRule

Codes = tuple[Tensor, Tensor]
"""float8_e4m3fn codes and FP32 scales."""


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


_NOT_FINITE = "cannot quantise: the tensor holds NaN or infinity"
_EXPONENT_BITS = 0x7F800000
_SMALLEST_NORMAL_EXPONENT = (127 - 6) << 23
_HALF_OF_MANTISSA = 0x00400000


class GroupNotFinite(ValueError):
    """A tensor to be quantised holds NaN or infinity."""


def round_to_e4m3(x: Tensor) -> Tensor:
    """Round FP32 values to the E4M3 grid; magnitudes above 448 saturate to 448, NaN stays NaN.

    Adding and subtracting 1.5 * 2^(e + 20) makes the FP32 adder round at bit 2^(e - 3), E4M3's last mantissa bit for
    exponent e (2^-9 for subnormals). The bytes are those of torch's cast, which is scalar on a CPU."""
    clamped = x.clamp(-E4M3_MAX, E4M3_MAX)
    exponent = (clamped.view(torch.int32) & _EXPONENT_BITS).clamp_(min=_SMALLEST_NORMAL_EXPONENT)
    magic = exponent.add_((20 << 23) + _HALF_OF_MANTISSA).view(torch.float32)
    # The subtraction makes +0 of every zero, where the cast keeps the sign.
    return (clamped + magic).sub_(magic).copysign_(x)


def scale_from_amax(amax: Tensor, rule: ScaleRule, floor: float = AMAX_FLOOR) -> Tensor:
    """FP32 scales for groups of these largest magnitudes; a smaller one counts as `floor`. Raises GroupNotFinite: an
    amax is NaN or infinite."""
    if not bool(torch.isfinite(amax).all()):
        raise GroupNotFinite(_NOT_FINITE)
    # On a GPU torch turns a division by a number into a multiplication by its reciprocal; one by a tensor it divides.
    scale = amax.clamp(min=floor) / amax.new_full((), E4M3_MAX)
    if rule == "fp32":
        return scale
    # Rounding the bit pattern up to the next pure exponent is ceil(log2) without a logarithm.
    bits = scale.view(torch.int32) + 0x007FFFFF
    return (bits & _EXPONENT_BITS).view(torch.float32)


def quantise_rows(x: Tensor, grouping: Grouping) -> tuple[Tensor, Tensor]:
    """The grid, FP32 [rows, columns], of FP32 [rows, columns] in groups of one row, and scales, FP32 [rows,
    ceil(columns / grouping.columns)]."""
    assert grouping.rows == 1, f"groups of one row, not of {grouping.rows}"
    rows, columns = x.shape
    group = grouping.columns
    if columns % group == 0:
        groups = x.view(rows, columns // group, group) if x.is_contiguous() else x.reshape(rows, -1, group)
        scales = scale_from_amax(groups.abs().amax(-1), grouping.rule, grouping.floor)
        return round_to_e4m3(groups / scales.unsqueeze(-1)).view(rows, columns), scales
    x_padded = torch.nn.functional.pad(x, (0, -columns % group))
    grid, scales = quantise_rows(x_padded, grouping)
    return grid[:, :columns].contiguous(), scales


def quantise_columns(x: Tensor, grouping: Grouping) -> tuple[Tensor, Tensor]:
    """`quantise_rows` of the transpose of FP32 [rows, columns], for both operands of wgrad."""
    return quantise_rows(x.t().contiguous(), grouping)


def quantise_tiles(x: Tensor, grouping: Grouping) -> tuple[Tensor, Tensor]:
    """The grid, FP32 [out, in], of FP32 [out, in], and scales, FP32 [ceil(out / grouping.rows), ceil(in /
    grouping.columns)], the layout of `weight_scale_inv`."""
    (out, columns), down, across = x.shape, grouping.rows, grouping.columns
    padded = torch.nn.functional.pad(x, (0, -columns % across, 0, -out % down))
    tiles = padded.view(padded.shape[0] // down, down, padded.shape[1] // across, across)
    scales = scale_from_amax(tiles.abs().amax((1, 3)), grouping.rule, grouping.floor)
    grid = round_to_e4m3(tiles / scales[:, None, :, None]).view(padded.shape)
    return grid[:out, :columns].contiguous(), scales


def encode(grid: Tensor) -> Tensor:
    return grid.to(torch.float8_e4m3fn)


def decode(codes: Tensor) -> Tensor:
    if codes.is_cuda:
        return codes.float()
    # torch's cast is scalar on a CPU; this takes a third of the time of indexing with a tensor.
    return _DECODE_TABLE.index_select(0, codes.reshape(-1).view(torch.uint8).int()).view(codes.shape)


_DECODE_TABLE = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)


class FiniteFlag:
    """Set on a device when a quantised value was NaN or infinity."""

    def __init__(self, device: torch.device) -> None:
        self.not_finite = torch.zeros(1, dtype=torch.int32, device=device)

    def check(self) -> None:
        """Wait for the device. Raises GroupNotFinite: the flag is set."""
        if bool(self.not_finite):
            raise GroupNotFinite(_NOT_FINITE)


@with_kernel("quantise")
def row_codes(x: Tensor, grouping: Grouping, flag: FiniteFlag | None = None) -> Codes:
    """Codes [rows, columns] and scales [rows, groups] of BF16 or FP32 [rows, columns], with one element at least.
    Raises GroupNotFinite: x holds NaN or infinity, and there is no `flag`."""
    return _encode(quantise_rows(_finite_values(x, flag), grouping))


@with_kernel("quantise")
def row_and_column_codes(
    x: Tensor, rows: Grouping, columns: Grouping, flag: FiniteFlag | None = None, spans: Tensor | None = None
) -> tuple[Codes, Codes]:
    """`row_codes` of a tensor, and of its transpose: codes [columns, rows] and scales [columns, groups].

    `spans`: int32 [groups, 2], the first group of rows of each one's part, and how many it has. The column codes of a
    part then lie together (`column_parts`)."""
    wide = _finite_values(x, flag)
    codes, scales = _encode(quantise_columns(wide, columns))
    if spans is not None:
        firsts = spans[:, 0] == torch.arange(len(spans))
        parts = codes.view(torch.uint8).split((spans[firsts, 1] * columns.columns).tolist(), dim=1)
        codes = torch.cat([part.flatten() for part in parts]).view(codes.dtype).view(codes.shape)
    return _encode(quantise_rows(wide, rows)), (codes, scales)


def column_parts(columns: Codes, counts: Sequence[int]) -> list[Codes]:
    """Column codes of so many rows each, [columns, rows] and their scales, of those that lie together by part."""
    codes, scales = columns
    width = codes.shape[0]
    # Kernels have rows beyond all parts.
    own = codes.view(-1)[: width * sum(counts)].split([width * count for count in counts])
    of_groups = scales[:, : sum(counts) // TILE].split([count // TILE for count in counts], dim=1)
    return [(part.view(width, count), each) for part, count, each in zip(own, counts, of_groups, strict=True)]


@with_kernel("quantise")
def tile_codes(x: Tensor, grouping: Grouping, flag: FiniteFlag | None = None) -> Codes:
    return _encode(quantise_tiles(_finite_values(x, flag), grouping))


def _finite_values(x: Tensor, flag: FiniteFlag | None) -> Tensor:
    """FP32. With a flag NaN and infinity count as 0: processes that share a pass must all go on."""
    if flag is None or bool((finite := torch.isfinite(x)).all()):
        return x.float()
    flag.not_finite.fill_(1)
    return torch.where(finite, x.float(), 0.0)


@contextmanager
def finite_check(device: torch.device, flag: FiniteFlag | None) -> Iterator[Tensor]:
    """int32 [1] that a kernel sets where it finds NaN or infinity; checked at the end unless the caller has a flag."""
    own = flag or FiniteFlag(device)
    yield own.not_finite
    if flag is None:
        own.check()


def _encode(quantised: tuple[Tensor, Tensor]) -> Codes:
    grid, scales = quantised
    return encode(grid), scales
