"""Packed attention with its kernels, beside torch's own functions and FP64."""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from fp8core.kernels import attention
from fp8core.kernels.attention_backward import flash_gradients
from fp8core.numerics.attention import FP8_CACHE_FORMS, QUERY_TYPES
from fp8core.numerics.fused import HeadLayout, head_gradients, head_values, heads_of, limits_of
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.packed import (
    DevicePack,
    PackedAttention,
    PackedSequences,
    packed_attention,
    packed_attention_backward,
)
from fp8core.numerics.recipe import AttentionProducts

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

LAYOUT = HeadLayout(query_heads=32, kv_heads=8, head_dim=128)
SCALES = LayerScales(2.0**-7, 2.0**-6, 2.0**-7)
each_product = pytest.mark.parametrize("products", QUERY_TYPES)


@pytest.fixture(scope="module")
def pack() -> DevicePack:
    return DevicePack.of(PackedSequences.of([700, 1, 33, 1300]), torch.device("cuda"))


@pytest.fixture(scope="module")
def qkv(pack: DevicePack) -> Tensor:
    """Some elements are saturated under the scales."""
    generator = torch.Generator().manual_seed(0)
    return (2 * torch.randn(pack.sequences.tokens, 48 * 128, generator=generator)).bfloat16().cuda()


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def gradient(attend: Callable[[Tensor], Tensor], qkv: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    leaf = qkv.detach().requires_grad_()
    out = attend(leaf)
    return out.detach(), torch.autograd.grad(out, leaf, upstream)[0]


@pytest.fixture(scope="module")
def upstream(pack: DevicePack) -> Tensor:
    """Filling has no gradient: nothing after it is in the loss."""
    drawn = torch.randn(pack.sequences.tokens, 32 * 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    drawn[~pack.sequences.valid] = 0
    return drawn.cuda()


def varlen(q: Tensor, k: Tensor, v: Tensor, pack: DevicePack) -> Tensor:
    """torch's own function with torch's own gradient."""
    grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    longest = pack.sequences.longest
    out = varlen_attn(q, k, v, pack.starts, pack.starts, longest, longest, window_size=(-1, 0), **grouped)
    assert isinstance(out, Tensor)
    return out


def exact_gradient(qkv: Tensor, pack: DevicePack, upstream: Tensor, products: AttentionProducts) -> Tensor:
    """Of attention in FP64 over the values that the codes stand for; saturated elements get nothing."""
    leaf = torch.cat(head_values(qkv, LAYOUT, SCALES, products), dim=1).flatten(1).double().requires_grad_()
    outputs = []
    for start, end in pack.sequences.spans:
        q, k, v = (x.transpose(0, 1) for x in heads_of(leaf[start:end], LAYOUT))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        unseen = torch.ones(end - start, end - start, dtype=torch.bool, device="cuda").triu(1)
        weights = (q @ k.transpose(1, 2) * LAYOUT.head_dim**-0.5).masked_fill(unseen, -torch.inf).softmax(-1)
        outputs.append((weights @ v).transpose(0, 1).flatten(1))
    (grad,) = torch.autograd.grad(torch.cat(outputs), leaf, upstream.double())
    limits = limits_of(SCALES, products)
    passed = [x.abs() <= limit for x, limit in zip(heads_of(qkv, LAYOUT), limits, strict=True)]
    return grad * torch.cat(passed, dim=1).flatten(1)


@each_product
def test_the_gradient_of_fp8_is_that_of_the_values_its_codes_stand_for(
    qkv: Tensor, pack: DevicePack, upstream: Tensor, products: AttentionProducts
) -> None:
    """Nearly as near to FP64 as FlashAttention's own, whose forward has unrounded weights."""
    form = PackedAttention(FP8_CACHE_FORMS[products], 4096)
    attended = packed_attention(qkv, LAYOUT, pack, form, SCALES)
    found = packed_attention_backward(upstream, qkv, attended.for_backward, LAYOUT, pack, form, SCALES)
    expected = exact_gradient(qkv, pack, upstream, products)
    values = head_values(qkv, LAYOUT, SCALES, products)
    flash = flash_gradients(upstream, values, attention._flash_attention(values, pack), pack)
    theirs = head_gradients(flash, qkv, LAYOUT, SCALES, products)
    errors = [float((x.double() - expected).norm() / expected.norm()) for x in (found, theirs)]
    print(f"relative error of the gradient: {errors[0]:.5f}, with FlashAttention's forward {errors[1]:.5f}")
    assert not found.isnan().any()
    assert 0 < (expected == 0).float().mean() < 0.5
    assert errors[0] < 0.03
