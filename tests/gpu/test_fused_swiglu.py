import pytest
import torch
from torch import Tensor

from fp8core.numerics.block_codes import Codes, FiniteFlag, row_and_column_codes, row_codes
from fp8core.numerics.e4m3 import GroupNotFinite
from fp8core.numerics.fused_swiglu import swiglu, swiglu_backward, swiglu_backward_codes, swiglu_codes, swiglu_row_codes

pytestmark = pytest.mark.gpu

RULES = ["pow2", "fp32"]
# The second's halves share a group of columns, which has no kernel of its own.
SHAPES = [(1, 128), (130, 200), (333, 384), (1025, 1536)]
LARGE = (4096, 12_288)


def draw(*shape: int, seed: int, device: torch.device) -> Tensor:
    """A few of the values are signed zeros."""
    x = 3 * torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device)
    return torch.where(x.abs() < 0.05, x.sign() * -0.0, x).bfloat16()


def assert_same(found: Codes, expected: Codes) -> None:
    assert found[0].is_contiguous()
    assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(found[1], expected[1])


def test_silu_is_the_nearest_bfloat16_to_all_but_a_few_gates(device) -> None:
    gates = (torch.arange(0x10000, dtype=torch.int32) << 16).view(torch.float32).view(256, 256)
    gates = torch.where(gates.isfinite(), gates, 1.0)
    gate_up = torch.cat((gates, torch.ones_like(gates)), dim=1).bfloat16()
    found, expected = swiglu(gate_up.to(device)).cpu(), swiglu(gate_up)
    # Below, where the sigmoid is subnormal, the kernels have zero.
    usual = gates > -87
    steps = (found.view(torch.int16).int() - expected.view(torch.int16).int())[usual]
    assert int(steps.abs().max()) <= 1
    assert int(steps.count_nonzero()) <= 6, gates[usual][steps != 0]
    assert (found[~usual].float().abs() < 2.0**-118).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_and_gradient_agree_with_the_reference(device, shape: tuple[int, int]) -> None:
    gate_up = draw(shape[0], 2 * shape[1], seed=1, device=device)
    grad = draw(*shape, seed=2, device=device)
    for found, expected in (
        (swiglu(gate_up).cpu(), swiglu(gate_up.cpu())),
        (swiglu_backward(grad, gate_up).cpu(), swiglu_backward(grad.cpu(), gate_up.cpu())),
    ):
        assert (found != expected).float().mean() < 0.01
        assert torch.allclose(found.float(), expected.float(), rtol=2**-6, atol=1e-5)


@pytest.mark.parametrize("shape", [*SHAPES, LARGE], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_codes_are_the_bytes_of_the_unfused_composition(device, shape: tuple[int, int], rule: str) -> None:
    gate_up = draw(shape[0], 2 * shape[1], seed=1, device=device)
    grad = draw(*shape, seed=2, device=device)
    product, gradient = swiglu(gate_up), swiglu_backward(grad, gate_up)
    assert_same(swiglu_row_codes(gate_up, rule), row_codes(product, rule))
    for found, expected in zip(swiglu_codes(gate_up, rule), row_and_column_codes(product, rule), strict=True):
        assert_same(found, expected)
    of_gradient = row_and_column_codes(gradient, rule)
    for found, expected in zip(swiglu_backward_codes(grad, gate_up, rule), of_gradient, strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [(0, 0), (129, 255), (64, 128)])
@pytest.mark.parametrize("rule", RULES)
def test_nothing_with_nan_or_infinity_is_quantised(device, value: float, place: tuple[int, int], rule: str) -> None:
    gate_up, grad = torch.ones(130, 256, device=device).bfloat16(), torch.ones(130, 128, device=device).bfloat16()
    bad = gate_up.clone()
    bad[place] = value
    codes = (swiglu_row_codes, (bad,)), (swiglu_codes, (bad,)), (swiglu_backward_codes, (grad, bad))
    for codes_of, arguments in codes:
        with pytest.raises(GroupNotFinite):
            codes_of(*arguments, rule)
    clean = FiniteFlag(device)
    swiglu_codes(gate_up, rule, clean)
    swiglu_backward_codes(grad, gate_up, rule, clean)
    clean.check()
    bad_grad = grad.clone()
    bad_grad[place[0], place[1] % 128] = value
    with pytest.raises(GroupNotFinite):
        swiglu_backward_codes(bad_grad, gate_up, rule)


def test_a_full_batch(device) -> None:
    """Offsets beyond 2^31 elements."""
    gate_up = torch.randn(65_536 + 3, 2 * 17_408, device=device, dtype=torch.bfloat16)
    rows, _columns = swiglu_codes(gate_up, "pow2")
    assert_same(rows, row_codes(swiglu(gate_up), "pow2"))
