"""Fingerprints of tensors that do not depend on the order of reduction, and the digest of a policy.

The bytes of a tensor's elements, in row-major order and little-endian, are read as 64-bit words. Two more words follow:
the up to seven bytes that are left over (zero-extended) and the number of bytes. Every word contributes a hash of its
position and its bits, and the hashes are added modulo 2^64. So any split into chunks, threads or devices gives the same
fingerprint. Lane k of the two lanes, for word i of bits b:

    z = b * bits_factor_k + i * index_factor_k + offset_k        (mod 2^64; injective in b for a given i)
    z = (z ^ z >> s0) * m0;  z = (z ^ z >> s1) * m1;  z = z ^ z >> s2
    lane_k = sum over i of z (mod 2^64)

A change of a single word always changes the fingerprint; any other goes unseen with a probability of about 2^-128. The
finalisers are splitmix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", 2014) and fmix64 of
MurmurHash3 (Appleby). Not meant against an adversary.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fp8core.numerics.dispatch import with_kernel

_Words = np.ndarray[Any, np.dtype[np.uint64]]

# In words. On a CPU a chunk and its temporaries stay in the cache; elsewhere a chunk only bounds memory.
_CPU_CHUNK = 1 << 17
_DEVICE_CHUNK = 1 << 22
_WORD_BYTES = 8


@dataclass(frozen=True)
class Lane:
    """Constants of one 64-bit mix; factors are odd, hence invertible modulo 2^64."""

    bits_factor: int
    index_factor: int
    offset: int
    shifts: tuple[int, int, int]
    multipliers: tuple[int, int]


LANES = (
    Lane(
        0x9E3779B97F4A7C15,
        0xD1342543DE82EF95,
        0x243F6A8885A308D3,
        (30, 27, 31),
        (0xBF58476D1CE4E5B9, 0x94D049BB133111EB),
    ),
    Lane(
        0xC2B2AE3D27D4EB4F,
        0xAF251AF3B0F025B5,
        0x13198A2E03707345,
        (33, 33, 33),
        (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53),
    ),
)


def _xor_shift_(z: Tensor, shift: int) -> Tensor:
    """In place `z ^ (z >>> shift)`: the arithmetic shift copies the sign, the mask takes the copies away."""
    return z.bitwise_xor_((z >> shift).bitwise_and_((1 << (64 - shift)) - 1))


def _signed(value: int) -> int:
    """The two's complement reading of an unsigned 64-bit constant."""
    return value - (1 << 64) if value >> 63 else value


def _mix(lane: Lane, bits: Tensor, index: Tensor) -> Tensor:
    z = (bits * _signed(lane.bits_factor)).add_(index * _signed(lane.index_factor)).add_(_signed(lane.offset))
    _xor_shift_(z, lane.shifts[0]).mul_(_signed(lane.multipliers[0]))
    _xor_shift_(z, lane.shifts[1]).mul_(_signed(lane.multipliers[1]))
    return _xor_shift_(z, lane.shifts[2])


def _lane_sums(words: Tensor, first: int) -> Tensor:
    if words.device.type == "cpu":
        return torch.tensor([_signed(_host_sum(lane, words.numpy().view(np.uint64), first)) for lane in LANES])
    index = torch.arange(first, first + words.numel(), dtype=torch.int64, device=words.device)
    return torch.stack([_mix(lane, words, index).sum() for lane in LANES])


@lru_cache(maxsize=2 * len(LANES))
def _index_terms(lane: Lane, count: int) -> _Words:
    """i * index_factor + offset of the first words."""
    return np.arange(count, dtype=np.uint64) * np.uint64(lane.index_factor) + np.uint64(lane.offset)


def _host_sum(lane: Lane, words: _Words, first: int) -> int:
    """NumPy shifts unsigned words in one pass, multiplies faster than torch and needs no copies."""
    z = words * np.uint64(lane.bits_factor)
    z += _index_terms(lane, max(len(words), _CPU_CHUNK))[: len(words)]
    z += np.uint64(first * lane.index_factor % 2**64)
    shifted = np.empty_like(z)
    for shift, multiplier in zip(lane.shifts, (*lane.multipliers, None), strict=True):
        np.right_shift(z, np.uint64(shift), out=shifted)
        z ^= shifted
        if multiplier is not None:
            z *= np.uint64(multiplier)
    return int(z.sum())


def bytes_in_order(tensor: Tensor) -> Tensor:
    """A tensor's bytes in row-major order, uint8 [bytes], at an address of whole words; copied only where needed.
    Raises TypeError: the tensor is complex."""
    if tensor.is_complex():
        raise TypeError(f"fingerprint: no bit pattern is defined for {tensor.dtype}")
    flat = tensor
    # Tens of thousands of them are bytes already.
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.clone() if flat.storage_offset() % _WORD_BYTES else flat


def fingerprint(tensor: Tensor, *, chunk: int | None = None) -> str:
    """128-bit fingerprint of a tensor's elements in row-major order, as 32 hex digits; shape, dtype, strides and device
    are not part of it. Computed on its device, `chunk` words at a time. Raises TypeError: the tensor is complex."""
    return hex_digits(_slice_sum(Slice.whole(tensor), chunk).tolist())


class Slice(NamedTuple):
    """Consecutive elements of a tensor, in row-major order.

    Attributes:
        elements: they alone.
        first: bytes of the tensor before them, whole words.
        ends: bytes of the whole tensor, where these are its last elements; None elsewhere.
    """

    elements: Tensor
    first: int
    ends: int | None

    @classmethod
    def whole(cls, tensor: Tensor) -> "Slice":
        return cls(tensor, 0, tensor.nbytes)


def _slice_sum(part: Slice, chunk: int | None = None) -> Tensor:
    flat, first = bytes_in_order(part.elements), part.first // _WORD_BYTES
    count, left_over = divmod(flat.numel(), _WORD_BYTES)
    assert part.first % _WORD_BYTES == 0, "a slice begins inside a word"
    assert not left_over or part.ends is not None, "a slice ends inside a word"
    words = flat[: count * _WORD_BYTES].view(torch.int64)
    sums = torch.zeros(len(LANES), dtype=torch.int64, device=flat.device)
    if part.ends is not None:
        ending = torch.zeros(2 * _WORD_BYTES, dtype=torch.uint8, device=flat.device)
        ending[:left_over] = flat[count * _WORD_BYTES :]
        last_words = ending.view(torch.int64)
        last_words[1] = part.ends
        sums += _lane_sums(last_words, first + count)
    default = _CPU_CHUNK if flat.device.type == "cpu" else _DEVICE_CHUNK
    size = default if chunk is None else chunk
    for start in range(0, count, size):
        sums += _lane_sums(words[start : start + size], first + start)
    return sums


def hex_digits(sums: Sequence[int]) -> str:
    """The 32 digits of two lane sums, read as signed."""
    return "".join(f"{lane & (1 << 64) - 1:016x}" for lane in sums)


@with_kernel("fingerprint")
def lane_sums(elements: Sequence[Tensor], firsts: Sequence[int], ends: Sequence[int | None]) -> Tensor:
    """Sums of both lanes over slices of tensors, the fields of `Slice`, int64 [slices, 2]; slices of one tensor add up
    to its sums."""
    parts = [Slice(*part) for part in zip(elements, firsts, ends, strict=True)]
    if len(parts) == 1 or any(part.elements.device.type != "cpu" for part in parts):
        return torch.stack([_slice_sum(part).cpu() for part in parts])
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        return torch.stack(list(threads.map(_slice_sum, parts)))


def slice_sums(slices: Sequence[Slice]) -> list[list[int]]:
    """`lane_sums` on the host."""
    elements, firsts, ends = zip(*slices, strict=True)
    found: list[list[int]] = lane_sums(elements, firsts, ends).tolist()
    return found


def combined(sums: Sequence[Sequence[Sequence[int]]]) -> list[str]:
    """The fingerprints of tensors from the `slice_sums` of their slices."""
    return [hex_digits([sum(lane) for lane in zip(*lanes, strict=True)]) for lanes in zip(*sums, strict=True)]


def fingerprints(tensors: Sequence[Tensor]) -> list[str]:
    """The fingerprint of each tensor; one copy to the host."""
    return [hex_digits(sums) for sums in slice_sums([Slice.whole(tensor) for tensor in tensors])] if tensors else []


def policy_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 (64 hex digits) over the sorted (name, dtype, shape, fingerprint) of named tensors."""
    found = fingerprints(list(tensors.values()))
    return digest_of(
        {
            name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), digits)
            for (name, tensor), digits in zip(tensors.items(), found, strict=True)
        }
    )


def masters_digest(weights: Mapping[str, Tensor], device: torch.device) -> str:
    """`policy_digest` of the FP32 masters that begin as these weights, widened and read on `device` one at a time."""
    masters = ((name, tensor.to(device).float()) for name, tensor in weights.items())
    found = {name: (tuple(master.shape), fingerprints([master])[0]) for name, master in masters}
    return digest_of({name: ("float32", *rest) for name, rest in found.items()})


def digest_of(found: Mapping[str, tuple[str, tuple[int, ...], str]]) -> str:
    """`policy_digest` of tensors known by (dtype without `torch.`, shape, fingerprint) alone."""
    rows = [[name, dtype, list(shape), digits] for name, (dtype, shape, digits) in sorted(found.items())]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()
