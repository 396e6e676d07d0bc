"""Amax, histogram and saturation of a tensor from one read in Triton, equal to those of `kv_scales.tally`.

Every program keeps the counts of its tiles in registers and adds them to the tally at the end. Registers have room for
a window of 32 binades (2^-20 to 2^12), far wider than Q, K and V are. Elements outside it are counted one by one in
memory. All additions are of integers, so their order changes nothing. Magnitudes are compared by their bit patterns, of
which those of NaN are the largest.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8core.numerics.kv_scales import AMAX, BUCKETS, COUNTS, DROPPED_BITS, ELEMENTS, SATURATED

_AMAX, _SATURATED, _ELEMENTS = tl.constexpr(AMAX), tl.constexpr(SATURATED), tl.constexpr(ELEMENTS)
_COUNTS, _BUCKETS, _DROPPED_BITS = tl.constexpr(COUNTS), tl.constexpr(BUCKETS), tl.constexpr(DROPPED_BITS)
_NAN_BITS = tl.constexpr(0x7FC00000)
# The bucket of 2^-20; a binade has eight.
_WINDOW_START = tl.constexpr((127 - 20) * 8)
_WINDOW = 256
_COLUMNS = 1024
# A multiple of what 132 multiprocessors run at once of either kernel.
_PROGRAMS = 792


@triton.jit
def _tally_kernel(
    x: tl.tensor,
    valid: tl.tensor,
    tally: tl.tensor,
    tokens: tl.tensor,
    width: tl.tensor,
    pitch: tl.tensor,
    limit: tl.tensor,
    window: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    row, column = tl.arange(0, rows), tl.arange(0, columns)
    tiles_across = tl.cdiv(width, columns)
    largest = tl.zeros([rows, columns], tl.int32)
    saturated = tl.zeros([rows, columns], tl.int32)
    seen = tl.zeros([rows], tl.int32)
    if window:
        counts = tl.zeros([window], tl.int32)
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
        if window:
            bucket = bits >> _DROPPED_BITS
            place_in_window = bucket - _WINDOW_START
            held = (place_in_window >= 0) & (place_in_window < window)
            # Bucket 0 is what is left of the elements when all others are counted: masked positions need no care.
            tl.atomic_add(tally + _COUNTS + bucket, 1, mask=(bucket > 0) & (held == 0), sem="relaxed")
            flat = tl.reshape(tl.where(held, place_in_window, 0), [rows * columns])
            counts += tl.histogram(flat, window, mask=tl.reshape(held, [rows * columns]))
    tl.atomic_max(tally + _AMAX, tl.max(tl.max(largest, 1), 0).to(tl.int64))
    tl.atomic_add(tally + _SATURATED, tl.sum(tl.sum(saturated, 1), 0).to(tl.int64))
    tl.atomic_add(tally + _ELEMENTS, tl.sum(seen, 0).to(tl.int64) * width)
    if window:
        bins = _COUNTS + _WINDOW_START + tl.arange(0, window)
        tl.atomic_add(tally + bins, counts.to(tl.int64), mask=counts > 0)


def tally(into: Tensor, x: Tensor, valid: Tensor, limit: float) -> None:
    _launch(into, x, valid, limit, window=_WINDOW, rows=2, warps=4)


def tally_amax(into: Tensor, x: Tensor, valid: Tensor, limit: float) -> None:
    _launch(into, x, valid, limit, window=0, rows=8, warps=8)


def _launch(into: Tensor, x: Tensor, valid: Tensor, limit: float, window: int, rows: int, warps: int) -> None:
    # One row a token; a view where the heads of a token lie together, as they do in a fused projection.
    flat = x.detach().transpose(1, 2).reshape(valid.numel(), -1)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    used = valid.reshape(-1).contiguous().view(torch.uint8)
    tokens, width = flat.shape
    programs = min(_PROGRAMS, triton.cdiv(tokens, rows) * triton.cdiv(width, _COLUMNS))
    with torch.cuda.device_of(into):
        _tally_kernel[(programs,)](
            flat, used, into, tokens, width, flat.stride(0), limit, window, rows, _COLUMNS, num_warps=warps
        )
