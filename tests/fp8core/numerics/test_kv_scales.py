import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp8core.numerics.kv_scales import KvStatistics, LayerAmax, LayerScales, scale_distance, scales_from_statistics
from fp8core.numerics.recipe import E4M3_MAX

SCALES = LayerScales(q=2.0**-7, k=2.0**-8, v=2.0**-9)
AMAX = st.builds(LayerAmax, *[st.floats(0, 1e4, width=32)] * 3)


def random_batch(seed: int, batch: int = 3, length: int = 9) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, heads, length, 8, generator=generator) for heads in (4, 2, 2))
    valid = torch.rand(batch, length, generator=generator) > 0.3
    valid[:, 0] = True
    return (q * 2, k, v / 2), valid


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_scale_must_be_positive_and_finite(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"scale of {name} is .* positive and finite"):
        LayerScales(**{"q": 1.0, "k": 1.0, "v": 1.0, name: value})


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


def test_distance_of_scales_is_in_powers_of_two() -> None:
    used = [LayerScales(1.0, 1.0, 1.0), LayerScales(1.0, 1.0, 1.0)]
    assert scale_distance(used, used) == 0
    assert scale_distance(used, [LayerScales(2.0, 0.5, 1.0), LayerScales(8.0, 1.0, 1.0)]) == 5 / 6
    assert scale_distance([LayerScales(3.0, 3.0, 3.0)], [LayerScales(1.0, 1.0, 1.0)]) == pytest.approx(math.log2(3))
    with pytest.raises(AssertionError, match="another model"):
        scale_distance(used, used[:1])
