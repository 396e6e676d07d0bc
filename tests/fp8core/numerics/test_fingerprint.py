import hashlib
import json
import struct

import pytest
import torch

from fp8core.numerics.fingerprint import fingerprint, fingerprints, masters_digest, policy_digest

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
]
LANES = [
    (0x9E3779B97F4A7C15, 0xD1342543DE82EF95, 0x243F6A8885A308D3, 30, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB, 31),
    (0xC2B2AE3D27D4EB4F, 0xAF251AF3B0F025B5, 0x13198A2E03707345, 33, 0xFF51AFD7ED558CCD, 33, 0xC4CEB9FE1A85EC53, 33),
]


def reference(raw: bytes) -> str:
    """The documented formula with Python's integers."""
    pieces = [raw[i : i + 8] for i in range(0, len(raw) // 8 * 8, 8)]
    words = [int.from_bytes(piece, "little") for piece in (*pieces, raw[len(raw) // 8 * 8 :])]
    lanes = []
    for bits_factor, index_factor, offset, s0, m0, s1, m1, s2 in LANES:
        total = 0
        for i, bits in enumerate([*words, len(raw)]):
            z = (bits * bits_factor + i * index_factor + offset) % 2**64
            z = (z ^ z >> s0) * m0 % 2**64
            z = (z ^ z >> s1) * m1 % 2**64
            total += z ^ z >> s2
        lanes.append(f"{total % 2**64:016x}")
    return "".join(lanes)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_the_documented_formula(dtype: torch.dtype) -> None:
    tensor = (torch.randn(7, 5, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)
    assert fingerprint(tensor) == reference(raw_bytes(tensor))


@pytest.mark.parametrize("length", range(10))
def test_left_over_bytes_are_a_word_and_the_length_another(length: int) -> None:
    tensor = torch.arange(1, length + 1, dtype=torch.uint8)
    assert fingerprint(tensor) == reference(bytes(range(1, length + 1)))
    longer = torch.cat([tensor, torch.zeros(1, dtype=torch.uint8)])
    assert fingerprint(longer) != fingerprint(tensor)


def test_does_not_change_between_versions() -> None:
    # Stored manifests hold fingerprints: a change of this value makes every existing run unverifiable.
    assert fingerprint(torch.arange(1000, dtype=torch.float32)) == "07770b18d09ebd6662bfbbc57af10859"


def test_empty_scalar_length_signed_zero_and_nan_bits() -> None:
    assert fingerprint(torch.zeros(0, 3)) == reference(b"") != fingerprint(torch.zeros(1))
    assert fingerprint(torch.tensor(1.5)) == fingerprint(torch.tensor([1.5]))
    assert fingerprint(torch.zeros(3)) != fingerprint(torch.zeros(4))
    assert fingerprint(torch.tensor([0.0])) != fingerprint(torch.tensor([-0.0]))
    quiet, payload = (struct.unpack("<i", struct.pack("<I", bits))[0] for bits in (0x7FC00000, 0x7FC00001))
    nans = torch.tensor([quiet, payload], dtype=torch.int32).view(torch.float32)
    assert fingerprint(nans[:1]) != fingerprint(nans[1:])
    assert fingerprint(torch.nn.Parameter(torch.ones(3))) == fingerprint(torch.ones(3))


def test_fingerprints_are_those_of_the_tensors() -> None:
    tensors = [torch.ones(2, 3), torch.zeros(4, dtype=torch.bfloat16), torch.arange(9).to(torch.float8_e4m3fn)]
    assert fingerprints(tensors) == [fingerprint(tensor) for tensor in tensors]
    assert fingerprints([]) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_masters_digest_is_that_of_the_weights_in_fp32(dtype: torch.dtype) -> None:
    weights = {"b": torch.randn(3, 5).to(dtype), "a": torch.randn(7).to(dtype)}
    assert masters_digest(weights, torch.device("cpu")) == policy_digest({n: w.float() for n, w in weights.items()})


def test_policy_digest_covers_name_dtype_shape_and_elements() -> None:
    base = {"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}
    rows = [["a", "float32", [2, 3], fingerprint(base["a"])], ["b", "bfloat16", [4], fingerprint(base["b"])]]
    digest = hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()
    assert policy_digest(base) == policy_digest(dict(reversed(base.items()))) == digest
    variants = [
        {"a": base["a"], "c": base["b"]},
        {**base, "b": torch.zeros(4, dtype=torch.float16)},
        {**base, "a": torch.ones(3, 2)},
        {**base, "a": base["a"].clone().index_fill_(0, torch.tensor([1]), 2.0)},
        {"a": base["a"]},
    ]
    assert len({policy_digest(variant) for variant in variants} | {digest}) == 6
