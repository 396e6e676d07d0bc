from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fp8core.numerics.fused_head_codes import head_codes, head_gradients, head_values, limits_of
from fp8core.numerics.fused_rotary import HeadLayout, heads_of
from fp8core.numerics.kv_scales import LayerScales

pytestmark = pytest.mark.gpu

# Qwen3-8B, Qwen3-0.6B, a part that no program fills, a last program with few columns.
LAYOUTS = [HeadLayout(32, 8, 128), HeadLayout(16, 8, 128), HeadLayout(9, 3, 24), HeadLayout(20, 10, 128)]
# The last are no powers of two; the quotient of 129 / 128 and Q's is not its product with the reciprocal.
SCALES = [LayerScales(2.0**-6, 2.0**-5, 2.0**-7), LayerScales(0.7010869979858398, 0.0123, 134.6 / 448)]
TOKENS = [9, 77, 1025]


def projection(draw: Callable[..., Tensor], tokens: int, layout: HeadLayout, scales: LayerScales) -> Tensor:
    """Some elements are saturated, some are on the limit or next to it, some are nothing in E4M3, some no number."""
    qkv = draw(tokens, (layout.query_heads + 2 * layout.kv_heads) * layout.head_dim, seed=2)
    for x, limit in zip(heads_of(qkv, layout), limits_of(scales), strict=True):
        x.mul_(limit / 8)
        near = torch.tensor([limit]).bfloat16().view(torch.int16) + torch.arange(-2, 3, dtype=torch.int16)
        x[5, 0, :5], x[6, 0, :5] = near.view(torch.bfloat16), -near.view(torch.bfloat16)
        x[7, 0, :7] = torch.tensor([torch.inf, -torch.inf, 3e38, 1e-40, -1e-30, limit * 2**-19, torch.nan])
        x[8] = 129 / 128
    return qkv


def assert_same_bytes(found: Tensor, expected: Tensor) -> None:
    assert found.is_contiguous()
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    found = found.cpu()
    nan = expected.float().isnan()
    assert torch.equal(found.float().isnan(), nan)
    kept = ~nan
    assert torch.equal(found[kept].view(torch.uint8), expected[kept].view(torch.uint8))


@pytest.mark.parametrize("scales", SCALES, ids=["pow2", "fp32"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_all_three_give_the_bytes_of_the_reference(
    device: torch.device, draw: Callable[..., Tensor], layout: HeadLayout, scales: LayerScales, tokens: int
) -> None:
    qkv = projection(draw, tokens, layout, scales)
    on_gpu = qkv.to(device)
    for function in (head_codes, head_values):
        for found, expected in zip(function(on_gpu, layout, scales), function(qkv, layout, scales), strict=True):
            assert_same_bytes(found, expected)
    q, k, v = heads_of(draw(*qkv.shape, seed=3), layout)
    expected = head_gradients((q, k, v), qkv, layout, scales)
    assert_same_bytes(head_gradients((q.to(device), k.to(device), v.to(device)), on_gpu, layout, scales), expected)
