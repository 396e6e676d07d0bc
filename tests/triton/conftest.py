"""Triton kernels in Triton's interpreter, on a CPU: `TRITON_INTERPRET=1 python -m pytest tests/triton`.

It computes what the kernels say in FP32 and FP64, but truncates where a GPU rounds FP32 to E4M3. So codes of the fused
kernels are compared with those that the quantisers' own kernels make of the reference's values, byte for byte; tests/gpu
compares both with the reference.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

Draw = Callable[..., Tensor]
Codes = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True, scope="session")
def _interpreter() -> None:
    triton = pytest.importorskip("triton", reason="needs Triton, which torch for CPUs does not bring")
    if not triton.knobs.runtime.interpret:
        pytest.skip("needs Triton's interpreter: TRITON_INTERPRET=1")
    torch.set_num_threads(1)


@pytest.fixture
def draw() -> Draw:
    """(shape, seed, spread) to BF16 values with a few signed zeros and heavy tails."""

    def values(*shape: int, seed: int, spread: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        x = spread * torch.randn(shape, generator=generator) * torch.exp(torch.randn(shape, generator=generator))
        zero = torch.rand(shape, generator=generator) < 0.02
        return torch.where(zero, torch.copysign(torch.zeros(()), x), x).bfloat16()

    return values


@pytest.fixture
def same_codes() -> Callable[[Codes, Codes], None]:
    """Equal bytes of the codes, equal scales."""

    def check(found: Codes, expected: Codes) -> None:
        assert found[0].is_contiguous()
        assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(found[1], expected[1])

    return check
