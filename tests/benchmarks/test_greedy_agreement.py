"""References whose sums end in other last bits."""

import pytest
import torch

from benchmarks.studies.greedy_agreement import NearAttention, NearLinear, formats_of, last_bits, near
from fp8core.numerics.attention import Fp8Attention
from fp8core.numerics.e4m3 import quantise_tiles
from fp8core.numerics.elementwise import FUSED
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.linear import Fp8BlockLinear, StoredWeight, load_weight


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def test_without_noise_a_linear_is_the_exact_one(generator):
    weight = torch.randn(200, 256, generator=generator)
    grid, scales = quantise_tiles(weight, "pow2")
    held = load_weight([StoredWeight(grid.to(torch.float8_e4m3fn), scales)])
    x = torch.randn(9, 256, generator=generator).bfloat16().float()
    exact = Fp8BlockLinear("pow2")(x, held)
    assert torch.equal(NearLinear(0.0, generator)(x, held), exact)
    assert not torch.equal(NearLinear(1e-3, generator)(x, held), exact)


def test_a_share_of_attention_moves_by_one_unit(generator):
    q, k, v = (torch.randn(1, 2, 100, 64, generator=generator).bfloat16().float() for _ in range(3))
    scales, mask = LayerScales(0.01, 0.01, 0.01), torch.ones(100, 100, dtype=torch.bool).tril()[None, None]
    moved = NearAttention(0.1, generator)
    held = moved.store(k, v, scales)
    exact, found = (each.attend(q, *held, mask, scales) for each in (Fp8Attention(), moved))
    differing = found != exact
    assert differing.double().mean() == pytest.approx(0.1, abs=0.01)
    units = (found.bfloat16().view(torch.int16) - exact.bfloat16().view(torch.int16))[differing]
    assert set(units.tolist()) == {1, -1}


def test_last_bits_are_about_those_that_were_measured():
    """On an H200: 0.07 to 0.09 % of a linear's output, 0.23 to 0.27 % of attention's, 0.39 to 0.53 % of experts'."""
    exact = formats_of("fp8_linear_kv", FUSED)
    linear, attention, experts = last_bits(exact, near(exact, 0), tokens=128)
    assert linear["rms"] == pytest.approx(0.0007, rel=0.1)
    assert 0.0015 < attention["rms"] < 0.0026
    assert 0.0039 < experts["rms"] < 0.0053
    assert [row["differing"] for row in last_bits(exact, exact, tokens=16)] == [0, 0, 0]
