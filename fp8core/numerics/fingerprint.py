"""Fingerprints of tensors that do not depend on the order of reduction, and the digest of a policy.

A tensor's bytes, in row-major order and little-endian, are read as 64-bit words. Two more words follow: the up to seven
bytes that are left over (zero-extended) and the number of bytes. Hashes of every word's position and bits are added
modulo 2^64: any split into chunks, threads or devices gives the same sum. Lane k, for word i of bits b:

    z = b * bits_factor_k + i * index_factor_k + offset_k        (mod 2^64; injective in b for a given i)
    z = (z ^ z >> s0) * m0;  z = (z ^ z >> s1) * m1;  z = z ^ z >> s2
    lane_k = sum over i of z (mod 2^64)

A change of a single word always shows; any other goes unseen with a probability of about 2^-128. The finalisers are
splitmix64 (Steele, Lea, Flood, 2014) and fmix64 of MurmurHash3 (Appleby). Not meant against an adversary."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fp8core.numerics.dispatch import with_kernel

_Words = np.ndarray[Any, np.dtype[np.uint64]]
LaneSums = np.ndarray[Any, np.dtype[np.int64]]
"""Both lanes of slices or tensors, int64 [slices, 2]."""

# In words: a chunk and its temporaries stay in the cache.
_CHUNK = 1 << 17
WORD_BYTES = 8
# Hexadecimal, of both lanes.
_DIGITS = 32


@dataclass(frozen=True)
class Lane:
    """One 64-bit mix; factors are odd, hence invertible modulo 2^64."""

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


@lru_cache(maxsize=2 * len(LANES))
def _index_terms(lane: Lane, count: int) -> _Words:
    """i * index_factor + offset of the first words."""
    return np.arange(count, dtype=np.uint64) * np.uint64(lane.index_factor) + np.uint64(lane.offset)


def _lane_sum(lane: Lane, words: _Words, first: int) -> int:
    z = words * np.uint64(lane.bits_factor)
    z += _index_terms(lane, max(len(words), _CHUNK))[: len(words)]
    z += np.uint64(first * lane.index_factor % 2**64)
    shifted = np.empty_like(z)
    for shift, multiplier in zip(lane.shifts, (*lane.multipliers, None), strict=True):
        np.right_shift(z, np.uint64(shift), out=shifted)
        z ^= shifted
        if multiplier is not None:
            z *= np.uint64(multiplier)
    return int(z.sum())


def bytes_in_order(tensor: Tensor) -> Tensor:
    """uint8 [bytes] in row-major order, at an address of whole words; copied only where needed. Raises TypeError: it is
    complex."""
    if tensor.is_complex():
        raise TypeError(f"fingerprint: no bit pattern is defined for {tensor.dtype}")
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.clone() if flat.storage_offset() % WORD_BYTES else flat


def fingerprint(tensor: Tensor) -> str:
    """32 hex digits; shape, dtype, strides and device are not part of it. Raises TypeError: the tensor is complex."""
    return fingerprints([tensor])[0]


class Slice(NamedTuple):
    """Consecutive elements of a tensor, in row-major order.

    Attributes:
        first: bytes of the tensor before them, whole words.
        ends: bytes of the whole tensor, where these are its last elements; None elsewhere."""

    elements: Tensor
    first: int
    ends: int | None

    @classmethod
    def whole(cls, tensor: Tensor) -> "Slice":
        return cls(tensor, 0, tensor.nbytes)


def _slice_sum(part: Slice) -> Tensor:
    flat = bytes_in_order(part.elements).cpu()
    first = part.first // WORD_BYTES
    count, left_over = divmod(flat.numel(), WORD_BYTES)
    assert part.first % WORD_BYTES == 0, "a slice begins inside a word"
    assert not left_over or part.ends is not None, "a slice ends inside a word"
    words = flat[: count * WORD_BYTES].numpy().view(np.uint64)
    chunks = [(words[start : start + _CHUNK], first + start) for start in range(0, count, _CHUNK)]
    if part.ends is not None:
        last = int.from_bytes(flat[count * WORD_BYTES :].numpy().tobytes(), "little")
        chunks.append((np.array([last, part.ends], dtype=np.uint64), first + count))
    sums = [sum(_lane_sum(lane, *chunk) for chunk in chunks) % 2**64 for lane in LANES]
    return torch.from_numpy(np.array(sums, dtype=np.uint64).view(np.int64))


def hex_digits(sums: LaneSums) -> list[str]:
    digits = sums.astype(">u8").tobytes().hex()
    return [digits[start : start + _DIGITS] for start in range(0, len(digits), _DIGITS)]


@with_kernel("fingerprint")
def sums_reader(elements: Sequence[Tensor], firsts: Sequence[int], ends: Sequence[int | None]) -> Callable[[], Tensor]:
    """A call gives `LaneSums` of what slices (the fields of `Slice`) hold then; the caller keeps their memory."""
    parts = [Slice(*part) for part in zip(elements, firsts, ends, strict=True)]

    def read() -> Tensor:
        if len(parts) == 1:
            return _slice_sum(parts[0])[None]
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            return torch.stack(list(threads.map(_slice_sum, parts)))

    return read


def slice_sums(slices: Sequence[Slice]) -> LaneSums:
    """Slices of one tensor add up to its sums, modulo 2^64."""
    sums: LaneSums = sums_reader(*zip(*slices, strict=True))().cpu().numpy()
    return sums


def combine_sums(sums: Sequence[LaneSums]) -> list[str]:
    """The fingerprints of tensors from the `slice_sums` of their slices."""
    return hex_digits(np.sum(sums, axis=0, dtype=np.int64))


def fingerprints(tensors: Sequence[Tensor]) -> list[str]:
    if not tensors:
        return []
    read = sums_reader(tensors, [0] * len(tensors), [tensor.nbytes for tensor in tensors])
    return hex_digits(read().cpu().numpy())


def policy_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over the sorted (name, dtype, shape, fingerprint) of named tensors."""
    specs = {name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors.items()}
    return PolicyRows(specs).digest(fingerprints(list(tensors.values())))


def masters_digest(weights: Mapping[str, Tensor], device: torch.device) -> str:
    """`policy_digest` of the FP32 masters that begin as these weights, one at a time on `device`."""
    masters = ((name, tensor.to(device).float()) for name, tensor in weights.items())
    prints = {name: (tuple(master.shape), fingerprints([master])[0]) for name, master in masters}
    return digest_of({name: ("float32", *rest) for name, rest in prints.items()})


def digest_of(prints: Mapping[str, tuple[str, tuple[int, ...], str]]) -> str:
    """`policy_digest` of tensors known by (dtype without `torch.`, shape, fingerprint)."""
    rows = PolicyRows({name: (dtype, shape) for name, (dtype, shape, _) in prints.items()})
    return rows.digest([digits for _, _, digits in prints.values()])


class PolicyRows:
    """The text of `digest_of`. `specs`: type and shape by name, which stay as they are."""

    def __init__(self, specs: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        encode = json.JSONEncoder(separators=(",", ":")).encode
        texts = {spec: encode(spec)[1:-1] for spec in set(specs.values())}
        self._numbers = sorted(range(len(specs)), key=list(specs).__getitem__)
        self._heads = [f"[{encode(name)},{texts[specs[name]]}" for name in sorted(specs)]

    def digest(self, digits: Sequence[str]) -> str:
        """`digits`: the fingerprints in the order of the tensors."""
        rows = [f'{head},"{digits[number]}"]' for head, number in zip(self._heads, self._numbers, strict=True)]
        return hashlib.sha256(f"[{','.join(rows)}]".encode()).hexdigest()
