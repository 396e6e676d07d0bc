import pytest
import torch

from fp8core.numerics.adamw import AdamWStep, adamw

kernels = pytest.importorskip("fp8core.numerics.triton_adamw", reason="needs Triton", exc_type=ImportError)

SIZE = 5000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_updates_as_the_reference(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    masters = [torch.ones(SIZE) for _ in range(2)]
    moments = [[torch.zeros(SIZE, dtype=dtype) for _ in range(2)] for _ in range(2)]
    for number in range(1, 5):
        grad = torch.randn(SIZE, generator=generator) * 10.0 ** (number - 3)
        step = AdamWStep.at(number, 1e-2, (0.9, 0.95), 0.1, 1e-8, 0.5)
        for update, master, (first, second) in zip((adamw, kernels.adamw), masters, moments, strict=True):
            update(master, grad, first, second, step)
    # The interpreter truncates what a GPU rounds to BF16.
    relative = 0.02 if dtype == torch.bfloat16 else 1e-6
    pairs = [(masters[0] - 1, masters[1] - 1), *zip(*moments, strict=True)]
    for ours, theirs in pairs:
        assert (ours.float() - theirs.float()).norm() < relative * ours.float().norm()
