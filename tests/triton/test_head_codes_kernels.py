import pytest
import torch
from torch import Tensor

from fp8core.numerics import fused_head_codes
from fp8core.numerics.fused_rotary import HeadLayout
from fp8core.numerics.kv_scales import LayerScales

kernels = pytest.importorskip("fp8core.numerics.triton_head_codes", reason="needs Triton", exc_type=ImportError)

# Tokens that no program has whole; heads that fill a part of a program, several programs, one exactly.
TOKENS = 13
LAYOUTS = [HeadLayout(4, 2, 32), HeadLayout(9, 3, 24), HeadLayout(20, 10, 128), HeadLayout(16, 8, 128)]
# The last are no powers of two: quotients, products and the limits (134.6, which BF16 has not) are rounded.
# 129 / 128 over Q's is next to the middle between two codes; a product with the reciprocal is that middle.
SCALES = [LayerScales(2.0**-6, 2.0**-5, 2.0**-7), LayerScales(0.7010869979858398, 0.0123, 134.6 / 448)]


def projection(draw, layout: HeadLayout, scales: LayerScales) -> Tensor:
    """Some elements of each part are saturated, some are on the limit or next to it, some are nothing in E4M3."""
    qkv = draw(TOKENS, (layout.query_heads + 2 * layout.kv_heads) * layout.head_dim, seed=2)
    for x, limit in zip(fused_head_codes.heads_of(qkv, layout), fused_head_codes.limits_of(scales), strict=True):
        x.mul_(limit / 8)
        near = torch.tensor([limit]).bfloat16().view(torch.int16) + torch.arange(-2, 3, dtype=torch.int16)
        x[5, 0, :5], x[6, 0, :5] = near.view(torch.bfloat16), -near.view(torch.bfloat16)
        x[7, 0, :6] = torch.tensor([torch.inf, -torch.inf, 3e38, 1e-40, -1e-30, limit * 2**-19])
        x[8] = 129 / 128
    return qkv


def same(found, expected) -> None:
    for mine, reference in zip(found, expected, strict=True):
        assert mine.is_contiguous()
        assert (mine.shape, mine.dtype) == (reference.shape, reference.dtype)
        assert torch.equal(mine.view(torch.uint8), reference.view(torch.uint8))


@pytest.mark.parametrize("scales", SCALES, ids=["pow2", "fp32"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_codes_and_values_are_those_of_the_reference(draw, layout: HeadLayout, scales: LayerScales) -> None:
    qkv = projection(draw, layout, scales)
    codes = kernels.head_codes(qkv, layout, scales)
    same(codes, fused_head_codes.head_codes(qkv, layout, scales))
    assert scales == SCALES[0] or codes[0][8].float().unique() == 1.375
    same(kernels.head_values(qkv, layout, scales), fused_head_codes.head_values(qkv, layout, scales))


@pytest.mark.parametrize("scales", SCALES, ids=["pow2", "fp32"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_pass_by_what_is_not_saturated(draw, layout: HeadLayout, scales: LayerScales) -> None:
    qkv = projection(draw, layout, scales)
    heads = layout.query_heads, layout.kv_heads, layout.kv_heads
    grads = tuple(draw(TOKENS, count, layout.head_dim, seed=3 + i) for i, count in enumerate(heads))
    expected = fused_head_codes.head_gradients(grads, qkv, layout, scales)
    same([kernels.head_gradients(grads, qkv, layout, scales)], [expected])
    assert 0.001 < (expected == 0).float().mean() < 0.5


def test_gradients_need_not_be_contiguous(draw) -> None:
    layout, scales = LAYOUTS[0], SCALES[0]
    qkv, grad = projection(draw, layout, scales), draw(TOKENS, 8 * 32, seed=4)
    views = fused_head_codes.heads_of(grad, layout)
    expected = fused_head_codes.head_gradients(views, qkv, layout, scales)
    same([kernels.head_gradients(views, qkv, layout, scales)], [expected])


def test_what_is_not_a_number_has_no_gradient(draw) -> None:
    layout, scales = LAYOUTS[0], SCALES[0]
    qkv, ones = projection(draw, layout, scales), torch.ones(TOKENS, 8 * 32, dtype=torch.bfloat16)
    qkv[3] = torch.nan
    grad = kernels.head_gradients(fused_head_codes.heads_of(ones, layout), qkv, layout, scales)
    assert not grad[3].any()
    assert grad[4].any()
