"""Fingerprints of tensors that do not depend on the order of reduction, and the digest of a policy.

Every element contributes a hash of its position and its bits, and the hashes are added modulo 2^64, so any split
into chunks, threads or devices gives the same bytes. Lane k of the two lanes, for element i (row-major) of bits b
(zero-extended to 64):

    z = b * bits_factor_k + i * index_factor_k + offset_k        (mod 2^64; injective in b for a given i)
    z = (z ^ z >> s0) * m0;  z = (z ^ z >> s1) * m1;  z = z ^ z >> s2
    lane_k = sum over i of z (mod 2^64)

Each lane is injective in one element: a change of a single element always changes the fingerprint. Any other change
goes unseen with a probability of about 2^-128. The finalisers are splitmix64 (Steele, Lea, Flood: "Fast Splittable
Pseudorandom Number Generators", 2014) and fmix64 of MurmurHash3 (Appleby). Not meant against an adversary.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# On a CPU a chunk and its temporaries stay in the cache; elsewhere a chunk only bounds memory.
_CPU_CHUNK = 1 << 16
_DEVICE_CHUNK = 1 << 22

_BITS: dict[torch.dtype, torch.dtype] = {
    torch.bool: torch.uint8,
    torch.uint8: torch.uint8,
    torch.int8: torch.uint8,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.int16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.int32: torch.int32,
    torch.float32: torch.int32,
    torch.int64: torch.int64,
    torch.float64: torch.int64,
}


def _signed(value: int) -> int:
    """The two's complement reading of an unsigned 64-bit constant."""
    return value - (1 << 64) if value >> 63 else value


@dataclass(frozen=True)
class _Lane:
    """Constants of one 64-bit mix; factors are odd, hence invertible modulo 2^64."""

    bits_factor: int
    index_factor: int
    offset: int
    shifts: tuple[int, int, int]
    multipliers: tuple[int, int]


_LANES = (
    _Lane(
        _signed(0x9E3779B97F4A7C15),
        _signed(0xD1342543DE82EF95),
        _signed(0x243F6A8885A308D3),
        (30, 27, 31),
        (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)),
    ),
    _Lane(
        _signed(0xC2B2AE3D27D4EB4F),
        _signed(0xAF251AF3B0F025B5),
        _signed(0x13198A2E03707345),
        (33, 33, 33),
        (_signed(0xFF51AFD7ED558CCD), _signed(0xC4CEB9FE1A85EC53)),
    ),
)


def _xor_shift_(z: Tensor, shift: int) -> Tensor:
    """In place `z ^ (z >>> shift)`: the arithmetic shift copies the sign, the mask takes the copies away."""
    return z.bitwise_xor_((z >> shift).bitwise_and_((1 << (64 - shift)) - 1))


def _mix(lane: _Lane, bits: Tensor, index: Tensor) -> Tensor:
    """The lane's hashes of (index, bits), both int64, of one shape."""
    z = (bits * lane.bits_factor).add_(index * lane.index_factor).add_(lane.offset)
    _xor_shift_(z, lane.shifts[0]).mul_(lane.multipliers[0])
    _xor_shift_(z, lane.shifts[1]).mul_(lane.multipliers[1])
    return _xor_shift_(z, lane.shifts[2])


def _widen(piece: Tensor) -> Tensor:
    """Unsigned bits of a piece of 1, 2, 4 or 8-byte integers as int64."""
    wide = piece.to(torch.int64)
    if piece.dtype in (torch.uint8, torch.int64):
        return wide
    return wide & ((1 << (8 * piece.element_size())) - 1)


def fingerprint(tensor: Tensor, *, chunk: int | None = None) -> str:
    """128-bit fingerprint of a tensor's elements in row-major order, as 32 hex digits.

    Shape and dtype are not part of it (`policy_digest` adds them), strides and device are not either; -0.0 and 0.0
    differ, and so do NaNs of different bits. An empty tensor has 32 zeros. Works on any device, `chunk` elements at a
    time (temporaries: some 40 bytes per element of the chunk); a non-contiguous tensor is copied once.

    Raises TypeError for a dtype of which the bits are not defined here.
    """
    if tensor.dtype not in _BITS:
        raise TypeError(f"fingerprint: no bit pattern is defined for {tensor.dtype}")
    flat = tensor.detach().view(_BITS[tensor.dtype]).reshape(-1)
    default = _CPU_CHUNK if flat.device.type == "cpu" else _DEVICE_CHUNK
    size = default if chunk is None else chunk
    sums = torch.zeros(len(_LANES), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), size):
        bits = _widen(flat[start : start + size])
        index = torch.arange(start, start + bits.numel(), dtype=torch.int64, device=flat.device)
        sums += torch.stack([_mix(lane, bits, index).sum() for lane in _LANES])
    return "".join(f"{lane & (1 << 64) - 1:016x}" for lane in sums.tolist())


def policy_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 (64 hex digits) over the sorted (name, dtype, shape, fingerprint) of named tensors."""
    return digest_of(
        {
            name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), fingerprint(tensor))
            for name, tensor in tensors.items()
        }
    )


def digest_of(fingerprints: Mapping[str, tuple[str, tuple[int, ...], str]]) -> str:
    """`policy_digest` of tensors known by (dtype without `torch.`, shape, fingerprint) alone."""
    rows = [[name, dtype, list(shape), found] for name, (dtype, shape, found) in sorted(fingerprints.items())]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()
