import pytest
import torch
from torch import Tensor

from fp8core.numerics import fused_rotary
from fp8core.numerics.fused_rotary import HeadLayout

kernels = pytest.importorskip("fp8core.numerics.triton_rotary", reason="needs Triton", exc_type=ImportError)

EPS = 1e-6
TOKENS, POSITIONS = 13, 50
# Fewer heads than a program takes and more; a half that is no power of two.
LAYOUTS = [HeadLayout(4, 2, 32), HeadLayout(9, 3, 24), HeadLayout(16, 8, 64)]


def arguments(draw, layout: HeadLayout, normed: bool) -> tuple:
    """Of `norm_rotate` after qkv."""
    angles = torch.rand(POSITIONS, layout.head_dim // 2, generator=torch.Generator().manual_seed(0)) * 6
    cos, sin = (table.bfloat16().float() for table in (angles.cos(), angles.sin()))
    weights = tuple((1 + draw(layout.head_dim, seed=seed).float() / 8).bfloat16().float() for seed in (8, 9))
    positions = torch.randint(0, POSITIONS, (TOKENS,), generator=torch.Generator().manual_seed(1))
    return weights if normed else None, cos, sin, positions, layout, EPS


def projection(draw, layout: HeadLayout, seed: int) -> Tensor:
    return draw(TOKENS, (layout.query_heads + 2 * layout.kv_heads) * layout.head_dim, seed=seed)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("normed", [True, False])
def test_heads_are_those_of_the_reference(draw, layout: HeadLayout, normed: bool) -> None:
    qkv, rest = projection(draw, layout, 2), arguments(draw, layout, normed)
    assert torch.equal(kernels.norm_rotate(qkv, *rest), fused_rotary.norm_rotate(qkv, *rest))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("normed", [True, False])
def test_gradients_are_those_of_the_reference(draw, assert_close, layout: HeadLayout, normed: bool) -> None:
    qkv, grad = projection(draw, layout, 2), projection(draw, layout, 3)
    rest = arguments(draw, layout, normed)
    found = kernels.norm_rotate_backward(grad, qkv, *rest)
    expected = fused_rotary.norm_rotate_backward(grad, qkv, *rest)
    assert_close(found[0], expected[0])
    for of_norm, reference in zip(found[1:], expected[1:], strict=True):
        assert (of_norm is None) == (reference is None) == (not normed)
        if normed:
            assert torch.allclose(of_norm, reference, rtol=1e-5, atol=1e-4)


def test_gradients_of_norms_are_added_up_over_chunks_of_tokens(monkeypatch, draw) -> None:
    monkeypatch.setattr(kernels, "_BACKWARD_CHUNKS", 2)
    layout = LAYOUTS[0]
    rest = arguments(draw, layout, normed=True)
    qkv, grad = projection(draw, layout, 5), projection(draw, layout, 6)
    found = kernels.norm_rotate_backward(grad, qkv, *rest)
    expected = fused_rotary.norm_rotate_backward(grad, qkv, *rest)
    for of_norm, reference in zip(found[1:], expected[1:], strict=True):
        assert torch.allclose(of_norm, reference, rtol=1e-5, atol=1e-4)
