import pytest
import torch

from fp8core.numerics import fused_swiglu

kernels = pytest.importorskip("fp8core.numerics.triton_swiglu", reason="needs Triton", exc_type=ImportError)

TOKENS = 37
COLUMNS = [128, 200]


@pytest.mark.parametrize("columns", COLUMNS)
def test_the_product_and_its_gradient_are_those_of_the_reference(draw, assert_close, columns: int) -> None:
    gate_up, grad = draw(TOKENS, 2 * columns, seed=1), draw(TOKENS, columns, seed=2)
    assert_close(kernels.swiglu(gate_up), fused_swiglu.swiglu(gate_up))
    assert_close(kernels.swiglu_backward(grad, gate_up), fused_swiglu.swiglu_backward(grad, gate_up))


def test_silu_is_the_nearest_bfloat16_to_every_gate() -> None:
    gates = (torch.arange(0x10000, dtype=torch.int32) << 16).view(torch.float32).view(256, 256)
    # In the interpreter subnormals are zero; below -87 a sigmoid is one.
    gates = torch.where(gates.isfinite() & (gates.abs() > 2.0**-120) & (gates > -87), gates, 1.0)
    gate_up = torch.cat((gates, torch.ones_like(gates)), dim=1).bfloat16()
    assert torch.equal(kernels.swiglu(gate_up), fused_swiglu.swiglu(gate_up))


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("rule", ["pow2", "fp32"])
def test_codes_are_those_of_the_product(draw, assert_same_codes, not_finite, columns: int, rule: str) -> None:
    gate_up = draw(TOKENS, 2 * columns, seed=3)
    rows, down = fused_swiglu.row_and_column_codes(kernels.swiglu(gate_up), rule)
    assert_same_codes(kernels.swiglu_row_codes(gate_up, rule, not_finite), rows)
    found = kernels.swiglu_codes(gate_up, rule, not_finite)
    assert_same_codes(found[0], rows)
    assert_same_codes(found[1], down)
    assert not not_finite.item()


@pytest.mark.parametrize("rule", ["pow2", "fp32"])
def test_codes_are_those_of_the_gradient(draw, assert_same_codes, not_finite, rule: str) -> None:
    # Two tiles for the gate and two for `up`.
    gate_up, grad = draw(TOKENS, 512, seed=4), draw(TOKENS, 256, seed=5)
    expected = fused_swiglu.row_and_column_codes(kernels.swiglu_backward(grad, gate_up), rule)
    for found, codes in zip(kernels.swiglu_backward_codes(grad, gate_up, rule, not_finite), expected, strict=True):
        assert_same_codes(found, codes)
    assert not not_finite.item()


def test_gate_and_up_in_one_group_have_no_kernel(draw, not_finite) -> None:
    with pytest.raises(AssertionError, match="share a group"):
        kernels.swiglu_backward_codes(draw(3, 200, seed=1), draw(3, 400, seed=2), "pow2", not_finite)


@pytest.mark.parametrize(("value", "column"), [(torch.nan, 0), (torch.inf, 255), (-torch.inf, 127)])
def test_the_flag_is_set_by_nan_and_infinity(not_finite, value: float, column: int) -> None:
    gate_up, grad = torch.ones(3, 256).bfloat16(), torch.ones(3, 128).bfloat16()
    gate_up[2, column] = value
    for codes in (
        lambda: kernels.swiglu_row_codes(gate_up, "pow2", not_finite),
        lambda: kernels.swiglu_codes(gate_up, "pow2", not_finite),
        lambda: kernels.swiglu_backward_codes(grad, gate_up, "pow2", not_finite),
    ):
        codes()
        assert not_finite.item() == 1
        not_finite.zero_()
