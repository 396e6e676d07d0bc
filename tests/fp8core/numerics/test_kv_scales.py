import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp8core.numerics.kv_scales import (
    AmaxStatistics,
    KvStatistics,
    LayerAmax,
    LayerScales,
    MagnitudeHistogram,
    count_magnitudes,
    covered_amax,
    scale_distance,
    scales_from_statistics,
)
from fp8core.numerics.recipe import E4M3_MAX

SCALES = LayerScales(q=2.0**-7, k=2.0**-8, v=2.0**-9)
AMAX = st.builds(LayerAmax, *[st.floats(0, 1e4, width=32)] * 3)


def random_batch(seed: int, batch: int = 3, length: int = 9) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, heads, length, 8, generator=generator) for heads in (4, 2, 2))
    valid = torch.rand(batch, length, generator=generator) > 0.3
    valid[:, 0] = True
    return (q * 2, k, v / 2), valid


# Scales


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, math.nan, math.inf, -math.inf])
def test_a_scale_must_be_positive_and_finite(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"scale of {name} is .* positive and finite"):
        LayerScales(**{"q": 1.0, "k": 1.0, "v": 1.0, name: value})


@pytest.mark.parametrize("missing", ["q", "k", "v"])
def test_there_is_no_default_scale(missing: str) -> None:
    with pytest.raises(TypeError, match=missing):
        LayerScales(**{name: 1.0 for name in "qkv" if name != missing})


@given(amax=st.lists(AMAX, min_size=1, max_size=4), margin=st.floats(1, 4), rule=st.sampled_from(["pow2", "fp32"]))
@settings(max_examples=50)
def test_scales_cover_the_amax_with_its_margin(amax: list[LayerAmax], margin: float, rule: str) -> None:
    scales = scales_from_statistics(amax, margin, rule)
    for layer, scale in zip(amax, scales, strict=True):
        for largest, value in ((layer.q, scale.q), (layer.k, scale.k), (layer.v, scale.v)):
            wanted = max(largest * margin, 1e-10)
            assert value * E4M3_MAX >= wanted * (1 - 2.0**-22)
            assert value * E4M3_MAX < wanted * (2 if rule == "pow2" else 1) * (1 + 2.0**-22)
            assert rule == "fp32" or math.frexp(value)[0] == 0.5
            assert torch.tensor(value).item() == value, "a scale must survive as FP32"


# Statistics


def test_amax_over_valid_tokens_of_each_layer() -> None:
    statistics = KvStatistics(2)
    expected = []
    for layer in range(2):
        tensors, valid = random_batch(layer)
        statistics.observe(layer, tensors, valid, None)
        expected.append(LayerAmax(*(max(abs(y) for y in x.transpose(1, 2)[valid].flatten().tolist()) for x in tensors)))
    assert statistics.amax() == expected
    assert statistics.saturated_share() == 0.0


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_what_masked_positions_hold_does_not_leak(poison: float) -> None:
    tensors, valid = random_batch(0)
    clean, poisoned = KvStatistics(1), KvStatistics(1)
    clean.observe(0, tensors, valid, SCALES)
    poison_at = ~valid[:, None, :, None]
    poisoned.observe(0, tuple(x.masked_fill(poison_at, poison) for x in tensors), valid, SCALES)
    assert poisoned.amax() == clean.amax()
    assert poisoned.histograms() == clean.histograms()
    assert poisoned.saturated_share() == clean.saturated_share() > 0


@given(seed=st.integers(0, 2**31), parts=st.integers(1, 5), order=st.randoms())
@settings(max_examples=20)
def test_streaming_equals_one_pass(seed: int, parts: int, order) -> None:
    tensors, valid = random_batch(seed, batch=5)
    once, streamed = KvStatistics(1), KvStatistics(1)
    once.observe(0, tensors, valid, SCALES)
    chunks = list(torch.arange(5).chunk(parts))
    order.shuffle(chunks)
    for rows in chunks:
        streamed.observe(0, tuple(x[rows] for x in tensors), valid[rows], SCALES)
    assert streamed.amax() == once.amax()
    assert streamed.histograms() == once.histograms()
    assert streamed.saturated_share() == once.saturated_share()


def test_saturated_share_counts_what_the_grid_cannot_hold() -> None:
    statistics = KvStatistics(2)
    saturated = elements = 0
    for layer in range(2):
        tensors, valid = random_batch(layer)
        statistics.observe(layer, tensors, valid, SCALES)
        for x, scale in zip(tensors, (SCALES.q, SCALES.k, SCALES.v), strict=True):
            seen = x.transpose(1, 2)[valid] / scale
            saturated += int((seen.abs() > 448).sum())
            elements += seen.numel()
    assert saturated > 10
    assert statistics.saturated_share() == saturated / elements


def test_the_largest_representable_value_is_not_saturated() -> None:
    limit = E4M3_MAX * SCALES.q
    x = torch.tensor([limit, -limit, torch.nextafter(torch.tensor(limit), torch.tensor(1e9)).item(), 0.0])
    statistics = KvStatistics(1)
    statistics.observe(0, (x.view(1, 1, 1, 4),) * 3, torch.ones(1, 1, dtype=torch.bool), LayerScales(*[SCALES.q] * 3))
    assert statistics.saturated_share() == 1 / 4


# Histograms


def test_histograms_count_every_element_of_valid_tokens() -> None:
    statistics = KvStatistics(2)
    batches = [random_batch(4), random_batch(5)]
    for layer, (tensors, valid) in enumerate(batches):
        tensors[2][valid[:, None].expand(-1, 2, -1)] *= 0.0  # valid zeros count, padding does not
        statistics.observe(layer, tensors, valid, None)
    for layer, (tensors, valid) in enumerate(batches):
        for x, name in zip(tensors, "qkv", strict=True):
            histogram = getattr(statistics.histograms()[layer], name)
            seen = x.transpose(1, 2)[valid].abs().flatten()
            assert sum(histogram.counts) == seen.numel()
            bits = seen.view(torch.int32) >> 20
            assert all(
                count == int((bits == bucket).sum()) for bucket, count in enumerate(histogram.counts, histogram.first)
            )


def test_a_percentile_leaves_outliers_out_and_100_is_amax() -> None:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(1, 2, 500, 8, generator=generator)
    x[0, 0, :4, 0] = 1000.0  # 4 of 8000 elements
    statistics = KvStatistics(1)
    statistics.observe(0, (x, 2 * x, 4 * x), torch.ones(1, 500, dtype=torch.bool), None)
    assert covered_amax(statistics.histograms(), 100.0) == statistics.amax()
    (layer,) = covered_amax(statistics.histograms(), 99.9)
    true = x.abs().flatten().sort().values[7992 - 1].item()
    assert true <= layer.q <= true * 1.125
    assert (layer.k, layer.v) == (2 * layer.q, 4 * layer.q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_amax_alone_covers_everything_at_any_percentile(dtype) -> None:
    counted, extremes = KvStatistics(1), AmaxStatistics(1)
    for seed in (7, 8):
        tensors, valid = random_batch(seed)
        for statistics in (counted, extremes):
            statistics.observe(0, tuple(x.to(dtype) for x in tensors), valid, SCALES)
    assert extremes.amax() == counted.amax()
    assert extremes.saturated_share() == counted.saturated_share() > 0
    for percentile in (50.0, 99.9, 100.0):
        assert covered_amax(extremes.histograms(), percentile) == counted.amax()
    (layer,), (full,) = extremes.histograms(), counted.histograms()
    assert sum(layer.k.counts) == sum(full.k.counts)
    assert layer.k + full.k == full.k + layer.k


# Distance of scales


def test_distance_of_scales_is_in_powers_of_two() -> None:
    used = [LayerScales(1.0, 1.0, 1.0), LayerScales(1.0, 1.0, 1.0)]
    assert scale_distance(used, used) == 0
    assert scale_distance(used, [LayerScales(2.0, 0.5, 1.0), LayerScales(8.0, 1.0, 1.0)]) == 5 / 6
    assert scale_distance([LayerScales(3.0, 3.0, 3.0)], [LayerScales(1.0, 1.0, 1.0)]) == pytest.approx(math.log2(3))
    with pytest.raises(AssertionError, match="another model"):
        scale_distance(used, used[:1])


# Average over steps


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


@given(seed=st.integers(0, 2**31), sizes=st.lists(st.integers(1, 50), min_size=1, max_size=5))
@settings(max_examples=30)
def test_histograms_of_parts_add_up(seed: int, sizes: list[int]) -> None:
    x = spread(sum(sizes), seed)
    first, *others = [histogram(part) for part in x.split(sizes)]
    forward = backward = first
    for other in others:
        forward, backward = forward + other, other + backward
    assert forward == backward == histogram(x)


def test_largest_and_smallest_numbers_have_a_bucket() -> None:
    limits = torch.finfo(torch.float32)
    found = histogram(torch.tensor([0.0, limits.smallest_normal, limits.max]))
    assert sum(found.counts) == 3
    assert found.first == 0
    assert found.percentile(100) == limits.max
    assert histogram(torch.zeros(3)).percentile(99) == 0.0
