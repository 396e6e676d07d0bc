import pytest
import torch
from torch import Tensor

from fp8core.numerics.fingerprint import fingerprint, fingerprints, policy_digest

pytestmark = pytest.mark.gpu

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
# Bytes: about a word, about a block of 8 KiB, about a program of 512 KiB, and several programs.
BLOCK, PROGRAM = 1 << 13, 1 << 19
LENGTHS = [*range(18), BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 8, 3 * BLOCK + 5, PROGRAM - 8, PROGRAM - 1, PROGRAM]
LENGTHS += [PROGRAM + 1, PROGRAM + 8, PROGRAM + BLOCK, PROGRAM + BLOCK + 3, 3 * PROGRAM + 77, 7 * PROGRAM]


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_lengths_about_words_blocks_and_programs_in_one_launch(device) -> None:
    tensors = [noise(length, seed=length) for length in LENGTHS]
    assert fingerprints([tensor.to(device) for tensor in tensors]) == [fingerprint(tensor) for tensor in tensors]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_strides_and_offsets(device, dtype: torch.dtype) -> None:
    whole = (torch.randn(37, 91, generator=torch.Generator().manual_seed(2)) * 100).to(dtype)
    flat = whole.view(-1)
    views = [whole, whole.t(), whole[:, ::2], whole[3:9, 5:], flat[1:], flat[3:], flat[::3], whole[0, 0], whole[:0]]
    on_gpu = whole.to(device)
    flat_on_gpu = on_gpu.view(-1)
    same = [on_gpu, on_gpu.t(), on_gpu[:, ::2], on_gpu[3:9, 5:], flat_on_gpu[1:], flat_on_gpu[3:], flat_on_gpu[::3]]
    same += [on_gpu[0, 0], on_gpu[:0]]
    assert fingerprints(same) == [fingerprint(view) for view in views]


def test_a_bit_or_a_swap_anywhere_shows(device) -> None:
    tensor = noise(2 * PROGRAM + 11, seed=1)
    changed = []
    for position in (
        0,
        7,
        8,
        BLOCK - 1,
        BLOCK,
        PROGRAM - 1,
        PROGRAM,
        2 * PROGRAM + 7,
        2 * PROGRAM + 8,
        2 * PROGRAM + 10,
    ):
        other = tensor.clone()
        other[position] ^= 1
        changed.append(other)
    swapped = tensor.clone()
    swapped[:8], swapped[PROGRAM : PROGRAM + 8] = tensor[PROGRAM : PROGRAM + 8], tensor[:8]
    found = fingerprints([piece.to(device) for piece in (tensor, swapped, *changed)])
    assert len(set(found)) == len(found)
    assert found == fingerprints([piece.to(device) for piece in (tensor, swapped, *changed)])


def test_more_than_four_gigabytes(device) -> None:
    # Offsets of bytes and words beyond 2^32; the reference works in chunks on the same device.
    tensor = torch.zeros((1 << 32) + 4096, dtype=torch.uint8, device=device)
    tensor[-1], tensor[1 << 31], tensor[12345] = 1, 2, 3
    assert fingerprints([tensor]) == [fingerprint(tensor)]


def test_a_policy_has_one_digest_wherever_it_is(device) -> None:
    policy = {
        "codes": noise(256, 384, seed=3).view(torch.float8_e4m3fn),
        "scales": torch.rand(2, 3),
        "norm": torch.randn(77).bfloat16(),
    }
    assert policy_digest({name: tensor.to(device) for name, tensor in policy.items()}) == policy_digest(policy)


def test_complex_tensors_are_refused(device) -> None:
    with pytest.raises(TypeError, match="complex64"):
        fingerprints([torch.zeros(2, dtype=torch.complex64, device=device)])
