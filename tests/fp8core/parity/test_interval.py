import pytest

from fp8core.parity.interval import mean_interval, t_quantile


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042)]
)
def test_quantiles_are_those_of_the_tables(degrees, expected):
    assert t_quantile(0.975, degrees) == pytest.approx(expected, abs=1e-3)


def test_an_interval_by_hand():
    # mean 2, deviation 1, so 4.303 / sqrt(3) to each side
    low, high = mean_interval([1.0, 2.0, 3.0], 0.95)
    assert (low, high) == pytest.approx((2 - 2.4841, 2 + 2.4841), abs=1e-3)
    assert mean_interval([0.5, 0.5], 0.95) == (0.5, 0.5)
