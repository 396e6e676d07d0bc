import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp8core.numerics.magnitudes import MagnitudeHistogram, count_magnitudes


def histogram(x: Tensor) -> MagnitudeHistogram:
    return MagnitudeHistogram.of(x.abs().max().item(), count_magnitudes(x.abs()))


def spread(count: int, seed: int) -> Tensor:
    """Magnitudes over many binades, with zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator) * torch.exp(5 * torch.randn(count, generator=generator))
    return x * (torch.rand(count, generator=generator) > 0.05)


def test_buckets_are_an_exponent_and_three_bits_of_mantissa() -> None:
    edges = [1.0, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875, 2.0]
    below = torch.nextafter(torch.tensor(edges[1:]), torch.tensor(0.0))
    for lower, upper in zip(edges[:-1], below.tolist(), strict=True):
        found = histogram(torch.tensor([lower, upper, -upper]))
        assert found.counts == (3,)
    assert histogram(torch.tensor(edges)).counts == (1,) * 9
    assert histogram(torch.tensor([1.0, 1.25])).counts == (1, 0, 1)


@given(seed=st.integers(0, 2**31), count=st.integers(1, 400), percent=st.floats(50, 100))
@settings(max_examples=60)
def test_percentile_covers_its_share_and_little_more(seed: int, count: int, percent: float) -> None:
    x = spread(count, seed)
    value = histogram(x).percentile(percent)
    ranked = x.abs().sort().values
    nearest = ranked[math.ceil(count * percent / 100) - 1].item()
    assert nearest <= value <= max(nearest * 1.125, 1e-38)
    assert value <= ranked[-1].item()
    assert (ranked <= value).double().mean().item() >= percent / 100 - 1e-12


@given(seed=st.integers(0, 2**31), count=st.integers(1, 100))
@settings(max_examples=30)
def test_the_hundredth_percentile_is_amax(seed: int, count: int) -> None:
    x = spread(count, seed)
    assert histogram(x).percentile(100) == x.abs().max().item()


@given(seed=st.integers(0, 2**31), sizes=st.lists(st.integers(1, 50), min_size=1, max_size=5))
@settings(max_examples=30)
def test_histograms_of_parts_add_up(seed: int, sizes: list[int]) -> None:
    x = spread(sum(sizes), seed)
    first, *others = [histogram(part) for part in x.split(sizes)]
    forward = backward = first
    for other in others:
        forward, backward = forward + other, other + backward
    assert forward == backward == histogram(x)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_not_hidden(value: float) -> None:
    x = spread(1000, 0)
    poisoned = histogram(torch.cat((x, torch.tensor([value]))))
    for found in (poisoned, poisoned + histogram(x), histogram(x) + poisoned):
        assert str(found.percentile(50)) == str(value)


def test_largest_and_smallest_numbers_have_a_bucket() -> None:
    limits = torch.finfo(torch.float32)
    found = histogram(torch.tensor([0.0, limits.smallest_normal, limits.max]))
    assert sum(found.counts) == 3
    assert found.first == 0
    assert found.percentile(100) == limits.max
    assert histogram(torch.zeros(3)).percentile(99) == 0.0


@pytest.mark.parametrize("percent", [0.0, -1.0, 100.1, math.nan])
def test_percentiles_outside_the_range_are_an_error(percent: float) -> None:
    with pytest.raises(AssertionError, match="not in"):
        histogram(torch.ones(2)).percentile(percent)
