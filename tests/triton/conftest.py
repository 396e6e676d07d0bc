"""Triton kernels in Triton's interpreter, on a CPU, against the torch reference.

    TRITON_INTERPRET=1 python -m pytest tests/triton

Nothing here says that a kernel compiles, or what it does with FP8 and BF16 conversions of a GPU: tests/gpu does.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

Codes = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True, scope="session")
def _interpreter() -> None:
    triton = pytest.importorskip("triton", reason="needs Triton, which torch for CPUs does not bring")
    if not triton.knobs.runtime.interpret:
        pytest.skip("needs Triton's interpreter: TRITON_INTERPRET=1")
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def assert_same_codes() -> Callable[[Codes, Codes], None]:
    """Equal bytes of the codes, equal scales."""

    def check(found: Codes, expected: Codes) -> None:
        assert found[0].is_contiguous()
        assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(found[1], expected[1])

    return check


@pytest.fixture(scope="session")
def assert_close() -> Callable[[Tensor, Tensor], None]:
    """BF16 gradients that differ where a sum of FP32 in another order rounds otherwise: rarely, by one step."""

    def check(found: Tensor, expected: Tensor) -> None:
        assert found.dtype == expected.dtype == torch.bfloat16
        assert (found != expected).float().mean() < 0.01
        assert torch.allclose(found.float(), expected.float(), rtol=2**-7, atol=1e-6)

    return check


@pytest.fixture
def not_finite() -> Tensor:
    """The flag that kernels set."""
    return torch.zeros(1, dtype=torch.int32)
