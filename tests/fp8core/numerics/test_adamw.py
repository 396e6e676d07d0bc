import pytest
import torch

from fp8core.numerics.adamw import AdamWStep, adamw

SIZE, UPDATES, RATE = 1000, 5, 1e-2


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SIZE, generator=generator) * 10.0**i for i in range(-2, UPDATES - 2)]


def trained(dtype: torch.dtype, weight_decay: float, factor: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    master, first, second = torch.ones(SIZE), torch.zeros(SIZE, dtype=dtype), torch.zeros(SIZE, dtype=dtype)
    for number, grad in enumerate(gradients(), 1):
        adamw(master, grad, first, second, AdamWStep.at(number, RATE, (0.9, 0.95), weight_decay, factor))
    return master, second


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_it_is_the_adamw_of_torch(weight_decay: float) -> None:
    expected = torch.ones(SIZE, requires_grad=True)
    optimiser = torch.optim.AdamW([expected], lr=RATE, betas=(0.9, 0.95), weight_decay=weight_decay)
    for grad in gradients():
        expected.grad = grad
        optimiser.step()
    assert torch.allclose(trained(torch.float32, weight_decay)[0], expected, rtol=1e-6, atol=1e-7)


def test_moments_in_bf16_change_an_update_little() -> None:
    exact, narrow = trained(torch.float32, 0.0)[0], trained(torch.bfloat16, 0.0)[0]
    moved = (exact - 1).abs().mean()
    assert 0 < (exact - narrow).abs().mean() < 0.02 * moved


def test_the_factor_is_the_gradients_own() -> None:
    assert torch.allclose(trained(torch.float32, 0.0, 0.5)[1], trained(torch.float32, 0.0)[1] / 4)
