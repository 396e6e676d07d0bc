"""Attention to packed sequences on Hopper: the engine's, over an FP8 cache, and FlashAttention in BF16.

The backward of both is `attention_backward`'s, from the output and the log-sum-exp of the forward.
"""

from collections.abc import Sequence
from functools import cache, lru_cache

import torch
from torch import Tensor

from fp8core.kernels.attention_backward import attention_gradients
from fp8core.kernels.sequence_attention import Batch, SequenceAttention, Span, batches
from fp8core.numerics.attention import QUERY_TYPES
from fp8core.numerics.fused import HeadLayout, Heads, head_codes, head_gradients, head_values, heads_of
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.packed import (
    PAGE,
    AttentionOutput,
    AttentionPack,
    DevicePack,
    PackedAttention,
    PackedSequences,
)
from fp8core.numerics.recipe import AttentionProducts


def packed_attention(
    qkv: Tensor, layout: HeadLayout, pack: AttentionPack, form: PackedAttention, scales: LayerScales | None
) -> AttentionOutput:
    if form.exact.name in QUERY_TYPES:
        assert scales is not None, "FP8 attention without scales: calibrate first"
        return fp8_attention(qkv, layout, pack, scales, form.exact.name, form.longest)
    assert form.exact.name == "bf16", form.exact.name
    q, k, v = heads_of(qkv, layout)
    k, v = (pack.gathered(x) for x in (k, v))
    results = [_flash_attention((q[rows], k[keys], v[keys]), part) for rows, keys, part in pack.parts]
    outs, logsumexps = zip(*results, strict=True)
    out = _joined(outs).flatten(1)
    return AttentionOutput(out, (out, _joined(logsumexps, 1)))


def packed_attention_backward(
    grad: Tensor,
    qkv: Tensor,
    saved: tuple[Tensor, ...],
    layout: HeadLayout,
    pack: AttentionPack,
    form: PackedAttention,
    scales: LayerScales | None,
) -> Tensor:
    if form.exact.name in QUERY_TYPES:
        assert scales is not None
        products = form.exact.name
        grads = _gradients(grad, head_values(qkv, layout, scales, products), saved, pack)
        return head_gradients(grads, qkv, layout, scales, products)
    return torch.cat(_gradients(grad, heads_of(qkv, layout), saved, pack), dim=1).flatten(1)


def fp8_attention(
    qkv: Tensor,
    layout: HeadLayout,
    pack: AttentionPack,
    scales: LayerScales,
    products: AttentionProducts,
    longest: int,
) -> AttentionOutput:
    """The result of the engine's decode kernel for every token of a pack, which is its own paged cache."""
    query, key, value = head_codes(qkv, layout, scales, products)
    keys, values = (pack.gathered(codes).view(-1, PAGE, *codes.shape[1:]) for codes in (key, value))
    group = layout.query_heads // layout.kv_heads
    # Filling has no attention, and no weights in the backward.
    out = torch.zeros(query.shape, dtype=torch.bfloat16, device=qkv.device)
    logsumexp = torch.full((layout.query_heads, len(query)), torch.inf, device=qkv.device)
    of_all = tuple(_scalar(scale, qkv.device) for scale in (scales.q, scales.k, scales.v))
    attention = _sequence_attention(qkv.device, layout, longest, products)
    for rows, seen, part in pack.parts:
        pages = slice(None if seen.start is None else seen.start // PAGE, None)
        work = _work(part.sequences, part.prefix, group, longest, qkv.device)
        attention(query[rows], keys[pages], values[pages], part.pages, work, of_all, out[rows], logsumexp[:, rows])
    flat = out.flatten(1)
    return AttentionOutput(flat, (flat, logsumexp))


def _gradients(grad: Tensor, heads: Heads, saved: tuple[Tensor, ...], pack: AttentionPack) -> Heads:
    """Of own Q, K and V, BF16. Sums over queries of several parts and processes are FP32."""
    out, logsumexp = saved
    q, k, v = heads
    all_keys, all_values = (pack.gathered(x) for x in (k, v))
    of_parts = [
        attention_gradients(
            grad[rows], (q[rows], all_keys[keys], all_values[keys]), (out[rows], logsumexp[:, rows]), part
        )
        for rows, keys, part in pack.parts
    ]
    of_query, *of_both = zip(*of_parts, strict=True)
    of_key, of_value = (pack.summed(_by_key(parts, pack, len(all_keys))).to(k.dtype) for parts in of_both)
    return _joined(of_query), of_key, of_value


def _by_key(gradients: Sequence[Tensor], pack: AttentionPack, tokens: int) -> Tensor:
    if len(gradients) == 1:
        return gradients[0]
    total = torch.zeros(tokens, *gradients[0].shape[1:], device=gradients[0].device)
    for gradient, part in zip(gradients, pack.parts, strict=True):
        total[part.keys] += gradient
    return total


def _joined(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)


def _flash_attention(heads: Heads, pack: DevicePack) -> tuple[Tensor, Tensor]:
    """BF16 [tokens, query_heads, head_dim], and log-sum-exp FP32 [query_heads, tokens]."""
    # `torch.nn.attention.varlen` calls this operation. Its own functions change from version to version, and their
    # backward is tied to their forward, whose result may be there already.
    out, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
        *heads, *_bounds(pack), 0.0, True, False, window_size_left=-1, window_size_right=0
    )
    return out, logsumexp


def _bounds(pack: DevicePack) -> tuple[Tensor, Tensor, int, int]:
    return pack.query_starts, pack.starts, pack.longest_query, pack.sequences.longest


@cache
def _sequence_attention(
    device: torch.device, layout: HeadLayout, longest: int, products: AttentionProducts
) -> SequenceAttention:
    query_heads, kv_heads, head_dim = layout
    strides = (PAGE * kv_heads * head_dim, kv_heads * head_dim, head_dim, 1)
    shape = torch.Size((1, PAGE, kv_heads, head_dim))
    return SequenceAttention(device, shape, strides, query_heads // kv_heads, longest, products)


@lru_cache(maxsize=8)
def _work(sequences: PackedSequences, prefix: int, group: int, longest: int, device: torch.device) -> list[Batch]:
    """Once for all layers and for the backward's pass. The first `prefix` tokens have no queries."""
    firsts = [
        (max(start, prefix), start + length, length)
        for start, length in zip(sequences.starts, sequences.lengths, strict=False)
    ]
    spans = [Span(first - prefix, end - first, keys) for first, end, keys in firsts]
    return batches(spans, group, longest, device)


@lru_cache(maxsize=4096)
def _scalar(value: float, device: torch.device) -> Tensor:
    """FP32: copying one to a device waits for it."""
    return torch.tensor(value, device=device)
