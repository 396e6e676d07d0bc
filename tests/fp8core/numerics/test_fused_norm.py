import pytest
import torch
from torch import Tensor

from fp8core.numerics.block_codes import Codes, row_and_column_codes, row_codes
from fp8core.numerics.e4m3 import GroupNotFinite
from fp8core.numerics.elementwise import rms_norm
from fp8core.numerics.fused_norm import add_norm, add_norm_backward, add_norm_codes, add_norm_row_codes
from fp8core.numerics.rounding import KERNELS, round_to_bf16

EPS = 1e-6
HIDDEN = 200


def randn(*shape: int, seed: int) -> Tensor:
    return (2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def inputs(tokens: int = 37) -> tuple[Tensor, Tensor, Tensor]:
    x, added = randn(tokens, HIDDEN, seed=1), randn(tokens, HIDDEN, seed=2)
    return x, added, (1 + 0.1 * randn(HIDDEN, seed=3).float()).bfloat16().float()


def assert_same(found: Codes, expected: Codes) -> None:
    assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("adds", [True, False])
def test_the_norm_reads_the_rounded_sum_as_the_decoder_does(adds: bool) -> None:
    x, added, weight = inputs()
    total, normed, inverse = add_norm(x, added if adds else None, weight, EPS)
    expected = KERNELS.sums(x.float() + added.float() if adds else x.float())
    assert (total.dtype, normed.dtype, inverse.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert torch.equal(total.float(), expected)
    assert torch.equal(normed.float(), rms_norm(expected, weight, EPS, round_to_bf16, KERNELS.normalised))
    rms = (expected.double().square().mean(-1) + EPS).sqrt()
    assert torch.allclose(inverse.double() * rms, torch.ones(()).double(), rtol=1e-7)


@pytest.mark.parametrize("rule", ["pow2", "fp32"])
def test_codes_are_those_of_the_norm_alone(rule: str) -> None:
    x, added, weight = inputs()
    total, normed, inverse = add_norm(x, added, weight, EPS)
    summed, rows = add_norm_row_codes(x, added, weight, EPS, rule)
    assert torch.equal(summed, total)
    assert_same(rows, row_codes(normed, rule))
    summed, *codes, factor = add_norm_codes(x, added, weight, EPS, rule)
    assert torch.equal(summed, total)
    assert torch.equal(factor, inverse)
    for found, expected in zip(codes, row_and_column_codes(normed, rule), strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("sends", [True, False])
def test_gradients_are_those_of_float64(sends: bool) -> None:
    x, added, weight = inputs()
    grad_normed = randn(*x.shape, seed=4)
    grad_total = randn(*x.shape, seed=5) if sends else None
    total, _normed, inverse = add_norm(x, added, weight, EPS)
    grad, grad_weight = add_norm_backward(grad_normed, grad_total, total, weight, inverse)

    leaf, factors = total.double().requires_grad_(), weight.double().requires_grad_()
    out = leaf * torch.rsqrt(leaf.square().mean(-1, keepdim=True) + EPS) * factors
    upstream = [grad_normed.double(), torch.zeros(()) if grad_total is None else grad_total.double()]
    expected, of_weight = torch.autograd.grad([out, leaf], [leaf, factors], [upstream[0], upstream[1].expand_as(leaf)])
    # BF16 has eight bits: half a unit of the last is 2^-9 of an element, and little is left of what cancels.
    assert torch.allclose(grad.double(), expected.double(), rtol=2**-8, atol=1e-6)
    assert torch.allclose(grad_weight.double(), of_weight.double(), rtol=1e-5, atol=1e-5)
    assert (grad.dtype, grad_weight.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("codes_of", [add_norm_row_codes, add_norm_codes])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nothing_with_nan_or_infinity_is_quantised(codes_of, value: float) -> None:
    x, added, weight = inputs()
    x[3, 5] = value
    with pytest.raises(GroupNotFinite):
        codes_of(x, added, weight, EPS, "pow2")
