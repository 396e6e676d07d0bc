"""The fingerprints of many tensors as one reduction in Triton, equal to those of `numerics.fingerprint`.

Every program adds the hashes of up to `_PROGRAM_WORDS` words of one tensor to its sums, modulo 2^64, in any order. A
table of addresses makes it one launch for a whole model."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8core.numerics.fingerprint import LANES, Lane, bytes_in_order

# 512 KiB: enough programs for every multiprocessor at a gigabyte, few enough atomic additions.
_PROGRAM_WORDS = 1 << 16
_BLOCK_WORDS = 1 << 10


def _constants(lane: Lane) -> tuple[int, ...]:
    return lane.bits_factor, lane.index_factor, lane.offset, *lane.shifts, *lane.multipliers


_LANE_0 = tl.constexpr(_constants(LANES[0]))
_LANE_1 = tl.constexpr(_constants(LANES[1]))


@triton.jit
def _mix(bits: tl.tensor, index: tl.tensor, lane: tl.constexpr) -> tl.tensor:
    z = bits * lane[0] + index.to(tl.uint64) * lane[1] + lane[2]
    z = (z ^ (z >> lane[3])) * lane[6]
    z = (z ^ (z >> lane[4])) * lane[7]
    return z ^ (z >> lane[5])


@triton.jit
def _fingerprint_kernel(
    table: tl.tensor, owners: tl.tensor, sums: tl.tensor, pieces: tl.tensor, program_words: tl.constexpr,
    block: tl.constexpr,
) -> None:  # fmt: skip
    owner = tl.load(owners + tl.program_id(0))
    address = tl.load(table + owner)
    length = tl.load(table + pieces + owner)
    first_program = tl.load(table + 2 * pieces + owner)
    before = tl.load(table + 3 * pieces + owner)
    size = tl.load(table + 4 * pieces + owner)
    words = tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), 16)
    count = length // 8
    start = (tl.program_id(0) - first_program) * program_words
    end = tl.minimum(start + program_words, count)
    place = tl.arange(0, block)
    sum_0 = tl.zeros([block], tl.uint64)
    sum_1 = tl.zeros([block], tl.uint64)
    for _ in range((end - start) // block):
        bits = tl.load(words + start + place)
        sum_0 += _mix(bits, before + start + place, _LANE_0)
        sum_1 += _mix(bits, before + start + place, _LANE_1)
        start += block
    if start < end:
        inside = start + place < end
        bits = tl.load(words + start + place, mask=inside, other=0)
        sum_0 += tl.where(inside, _mix(bits, before + start + place, _LANE_0), 0)
        sum_1 += tl.where(inside, _mix(bits, before + start + place, _LANE_1), 0)
    total_0, total_1 = tl.sum(sum_0, 0), tl.sum(sum_1, 0)

    if (end == count) & (size >= 0):
        offset = count * 8 + tl.arange(0, 8)
        left_over = tl.load(address.to(tl.pointer_type(tl.uint8)) + offset, mask=offset < length, other=0)
        last = tl.sum(left_over.to(tl.uint64) << (8 * tl.arange(0, 8)).to(tl.uint64), 0)
        total_0 += _mix(last, before + count, _LANE_0) + _mix(size.to(tl.uint64), before + count + 1, _LANE_0)
        total_1 += _mix(last, before + count, _LANE_1) + _mix(size.to(tl.uint64), before + count + 1, _LANE_1)
    tl.atomic_add(sums + 2 * owner, total_0.to(tl.int64))
    tl.atomic_add(sums + 2 * owner + 1, total_1.to(tl.int64))


def sums_reader(elements: Sequence[Tensor], firsts: Sequence[int], ends: Sequence[int | None]) -> Callable[[], Tensor]:
    if all(map(_is_piece, elements)):
        return partial(launched, *programs_of(elements, firsts, ends))

    def read() -> Tensor:
        # The pieces keep copies alive until the launch, whose stream then orders what takes their memory.
        pieces = [tensor if _is_piece(tensor) else _aligned(bytes_in_order(tensor)) for tensor in elements]
        return launched(*programs_of(pieces, firsts, ends))

    return read


def programs_of(pieces: Sequence[Tensor], firsts: Sequence[int], ends: Sequence[int | None]) -> tuple[Tensor, Tensor]:
    """The input of the programs of one launch, for pieces that are contiguous and aligned to 16 bytes.

    The table, int64 [5, pieces], has each piece's address, bytes, first program and first word. Its last row has the
    bytes of the tensor that a piece ends, or -1. The owners, int32 [programs], are the pieces of programs.
    """
    devices = {piece.device for piece in pieces}
    assert len(devices) == 1, "fingerprints of tensors on several devices"
    (device,) = devices
    lengths = torch.tensor([piece.nbytes for piece in pieces])
    programs = (lengths // 8 + _PROGRAM_WORDS - 1).div(_PROGRAM_WORDS, rounding_mode="floor").clamp(min=1)
    addresses = torch.tensor([piece.data_ptr() for piece in pieces])
    owners = torch.repeat_interleave(torch.arange(len(pieces), dtype=torch.int32), programs)
    places = torch.tensor([[first // 8 for first in firsts], [-1 if end is None else end for end in ends]])
    table = torch.cat([torch.stack([addresses, lengths, programs.cumsum(0) - programs]), places])
    return table.to(device), owners.to(device)


def launched(table: Tensor, owners: Tensor) -> Tensor:
    pieces = table.shape[1]
    sums = torch.zeros(pieces, 2, dtype=torch.int64, device=table.device)
    with torch.cuda.device_of(sums):
        _fingerprint_kernel[(owners.numel(),)](table, owners, sums, pieces, _PROGRAM_WORDS, _BLOCK_WORDS)
    return sums


def _is_piece(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 and not tensor.is_complex()


def _aligned(piece: Tensor) -> Tensor:
    return piece.clone() if piece.data_ptr() % 16 else piece
