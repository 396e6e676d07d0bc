import math

import pytest
import torch
from torch import Tensor

from fp8core.numerics.kv_scales import AmaxStatistics, KvStatistics, LayerScales
from fp8core.numerics.magnitudes import COUNTS, TALLY, tally, tally_amax

pytestmark = pytest.mark.gpu

# Heads, tokens and channels: Qwen3-8B's queries, rows that fill no tile, and one element.
SHAPES = [(1, 32, 1000, 128), (2, 3, 17, 96), (3, 2, 5, 700), (1, 1, 1, 1)]


def wide(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Magnitudes far beyond the window that registers hold, and zeros."""
    generator = torch.Generator().manual_seed(shape[2])
    x = torch.randn(shape, generator=generator) * torch.exp(8 * torch.randn(shape, generator=generator))
    return (x * (torch.rand(shape, generator=generator) > 0.1)).to(dtype)


def some_of(batch: int, tokens: int) -> Tensor:
    valid = torch.rand(batch, tokens, generator=torch.Generator().manual_seed(tokens)) > 0.3
    valid[:, 0] = True
    return valid


@pytest.mark.parametrize("poison", [0.0, math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tallies_are_those_of_the_reference(device, shape, dtype, poison) -> None:
    x, valid = wide(shape, dtype), some_of(shape[0], shape[2])
    x[0, 0, 0, 0] = poison
    expected, found, extremes = (
        torch.zeros(TALLY, dtype=torch.int64, device=where) for where in ("cpu", device, device)
    )
    for limit in (math.inf, 3.5):
        tally(expected, x, valid, limit)
        tally(found, x.to(device), valid.to(device), limit)
        tally_amax(extremes, x.to(device), valid.to(device), limit)
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(extremes.cpu()[:COUNTS], expected[:COUNTS])
    assert not extremes[COUNTS:].any()


def test_heads_that_lie_inside_a_fused_projection(device) -> None:
    fused = torch.randn(2, 40, 8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    valid = some_of(2, 40)
    parts = fused.split([4, 2, 2], dim=2)
    scales = LayerScales(2.0**-7, 2.0**-8, 2.0**-8)
    for kind in (KvStatistics, AmaxStatistics):
        here, there = kind(1), kind(1, device)
        here.observe(0, tuple(part.transpose(1, 2) for part in parts), valid, scales)
        on_gpu = fused.to(device).split([4, 2, 2], dim=2)
        there.observe(0, tuple(part.transpose(1, 2) for part in on_gpu), valid.to(device), scales)
        assert there.amax() == here.amax()
        assert there.histograms() == here.histograms()
        assert there.saturated_share() == here.saturated_share() > 0
