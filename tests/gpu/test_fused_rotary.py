from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fp8core.numerics.elementwise import inverse_frequencies
from fp8core.numerics.fused_rotary import HeadLayout, norm_rotate, norm_rotate_backward

pytestmark = pytest.mark.gpu

EPS = 1e-6
POSITIONS = 4096
# Qwen3-8B, Qwen3-0.6B, fewer heads than a program takes, a half that is no power of two.
LAYOUTS = [HeadLayout(32, 8, 128), HeadLayout(16, 8, 128), HeadLayout(4, 2, 64), HeadLayout(9, 3, 96)]
TOKENS = [1, 77, 1025]
Draw = Callable[..., Tensor]


def projection(draw: Draw, tokens: int, layout: HeadLayout, seed: int) -> Tensor:
    return draw(tokens, (layout.query_heads + 2 * layout.kv_heads) * layout.head_dim, seed=seed)


def arguments(draw: Draw, tokens: int, layout: HeadLayout, normed: bool, device: torch.device) -> tuple:
    """Of `norm_rotate` after qkv."""
    angles = torch.arange(POSITIONS).float()[:, None] * inverse_frequencies(layout.head_dim, 1e6)
    cos, sin = (table.bfloat16().float().to(device) for table in (angles.cos(), angles.sin()))
    weights = tuple((1 + draw(layout.head_dim, seed=s).float() / 8).bfloat16().float().to(device) for s in (8, 9))
    positions = torch.randint(0, POSITIONS, (tokens,), generator=torch.Generator().manual_seed(1)).to(device)
    return weights if normed else None, cos, sin, positions, layout, EPS


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("tokens", TOKENS)
def test_the_forward_gives_the_bytes_of_the_reference(
    device, draw: Draw, layout: HeadLayout, normed: bool, tokens: int
) -> None:
    qkv = projection(draw, tokens, layout, 2)
    found = norm_rotate(qkv.to(device), *arguments(draw, tokens, layout, normed, device))
    assert torch.equal(found.cpu(), norm_rotate(qkv, *arguments(draw, tokens, layout, normed, torch.device("cpu"))))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("tokens", TOKENS)
def test_the_backward_agrees_with_the_reference_and_with_itself(
    device, draw: Draw, layout: HeadLayout, normed: bool, tokens: int
) -> None:
    qkv, grad, rest = projection(draw, tokens, layout, 2), projection(draw, tokens, layout, 3), (tokens, layout, normed)
    found = norm_rotate_backward(grad.to(device), qkv.to(device), *arguments(draw, *rest, device))
    expected = norm_rotate_backward(grad, qkv, *arguments(draw, *rest, torch.device("cpu")))
    assert (found[0].cpu() != expected[0]).float().mean() < 0.01
    scale = expected[0].float().abs().amax(-1, keepdim=True)
    error = (found[0].cpu().float() - expected[0].float()).abs()
    assert (error <= 2**-7 * expected[0].float().abs() + 1e-5 * scale).all()
    for of_norm, reference in zip(found[1:], expected[1:], strict=True):
        assert (of_norm is None) == (reference is None)
        if of_norm is not None:
            assert torch.allclose(of_norm.cpu(), reference, rtol=1e-4, atol=1e-4 * float(reference.abs().max()))
    for _ in range(3):
        again = norm_rotate_backward(grad.to(device), qkv.to(device), *arguments(draw, *rest, device))
        for first, second in zip(found, again, strict=True):
            assert first is second is None or torch.equal(first, second)


def test_values_are_copied_whatever_they_are(device, draw: Draw) -> None:
    layout = LAYOUTS[0]
    qkv = projection(draw, 5, layout, 2).to(device)
    values = slice((layout.query_heads + layout.kv_heads) * layout.head_dim, None)
    qkv[2, values] = torch.nan
    qkv[3, values] = torch.inf
    out = norm_rotate(qkv, *arguments(draw, 5, layout, True, device))
    assert torch.equal(out[:, values].nan_to_num(7.0), qkv[:, values].nan_to_num(7.0))
    assert out[:, : values.start].isfinite().all()
