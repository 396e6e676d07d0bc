"""Packed attention with its kernels, beside torch's own functions and FP64."""

import inspect
from collections.abc import Callable

import pytest
import torch
from thread_ranks import on_threads
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from fp8core.kernels import attention
from fp8core.kernels.attention_backward import flash_gradients
from fp8core.numerics.attention import FP8_CACHE_FORMS, QUERY_TYPES, AttentionFormat, Bf16Attention
from fp8core.numerics.fused import HeadLayout, head_gradients, head_values, heads_of, limits_of
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.packed import (
    AttentionPack,
    DevicePack,
    PackedAttention,
    PackedSequences,
    packed_attention,
    packed_attention_backward,
)
from fp8core.numerics.recipe import AttentionProducts
from fp8core.training.packed.context import PackChunks, pack_multiple
from fp8core.training.ranks import Ranks

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


@pytest.mark.parametrize("form", [Bf16Attention(), *FP8_CACHE_FORMS.values()], ids=lambda form: form.name)
@pytest.mark.parametrize("lengths", [[700, 1, 33, 1300], [9000, 40]], ids=["several", "long"])
def test_ranks_that_share_a_pack_attend_to_the_bytes_of_one(lengths: list[int], form: AttentionFormat) -> None:
    sequences, device = PackedSequences.of(lengths, pack_multiple(4)), torch.device("cuda")
    generator = torch.Generator().manual_seed(0)
    widths = 48 * 128, 32 * 128
    qkv, upstream = (torch.randn(sequences.tokens, width, generator=generator).bfloat16() for width in widths)
    upstream[~sequences.valid] = 0
    attention = PackedAttention(form, 16384)

    def attended(pack: AttentionPack, qkv: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
        out, saved = packed_attention(qkv, LAYOUT, pack, attention, SCALES)
        return out, packed_attention_backward(upstream, qkv, saved, LAYOUT, pack, attention, SCALES)

    expected = attended(DevicePack.of(sequences, device), qkv.cuda(), upstream.cuda())

    def act(ranks: Ranks) -> list[tuple[Tensor, Tensor]]:
        chunks = PackChunks(sequences, ranks, device)
        found = attended(chunks, *(chunks.own(each).cuda() for each in (qkv, upstream)))
        real = chunks.own(sequences.valid).cuda()
        return [(each[real], chunks.own(whole)[real]) for each, whole in zip(found, expected, strict=True)]

    for (out, whole_out), (gradient, whole) in on_threads(4, act):
        assert torch.equal(out, whole_out)
        error = float((gradient.double() - whole.double()).norm() / whole.double().norm())
        print(f"relative difference of the gradient: {error:.5f}")
        assert error < 0.01
