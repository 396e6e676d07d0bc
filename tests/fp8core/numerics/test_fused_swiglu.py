import pytest
import torch
from torch import Tensor

from fp8core.numerics import elementwise
from fp8core.numerics.block_codes import Codes, row_and_column_codes, row_codes
from fp8core.numerics.e4m3 import GroupNotFinite
from fp8core.numerics.fused_swiglu import swiglu, swiglu_backward, swiglu_backward_codes, swiglu_codes, swiglu_row_codes
from fp8core.numerics.rounding import KERNELS, round_to_bf16

TOKENS, COLUMNS = 37, 200


def randn(*shape: int, seed: int) -> Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def inputs() -> tuple[Tensor, Tensor]:
    """A gradient and the fused projection."""
    return randn(TOKENS, COLUMNS, seed=1), randn(TOKENS, 2 * COLUMNS, seed=2)


def assert_same(found: Codes, expected: Codes) -> None:
    assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(found[1], expected[1])


def test_the_product_is_that_of_the_decoder() -> None:
    _grad, gate_up = inputs()
    gate, up = gate_up.float().chunk(2, dim=-1)
    out = swiglu(gate_up)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out.float(), elementwise.swiglu(gate, up, round_to_bf16, KERNELS.activated))


@pytest.mark.parametrize("rule", ["pow2", "fp32"])
def test_codes_are_those_of_the_product_and_of_the_gradient(rule: str) -> None:
    grad, gate_up = inputs()
    out = swiglu(gate_up)
    assert_same(swiglu_row_codes(gate_up, rule), row_codes(out, rule))
    for found, expected in zip(swiglu_codes(gate_up, rule), row_and_column_codes(out, rule), strict=True):
        assert_same(found, expected)
    gradient = row_and_column_codes(swiglu_backward(grad, gate_up), rule)
    for found, expected in zip(swiglu_backward_codes(grad, gate_up, rule), gradient, strict=True):
        assert_same(found, expected)


def test_gradients_are_those_of_float64() -> None:
    grad, gate_up = inputs()
    leaf = gate_up.double().requires_grad_()
    gate, up = leaf.chunk(2, dim=-1)
    silu = torch.nn.functional.silu(gate)
    # The gradient passes through the rounding of silu(gate), whose rounded value multiplies that of `up`.
    (expected,) = torch.autograd.grad((silu + (silu.bfloat16() - silu).detach()) * up, leaf, grad.double())
    found = swiglu_backward(grad, gate_up)
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.double(), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("column", [7, COLUMNS + 7])
def test_nothing_with_nan_or_infinity_is_quantised(value: float, column: int) -> None:
    grad, gate_up = inputs()
    gate_up[3, column] = value
    for codes in (
        lambda: swiglu_row_codes(gate_up, "pow2"),
        lambda: swiglu_codes(gate_up, "pow2"),
        lambda: swiglu_backward_codes(grad, gate_up, "pow2"),
    ):
        with pytest.raises(GroupNotFinite):
            codes()
