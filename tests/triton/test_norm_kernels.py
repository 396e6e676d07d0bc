import pytest
import torch

from fp8core.numerics import fused_norm

kernels = pytest.importorskip("fp8core.numerics.triton_norm", reason="needs Triton", exc_type=ImportError)

EPS = 1e-6
# Whole groups, and a last one that is shorter; tokens in no multiple of anything.
HIDDEN = [256, 200]
TOKENS = 37


@pytest.fixture
def weight(draw):
    return lambda hidden: (1 + draw(hidden, seed=9).float() / 8).bfloat16().float()


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("adds", [True, False])
def test_the_norm_is_that_of_the_reference(draw, weight, hidden: int, adds: bool) -> None:
    arguments = draw(TOKENS, hidden, seed=1), draw(TOKENS, hidden, seed=2) if adds else None, weight(hidden), EPS
    for found, expected in zip(kernels.add_norm(*arguments), fused_norm.add_norm(*arguments), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("rule", ["pow2", "fp32"])
def test_codes_are_those_of_the_reference(
    draw, weight, assert_same_codes, not_finite, hidden: int, adds: bool, rule: str
) -> None:
    x, added = draw(TOKENS, hidden, seed=1), draw(TOKENS, hidden, seed=2) if adds else None
    arguments = x, added, weight(hidden), EPS, rule
    total, rows, columns, inverse = kernels.add_norm_codes(*arguments, not_finite)
    expected = fused_norm.add_norm_codes(*arguments)
    assert torch.equal(total, expected[0])
    assert_same_codes(rows, expected[1])
    assert_same_codes(columns, expected[2])
    assert torch.equal(inverse, expected[3])
    total, rows = kernels.add_norm_row_codes(*arguments, not_finite)
    assert torch.equal(total, expected[0])
    assert_same_codes(rows, expected[1])
    assert not not_finite.item()


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("sends", [True, False])
def test_the_backward_is_that_of_the_reference(
    monkeypatch, draw, weight, assert_close, hidden: int, sends: bool
) -> None:
    # Five rows for each program but the last.
    monkeypatch.setattr(kernels, "_BACKWARD_PROGRAMS", 8)
    total, normed = draw(TOKENS, hidden, seed=1), draw(TOKENS, hidden, seed=2)
    inverse = torch.rand(TOKENS, generator=torch.Generator().manual_seed(4))
    arguments = normed, draw(TOKENS, hidden, seed=3) if sends else None, total, weight(hidden), inverse
    grad, grad_weight = kernels.add_norm_backward(*arguments)
    expected, expected_weight = fused_norm.add_norm_backward(*arguments)
    assert_close(grad, expected)
    assert torch.allclose(grad_weight, expected_weight, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["add_norm_row_codes", "add_norm_codes"])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_the_flag_is_set_by_nan_and_infinity(weight, not_finite, name: str, value: float) -> None:
    x = torch.ones(3, 200).bfloat16()
    x[2, 199] = value
    getattr(kernels, name)(x, None, weight(200), EPS, "pow2", not_finite)
    assert not_finite.item() == 1
