import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8core.alignment.divergences import clamp_exponent, jensen_shannon, jensen_shannon_k3, k1, k2, k3

GOLDEN = torch.tensor([0.1, -1.5, 0.8, -10.0, 0.3], dtype=torch.float64)


def test_golden_k2_and_k3():
    assert k2(GOLDEN).tolist() == pytest.approx([0.005, 1.125, 0.32, 50.0, 0.045], abs=1e-12)
    assert k3(GOLDEN).tolist() == pytest.approx([0.00517, 0.72313, 0.42554, 9.00005, 0.04986], abs=6e-6)
    assert k1(GOLDEN).tolist() == (-GOLDEN).tolist()


@given(st.floats(1e-13, 20))
def test_all_but_k1_are_never_negative(bound):
    d = torch.linspace(-bound, bound, 2001, dtype=torch.float64)
    assert all((divergence(d) >= 0).all() for divergence in (k2, k3, jensen_shannon, jensen_shannon_k3))


def test_rounding_never_makes_jensen_shannon_negative():
    assert (jensen_shannon(torch.linspace(-2e-12, 2e-12, 100_001, dtype=torch.float64)) >= 0).all()


@pytest.mark.parametrize("divergence", [k1, k2, k3, jensen_shannon, jensen_shannon_k3])
def test_equal_probabilities_give_exactly_zero(divergence):
    assert divergence(torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]


def test_k3_keeps_the_digits_of_small_differences():
    d = torch.tensor([1e-6], dtype=torch.float64)
    assert k3(d).item() == pytest.approx(0.5e-12, rel=1e-6)


def test_exponent_clamp_bounds_both_sides():
    assert clamp_exponent(torch.tensor([-1e9, -20.0, 3.0, 1e9])).tolist() == [-20.0, -20.0, 3.0, 20.0]


def test_expectations_over_a_vocabulary_are_the_divergences_themselves():
    """Unbiased means: summed over the vocabulary with the sampling probabilities they give the exact value."""
    q, p = [0.5, 0.3, 0.15, 0.05], [0.4, 0.2, 0.1, 0.3]
    mixture = [(a + b) / 2 for a, b in zip(p, q, strict=True)]

    def kl(a, b):
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))

    def expectation(divergence):
        values = divergence(torch.tensor([math.log(a / b) for a, b in zip(p, q, strict=True)], dtype=torch.float64))
        return sum(weight * value for weight, value in zip(q, values.tolist(), strict=True))

    assert expectation(k1) == pytest.approx(kl(q, p), rel=1e-12)
    assert expectation(k3) == pytest.approx(kl(q, p), rel=1e-12)
    assert expectation(jensen_shannon) == pytest.approx((kl(p, mixture) + kl(q, mixture)) / 2, rel=1e-12)
    assert abs(expectation(jensen_shannon_k3) - expectation(jensen_shannon)) > 0.01
