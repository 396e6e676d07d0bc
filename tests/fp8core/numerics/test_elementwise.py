import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from fp8core.numerics.elementwise import keep_fp32, rms_norm, rotate, round_to_bf16, swiglu
from fp8core.numerics.rotary import inverse_frequencies

EPS = 1e-6
ROUNDINGS = [keep_fp32, round_to_bf16]


def randn(*shape: int, seed: int, spread: float = 2.0) -> Tensor:
    """BF16 values in FP32."""
    return (spread * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16().float()


def to_bf16(x: Tensor) -> Tensor:
    return x.float().bfloat16().float()


def assert_close(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], tolerance: float) -> None:
    for x, y in zip(ours, theirs, strict=True):
        assert x.dtype == torch.float32
        assert (x.double() - y.double()).abs().max() <= tolerance * y.double().abs().max()


def passing(x: Tensor, rounding) -> Tensor:
    return x + (rounding(x).double() - x).detach()


@pytest.mark.parametrize(("rounding", "rounded"), [(keep_fp32, Tensor.float), (round_to_bf16, to_bf16)])
def test_rms_norm_rounds_the_wide_normalised_value_and_the_product(rounding, rounded) -> None:
    x, weight = randn(50, 96, seed=3), to_bf16(1 + 0.1 * randn(96, seed=4))
    wide = x.double()
    normed = rounded(wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) / 96 + EPS))
    assert torch.equal(rms_norm(x, weight, EPS, rounding, rounding), rounded(normed * weight))


@pytest.mark.parametrize(("rounding", "tolerance"), [(keep_fp32, 1e-5), (round_to_bf16, 1e-2)])
@pytest.mark.parametrize("shape", [(6, 32), (2, 3, 4, 32), (32,)])
def test_rms_norm_gradients(shape: tuple[int, ...], rounding, tolerance: float) -> None:
    leaves = randn(*shape, seed=5).requires_grad_(), randn(32, seed=6).requires_grad_()
    upstream = randn(*shape, seed=7)
    ours = torch.autograd.grad(rms_norm(*leaves, 0.1, rounding, rounding), leaves, upstream)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    normed = passing(wide[0] * torch.rsqrt(wide[0].square().mean(-1, keepdim=True) + 0.1), rounding)
    assert_close(ours, torch.autograd.grad(normed * wide[1], wide, upstream.double()), tolerance)


@pytest.mark.parametrize(("rounding", "rounded"), [(keep_fp32, Tensor.float), (round_to_bf16, to_bf16)])
def test_swiglu_rounds_the_wide_activation_and_the_product(rounding, rounded) -> None:
    gate, up = randn(40, 33, seed=10, spread=4.0), randn(40, 33, seed=11)
    wide = gate.double()
    expected = rounded(rounded(wide / (1 + torch.exp(-wide))) * up)
    assert torch.equal(swiglu(gate, up, rounding, rounding), expected)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_swiglu_gradients(rounding) -> None:
    leaves = randn(9, 33, seed=12, spread=4.0).requires_grad_(), randn(9, 33, seed=13).requires_grad_()
    upstream = randn(9, 33, seed=14)
    ours = torch.autograd.grad(swiglu(*leaves, rounding, rounding), leaves, upstream)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    explicit = passing(torch.nn.functional.silu(wide[0]), rounding) * wide[1]
    assert_close(ours, torch.autograd.grad(explicit, wide, upstream.double()), 1e-5)


def angles(dim: int, length: int) -> Tensor:
    return torch.arange(length).float()[:, None] * inverse_frequencies(dim, 10_000.0)


def test_rotation_is_that_of_transformers() -> None:
    x, table = randn(2, 3, 50, 32, seed=15), angles(32, 50)
    cos, sin = table.cos()[None, None], table.sin()[None, None]
    doubled = torch.cat((table, table), dim=-1)[None]
    expected, _ = apply_rotary_pos_emb(x, x, doubled.cos(), doubled.sin())
    assert torch.equal(rotate(x, cos, sin, keep_fp32), expected)
    assert torch.equal(rotate(x, cos, sin, round_to_bf16), to_bf16(expected))
