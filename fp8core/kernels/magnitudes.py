"""Amax and saturation of a tensor from one read in Triton, equal to those of `kv_scales.tally`.

Additions are of integers, so their order changes nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8core.numerics.kv_scales import AMAX, ELEMENTS, SATURATED

_AMAX = tl.constexpr(AMAX)
_SATURATED = tl.constexpr(SATURATED)
_ELEMENTS = tl.constexpr(ELEMENTS)
_NAN_BITS = tl.constexpr(0x7FC00000)
_ROWS = 8
_COLUMNS = 1024
# A multiple of what 132 multiprocessors run at once.
_PROGRAMS = 792


@triton.jit
def _tally_kernel(
    x: tl.tensor, valid: tl.tensor, tally: tl.tensor, tokens: tl.tensor, width: tl.tensor, pitch: tl.tensor,
    limit: tl.tensor, rows: tl.constexpr, columns: tl.constexpr,
) -> None:  # fmt: skip
    row, column = tl.arange(0, rows), tl.arange(0, columns)
    tiles_across = tl.cdiv(width, columns)
    largest = tl.zeros([rows, columns], tl.int32)
    saturated = tl.zeros([rows, columns], tl.int32)
    seen = tl.zeros([rows], tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(tokens, rows) * tiles_across, tl.num_programs(0)):
        token = tile // tiles_across * rows + row
        place = tile % tiles_across * columns + column
        used = tl.load(valid + token, mask=token < tokens, other=0) != 0
        inside = used[:, None] & (place < width)[None, :]
        values = tl.load(x + token.to(tl.int64)[:, None] * pitch + place[None, :], mask=inside, other=0.0)
        magnitudes = tl.abs(values.to(tl.float32))
        # Widening a BF16 NaN changes its bits on a GPU; here there is one NaN.
        bits = tl.where(magnitudes == magnitudes, magnitudes.to(tl.int32, bitcast=True), _NAN_BITS)
        largest = tl.maximum(largest, bits)
        saturated += (magnitudes > limit).to(tl.int32)
        seen += tl.where(tile % tiles_across == 0, used.to(tl.int32), 0)
    tl.atomic_max(tally + _AMAX, tl.max(tl.max(largest, 1), 0).to(tl.int64))
    tl.atomic_add(tally + _SATURATED, tl.sum(tl.sum(saturated, 1), 0).to(tl.int64))
    tl.atomic_add(tally + _ELEMENTS, tl.sum(seen, 0).to(tl.int64) * width)


def tally(into: Tensor, x: Tensor, valid: Tensor, limit: float) -> None:
    # One row a token; a view where the heads of a token lie together, as they do in a fused projection.
    flat = x.detach().transpose(1, 2).reshape(valid.numel(), -1)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    valid_bytes = valid.reshape(-1).contiguous().view(torch.uint8)
    tokens, width = flat.shape
    programs = min(_PROGRAMS, triton.cdiv(tokens, _ROWS) * triton.cdiv(width, _COLUMNS))
    with torch.cuda.device_of(into):
        _tally_kernel[(programs,)](
            flat, valid_bytes, into, tokens, width, flat.stride(0), limit, _ROWS, _COLUMNS, num_warps=8
        )
