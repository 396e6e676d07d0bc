import math

import pytest
import torch
from torch import Tensor

from fp8core.numerics.elementwise import keep_fp32, round_to_bf16, to_e4m3_grid, to_fixed_point


def gradient(function, x: Tensor, upstream: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(function(leaf), leaf, upstream)
    return grad


def test_bf16_of_fp64_goes_by_way_of_fp32() -> None:
    # Just above the middle of 1 and its BF16 successor; FP32 cannot hold the excess, and the tie goes to even.
    x = torch.tensor([1 + 2.0**-8 + 2.0**-30], dtype=torch.float64)
    assert round_to_bf16(x).item() == 1.0
    wide = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(round_to_bf16(wide), wide.float().bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("function", [round_to_bf16, keep_fp32, lambda x: to_fixed_point(x.double(), 20)])
def test_gradients_pass_through(function, dtype: torch.dtype) -> None:
    x = torch.rand(50, dtype=dtype, generator=torch.Generator().manual_seed(2))
    upstream = torch.randn(50, generator=torch.Generator().manual_seed(3)).to(function(x).dtype)
    grad = gradient(function, x, upstream)
    assert grad.dtype == dtype
    assert torch.equal(grad, upstream.to(dtype))


# E4M3


@pytest.mark.parametrize("scale", [2.0**-6, 1.0, torch.tensor(0.0137).item()])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_e4m3_grid_is_the_cast_of_the_quotient(dtype: torch.dtype, scale: float) -> None:
    x = (torch.randn(2000, generator=torch.Generator().manual_seed(4)) * 200 * scale).to(dtype)
    grid = to_e4m3_grid(x, scale)
    quotient = x.float() / torch.full((2000,), scale)
    assert (quotient.abs() > 448).any()
    assert grid.dtype == torch.float64
    assert torch.equal(grid.float(), quotient.clamp(-448, 448).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_saturated_elements_get_no_gradient(dtype: torch.dtype) -> None:
    edge = torch.tensor(448.0)
    beyond = torch.nextafter(edge, torch.tensor(1e3)).item()
    x = 0.25 * torch.tensor([0.0, -0.0, 1e-30, 1.0, 447.9, 448.0, beyond, 1e30, torch.inf, torch.nan], dtype=dtype)
    upstream = torch.arange(1.0, 11.0, dtype=torch.float64)
    inside = torch.tensor([1.0] * 6 + [0.0] * 4)
    for sign in (1, -1):
        grad = gradient(lambda x: to_e4m3_grid(x, 0.25), sign * x, upstream)
        assert torch.equal(grad, (4 * upstream * inside).to(dtype))


def test_sums_of_fixed_point_numbers_are_exact_in_any_order() -> None:
    bits, count = 40, 2**12
    generator = torch.Generator().manual_seed(5)
    x = torch.rand(count, dtype=torch.float64, generator=generator)
    fixed = to_fixed_point(x, bits)
    exact = math.fsum(fixed.tolist())
    assert fixed.sum().item() == exact
    for _ in range(5):
        order = torch.randperm(count, generator=generator)
        assert fixed[order].sum().item() == exact
        assert fixed[order].cumsum(0)[-1].item() == exact
        assert fixed[order].view(64, 64).t().sum(0).sum().item() == exact
    ones = to_fixed_point(torch.ones(count, dtype=torch.float64) - 2.0**-bits, bits)
    assert ones.cumsum(0)[-1].item() == count - count * 2.0**-bits
