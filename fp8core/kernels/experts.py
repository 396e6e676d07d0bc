"""Routes of tokens to experts in Triton: the choice, the order of rows by expert, and the sums over a token's experts.

A program has whole tokens or whole rows, so that nothing depends on other tokens. Nothing waits for the device: there
are as many rows as the worst case needs, and a CUDA graph can capture all."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8core.kernels.quantise import RowCodes, to_bf16
from fp8core.numerics.e4m3 import Codes
from fp8core.numerics.grouped import NO_EXPERT, ExpertRows, most_rows
from fp8core.numerics.recipe import TILE

_TOKENS = 8
_SLOTS = 2048
_ROWS = 1024
_COLUMNS = 1024
_NO_EXPERT = tl.constexpr(NO_EXPERT)
_EXACT = {"enable_fp_fusion": False}


@triton.jit(do_not_specialize=["tokens"])
def _choose_kernel(
    logits: tl.tensor, experts: tl.tensor, gates: tl.tensor, tokens: tl.tensor, count: tl.constexpr, k: tl.constexpr,
    of_all: tl.constexpr, block: tl.constexpr, padded: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    column = tl.arange(0, padded)
    inside = (row < tokens)[:, None] & (column < count)[None, :]
    z = tl.load(logits + row[:, None] * count + column[None, :], mask=inside, other=float("-inf"))
    # NaN is chosen last, and makes the gates of its token NaN.
    finite = tl.where(z == z, z, float("-inf"))
    open_ones = inside
    for _ in tl.static_range(k):
        largest = tl.max(tl.where(open_ones, finite, float("-inf")), 1)
        found = open_ones & (finite == largest[:, None])
        first = tl.min(tl.where(found, column[None, :], padded), 1)
        open_ones = open_ones & (column[None, :] != first[:, None])
    chosen = inside & ~open_ones
    place = tl.cumsum(chosen.to(tl.int32), 1) - 1
    at = row[:, None] * k + place
    tl.store(experts + at, tl.broadcast_to(column[None, :].to(tl.int64), (block, padded)), mask=chosen)
    weighed = inside if of_all else chosen
    top = tl.max(tl.where(weighed, z, float("-inf")), 1)
    exponentials = tl.where(weighed, tl.exp(z - top[:, None]), 0.0)
    exponentials = tl.where((tl.sum((inside & (z != z)).to(tl.int32), 1) > 0)[:, None], float("nan"), exponentials)
    tl.store(gates + at, tl.div_rn(exponentials, tl.sum(exponentials, 1)[:, None]), mask=chosen)


def choose_experts(logits: Tensor, k: int, normalise_top_k: bool) -> tuple[Tensor, Tensor]:
    tokens, count = logits.shape
    experts = torch.empty(tokens, k, dtype=torch.int64, device=logits.device)
    gates = torch.empty(tokens, k, device=logits.device)
    with torch.cuda.device_of(logits):
        _choose_kernel[(triton.cdiv(tokens, _TOKENS),)](
            logits, experts, gates, tokens, count, k, not normalise_top_k, _TOKENS, triton.next_power_of_2(count),
            **_EXACT,
        )  # fmt: skip
    return experts, gates


@triton.jit(do_not_specialize=["slots"])
def _count_kernel(experts: tl.tensor, filled: tl.tensor, slots: tl.tensor, block: tl.constexpr) -> None:
    expert = tl.program_id(0)
    total = 0
    for first in range(0, slots, block):
        slot = first + tl.arange(0, block)
        own = tl.load(experts + slot, mask=slot < slots, other=-1) == expert
        total += tl.sum(own.to(tl.int32), 0)
    tl.store(filled + expert, total)


@triton.jit(do_not_specialize=["slots", "rows"])
def _place_kernel(
    experts: tl.tensor, filled: tl.tensor, sizes: tl.tensor, owners: tl.tensor, sources: tl.tensor, places: tl.tensor,
    spans: tl.tensor, slots: tl.tensor, rows: tl.tensor, count: tl.constexpr, padded: tl.constexpr,
    multiple: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    """Program e places the rows of expert e, and the program after the last one what is left."""
    expert = tl.program_id(0)
    every = tl.arange(0, padded)
    each = tl.load(filled + every, mask=every < count, other=0)
    each = (each + (multiple - 1)) // multiple * multiple
    start = tl.sum(tl.where(every < expert, each, 0), 0)
    size = tl.sum(tl.where(every == expert, each, 0), 0)
    if expert == count:
        size = rows - start
    else:
        tl.store(sizes + expert, size)
    number = tl.where(expert == count, _NO_EXPERT, expert)
    for first in range(0, size, block):
        row = first + tl.arange(0, block)
        tl.store(owners + start + row, tl.full((block,), number, tl.int32), mask=row < size)
        tl.store(sources + start + row, tl.full((block,), slots, tl.int32), mask=row < size)
    for first in range(0, size // multiple, block):
        group = first + tl.arange(0, block)
        inside = group < size // multiple
        at = 2 * (start // multiple + group)
        tl.store(spans + at, tl.full((block,), start // multiple, tl.int32), mask=inside)
        tl.store(spans + at + 1, tl.full((block,), size // multiple, tl.int32), mask=inside)
    tl.debug_barrier()
    before = start
    if expert < count:
        for first in range(0, slots, block):
            slot = first + tl.arange(0, block)
            own = tl.load(experts + slot, mask=slot < slots, other=-1) == expert
            row = before + tl.cumsum(own.to(tl.int32), 0) - 1
            tl.store(sources + row, slot, mask=own)
            tl.store(places + slot, row.to(tl.int64), mask=own)
            before += tl.sum(own.to(tl.int32), 0)


def expert_rows(experts: Tensor, count: int, multiple: int) -> ExpertRows:
    device = experts.device
    tokens, k = experts.shape
    slots = tokens * k
    rows = most_rows(slots, count, multiple)
    filled, sizes = torch.empty(2, count, dtype=torch.int32, device=device)
    owners, sources = torch.empty(2, rows, dtype=torch.int32, device=device)
    places = torch.empty(tokens, k, dtype=torch.int64, device=device)
    spans = torch.empty(rows // multiple, 2, dtype=torch.int32, device=device)
    padded = triton.next_power_of_2(count + 1)
    with torch.cuda.device_of(experts):
        _count_kernel[(count,)](experts, filled, slots, _SLOTS, num_warps=8)
        _place_kernel[(count + 1,)](
            experts, filled, sizes, owners, sources, places, spans, slots, rows, count, padded, multiple,
            _SLOTS, num_warps=8,
        )  # fmt: skip
    return ExpertRows(sizes, owners, sources, places, spans)


@triton.jit(do_not_specialize=["none"])
def _gather_kernel(
    words: tl.tensor, slots: tl.tensor, out: tl.tensor, width: tl.tensor, none: tl.tensor, k: tl.constexpr,
    fills: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    source = (slot // k).to(tl.int64) * width
    size = tl.where(slot < none, width, 0)
    end = width if fills else size
    for first in range(0, end, block):
        at = first + tl.arange(0, block)
        tl.store(out + row * width + at, tl.load(words + source + at, mask=at < size, other=0), mask=at < width)


def _gather(words: Tensor, rows: ExpertRows, out: Tensor, fills: bool) -> None:
    """Rows of words of four bytes; `fills`: zeros where there is no token."""
    width = words.shape[1]
    block = min(_COLUMNS, triton.next_power_of_2(width))
    with torch.cuda.device_of(words):
        _gather_kernel[(len(rows.slots),)](words, rows.slots, out, width, rows.places.numel(), rows.k, fills, block)


def gathered(x: Tensor, rows: ExpertRows) -> Tensor:
    out = torch.empty(len(rows.slots), x.shape[1], dtype=x.dtype, device=x.device)
    _gather(x.contiguous().view(torch.int32), rows, out.view(torch.int32), fills=True)
    return out


@triton.jit(do_not_specialize=["rows", "none"])
def _gather_scales_kernel(
    scales: tl.tensor, slots: tl.tensor, out: tl.tensor, rows: tl.tensor, pitch: tl.tensor, out_pitch: tl.tensor,
    none: tl.tensor, k: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    group = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * block + tl.arange(0, block)
    slot = tl.load(slots + row, mask=row < rows, other=none)
    scale = tl.load(scales + group * pitch + slot // k, mask=slot < none, other=0.0)
    tl.store(out + group * out_pitch + row, scale, mask=row < rows)


def gathered_codes(x: Codes, rows: ExpertRows) -> Codes:
    codes, scales = x
    assert scales.stride(0) == 1, "scales lie group by group"
    count = len(rows.slots)
    out = RowCodes.empty(count, codes.shape[1], codes.device)
    _gather(codes.view(torch.int32), rows, out.codes.view(torch.int32), fills=False)
    grid = (triton.cdiv(count, _ROWS), scales.shape[1])
    with torch.cuda.device_of(codes):
        _gather_scales_kernel[grid](
            scales, rows.slots, out.scales, count, scales.stride(1), out.scales.stride(0), rows.places.numel(), rows.k,
            _ROWS,
        )  # fmt: skip
    return out.result()


@triton.jit
def _mix_kernel(
    outputs: tl.tensor, places: tl.tensor, gates: tl.tensor, out: tl.tensor, width: tl.tensor, k: tl.constexpr,
    block: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    total = tl.zeros([block], tl.float64)
    for choice in tl.static_range(k):
        row = tl.load(places + token * k + choice)
        value = tl.load(outputs + row * width + at, mask=inside, other=0.0).to(tl.float64)
        total += tl.load(gates + token * k + choice).to(tl.float64) * value
    # By way of FP32, as torch rounds.
    tl.store(out + token * width + at, to_bf16(total.to(tl.float32)), mask=inside)


def mixed(outputs: Tensor, rows: ExpertRows, gates: Tensor) -> Tensor:
    tokens, k = gates.shape
    width = outputs.shape[1]
    out = torch.empty(tokens, width, dtype=torch.bfloat16, device=outputs.device)
    block = min(_COLUMNS, triton.next_power_of_2(width))
    with torch.cuda.device_of(outputs):
        _mix_kernel[(tokens, triton.cdiv(width, block))](outputs, rows.places, gates, out, width, k, block, **_EXACT)
    return out


@triton.jit(do_not_specialize=["none"])
def _mix_backward_kernel(
    grad: tl.tensor, outputs: tl.tensor, slots: tl.tensor, gates: tl.tensor, of_outputs: tl.tensor, of_gates: tl.tensor,
    width: tl.tensor, none: tl.tensor, k: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    size = tl.where(slot < none, width, 0)
    gate = tl.load(gates + slot, mask=slot < none, other=0.0)
    token = (slot // k).to(tl.int64)
    total = tl.zeros([block], tl.float32)
    for first in range(0, width, block):
        at = first + tl.arange(0, block)
        upstream = tl.load(grad + token * width + at, mask=at < size, other=0.0).to(tl.float32)
        total += upstream * tl.load(outputs + row * width + at, mask=at < size, other=0.0).to(tl.float32)
        tl.store(of_outputs + row * width + at, to_bf16(upstream * gate), mask=at < width)
    tl.store(of_gates + slot, tl.sum(total, 0), mask=slot < none)


def mix_backward(grad: Tensor, outputs: Tensor, rows: ExpertRows, gates: Tensor) -> tuple[Tensor, Tensor]:
    width = outputs.shape[1]
    of_outputs, of_gates = torch.empty_like(outputs), torch.empty_like(gates)
    block = min(_COLUMNS, triton.next_power_of_2(width))
    with torch.cuda.device_of(outputs):
        _mix_backward_kernel[(len(outputs),)](
            grad.contiguous(), outputs, rows.slots, gates, of_outputs, of_gates, width, gates.numel(), rows.k, block,
            **_EXACT,
        )  # fmt: skip
    return of_outputs, of_gates


@triton.jit
def _sum_kernel(
    by_row: tl.tensor, places: tl.tensor, out: tl.tensor, width: tl.tensor, k: tl.constexpr, block: tl.constexpr
) -> None:
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    total = tl.zeros([block], tl.float32)
    for choice in tl.static_range(k):
        row = tl.load(places + token * k + choice)
        total += tl.load(by_row + row * width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + at, total, mask=inside)


def token_sums(by_row: Tensor, rows: ExpertRows) -> Tensor:
    tokens, k = rows.places.shape
    width = by_row.shape[1]
    out = torch.empty(tokens, width, device=by_row.device)
    block = min(_COLUMNS, triton.next_power_of_2(width))
    with torch.cuda.device_of(by_row):
        _sum_kernel[(tokens, triton.cdiv(width, block))](by_row, rows.places, out, width, k, block, **_EXACT)
    return out


@triton.jit
def _weight_gradient_kernel(
    grad: tl.tensor, grad_scales: tl.tensor, x: tl.tensor, x_scales: tl.tensor, sizes: tl.tensor, total: tl.tensor,
    outputs: tl.tensor, inputs: tl.tensor, grad_pitch: tl.tensor, x_pitch: tl.tensor, padded: tl.constexpr,
    tile: tl.constexpr,
) -> None:  # fmt: skip
    """A tile of one expert's gradient; columns are K-major, those of an expert together."""
    across = tl.cdiv(inputs, tile)
    expert = tl.program_id(1)
    every = tl.arange(0, padded)
    each = tl.load(sizes + every, mask=every < tl.num_programs(1), other=0)
    # From a product with `tile` the compiler derives that rows are aligned. Else it loads single bytes.
    start = tl.sum(tl.where(every < expert, each, 0), 0) // tile * tile
    size = tl.sum(tl.where(every == expert, each, 0), 0) // tile * tile
    if size == 0:
        return
    output = tl.program_id(0) // across * tile + tl.arange(0, tile)
    column = tl.program_id(0) % across * tile + tl.arange(0, tile)
    token = tl.arange(0, tile)
    left = grad + start.to(tl.int64) * outputs + output[:, None].to(tl.int64) * size + token[None, :]
    right = x + start.to(tl.int64) * inputs + column[None, :].to(tl.int64) * size + token[:, None]
    left_scale = grad_scales + (start // tile).to(tl.int64) * grad_pitch + output
    right_scale = x_scales + (start // tile).to(tl.int64) * x_pitch + column
    inside_left, inside_right = output < outputs, column < inputs
    result = tl.zeros([tile, tile], tl.float32)
    of_a = tl.load(left_scale, mask=inside_left, other=0.0)
    of_b = tl.load(right_scale, mask=inside_right, other=0.0)
    groups = size // tile
    for group in range(0, groups):
        a = tl.load(left + group * tile, mask=inside_left[:, None], other=0.0)
        b = tl.load(right + group * tile, mask=inside_right[None, :], other=0.0)
        # Scales of the next group come while this one is multiplied.
        after = tl.minimum(group + 1, groups - 1)
        next_a = tl.load(left_scale + after * grad_pitch, mask=inside_left, other=0.0)
        next_b = tl.load(right_scale + after * x_pitch, mask=inside_right, other=0.0)
        result += tl.dot(a, b) * (of_a[:, None] * of_b[None, :])
        of_a, of_b = next_a, next_b
    at = total + (expert.to(tl.int64) * outputs + output[:, None]) * inputs + column[None, :]
    inside = inside_left[:, None] & inside_right[None, :]
    tl.store(at, tl.load(at, mask=inside, other=0.0) + result, mask=inside)


def grouped_weight_gradient(grad: Codes, x: Codes, rows: ExpertRows, total: Tensor) -> Tensor:
    # DeepGEMM 2.5.0 has this product, but rewrites a descriptor that loads of the expert before may still read.
    count, outputs, inputs = total.shape
    assert grad[1].stride(0) == x[1].stride(0) == 1, "scales lie group by group"
    grid = (triton.cdiv(outputs, TILE) * triton.cdiv(inputs, TILE), count)
    with torch.cuda.device_of(total):
        _weight_gradient_kernel[grid](
            *grad, *x, rows.sizes, total, outputs, inputs, grad[1].stride(1), x[1].stride(1),
            triton.next_power_of_2(count), TILE, num_warps=8, num_stages=4,
        )  # fmt: skip
    return total
