import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from fp8core.numerics.elementwise import keep_fp32, rms_norm, rotate, round_to_bf16, swiglu
from fp8core.numerics.rotary import inverse_frequencies

EPS = 1e-6


def randn(*shape: int, seed: int, spread: float = 2.0) -> Tensor:
    """BF16 values in FP32."""
    return (spread * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16().float()


def to_bf16(x: Tensor) -> Tensor:
    return x.float().bfloat16().float()


@pytest.mark.parametrize(("rounding", "rounded"), [(keep_fp32, Tensor.float), (round_to_bf16, to_bf16)])
def test_rms_norm_rounds_the_wide_normalised_value_and_the_product(rounding, rounded) -> None:
    x, weight = randn(50, 96, seed=3), to_bf16(1 + 0.1 * randn(96, seed=4))
    wide = x.double()
    normed = rounded(wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) / 96 + EPS))
    assert torch.equal(rms_norm(x, weight, EPS, rounding, rounding), rounded(normed * weight))


@pytest.mark.parametrize(("rounding", "rounded"), [(keep_fp32, Tensor.float), (round_to_bf16, to_bf16)])
def test_swiglu_rounds_the_wide_activation_and_the_product(rounding, rounded) -> None:
    gate, up = randn(40, 33, seed=10, spread=4.0), randn(40, 33, seed=11)
    wide = gate.double()
    expected = rounded(rounded(wide / (1 + torch.exp(-wide))) * up)
    assert torch.equal(swiglu(gate, up, rounding, rounding), expected)


def angles(dim: int, length: int) -> Tensor:
    return torch.arange(length).float()[:, None] * inverse_frequencies(dim, 10_000.0)


def test_rotation_is_that_of_transformers() -> None:
    x, table = randn(2, 3, 50, 32, seed=15), angles(32, 50)
    cos, sin = table.cos()[None, None], table.sin()[None, None]
    doubled = torch.cat((table, table), dim=-1)[None]
    expected, _ = apply_rotary_pos_emb(x, x, doubled.cos(), doubled.sin())
    assert torch.equal(rotate(x, cos, sin, keep_fp32), expected)
    assert torch.equal(rotate(x, cos, sin, round_to_bf16), to_bf16(expected))
