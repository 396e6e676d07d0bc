import pytest
import torch
from torch import Tensor

from fp8core.numerics.elementwise import inverse_frequencies, rms_norm, rotate
from fp8core.numerics.fused_rotary import HeadLayout, norm_rotate, norm_rotate_backward
from fp8core.numerics.rounding import KERNELS, round_to_bf16

EPS = 1e-6
TOKENS, POSITIONS = 19, 64
LAYOUT = HeadLayout(query_heads=6, kv_heads=2, head_dim=32)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def tables() -> tuple[Tensor, Tensor, Tensor]:
    """Cosines, sines, and positions of two packed sequences."""
    angles = torch.arange(POSITIONS).float()[:, None] * inverse_frequencies(LAYOUT.head_dim, 10_000.0)
    positions = torch.cat((torch.arange(11), torch.arange(50, 50 + TOKENS - 11)))
    return KERNELS.tables(angles.cos()), KERNELS.tables(angles.sin()), positions


def qkv_of(seed: int) -> Tensor:
    return randn(TOKENS, (LAYOUT.query_heads + 2 * LAYOUT.kv_heads) * LAYOUT.head_dim, seed=seed)


def norms() -> tuple[Tensor, Tensor]:
    return 1 + randn(LAYOUT.head_dim, seed=2).float() / 8, 1 + randn(LAYOUT.head_dim, seed=3).float() / 8


@pytest.mark.parametrize("normed", [True, False])
def test_q_and_k_are_those_of_the_decoder_and_v_is_itself(normed: bool) -> None:
    qkv, (cos, sin, positions), weights = qkv_of(1), tables(), norms()
    out = norm_rotate(qkv, weights if normed else None, cos, sin, positions, LAYOUT, EPS)
    assert (out.dtype, out.shape) == (torch.bfloat16, qkv.shape)
    width = LAYOUT.query_heads * LAYOUT.head_dim
    last = LAYOUT.kv_heads * LAYOUT.head_dim
    parts = zip(out.split([width, last, last], dim=1), qkv.split([width, last, last], dim=1), strict=True)
    (q, raw_q), (k, raw_k), (v, raw_v) = parts
    assert torch.equal(v, raw_v)
    for found, raw, weight in ((q, raw_q, weights[0]), (k, raw_k, weights[1])):
        # As the decoder has them: [B, heads, T, d].
        heads = raw.float().view(1, TOKENS, -1, LAYOUT.head_dim).transpose(1, 2)
        if normed:
            heads = rms_norm(heads, weight, EPS, round_to_bf16, KERNELS.normalised)
        expected = rotate(heads, cos[positions][None, None], sin[positions][None, None], round_to_bf16)
        assert torch.equal(found.float(), expected.transpose(1, 2).reshape(TOKENS, -1))


@pytest.mark.parametrize("normed", [True, False])
def test_gradients_are_those_of_float64(normed: bool) -> None:
    qkv, (cos, sin, positions), grad = qkv_of(1), tables(), qkv_of(4)
    weights = norms() if normed else None
    found = norm_rotate_backward(grad, qkv, weights, cos, sin, positions, LAYOUT, EPS)

    leaf = qkv.double().requires_grad_()
    wide = [weight.double().requires_grad_() for weight in weights or ()]
    heads = leaf.view(TOKENS, -1, LAYOUT.head_dim)
    rotated = heads[:, : -LAYOUT.kv_heads]
    if normed:
        factors = torch.cat([wide[0].expand(LAYOUT.query_heads, -1), wide[1].expand(LAYOUT.kv_heads, -1)])
        rotated = rotated * torch.rsqrt(rotated.square().mean(-1, keepdim=True) + EPS) * factors
    turn = torch.complex(cos.double(), sin.double())[positions][:, None]
    turned = torch.complex(*rotated.chunk(2, dim=-1)) * turn
    out = torch.cat((torch.cat((turned.real, turned.imag), dim=-1), heads[:, -LAYOUT.kv_heads :]), dim=1).flatten(1)
    expected = torch.autograd.grad(out, [leaf, *wide], grad.double())
    assert found[0].dtype == torch.bfloat16
    assert torch.allclose(found[0].double(), expected[0], rtol=2**-8, atol=1e-5)
    if not normed:
        assert found[1:] == (None, None)
        return
    for of_norm, wide_gradient in zip(found[1:], expected[1:], strict=True):
        assert of_norm.dtype == torch.float32
        assert torch.allclose(of_norm.double(), wide_gradient, rtol=1e-5, atol=1e-5)
