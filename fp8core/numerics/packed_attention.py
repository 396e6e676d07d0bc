"""Causal attention over packed sequences, in the formats of `numerics.attention`.

BF16 on a GPU is FlashAttention, as torch brings it for sequences of different lengths. FP8 on a GPU computes what the
rollout engine computes when it decodes: every token is a query of its own to `numerics.decode_attention`, whose result
depends on nothing but the keys before it. Its gradient is that of BF16 attention over the values that the codes stand
for (a straight-through estimator: E4M3 rounding of Q, K, V and P is passed through, saturated elements get nothing).

On a CPU both are the exact forms of `numerics.attention`, one sequence at a time.

Shapes: qkv BF16 [tokens, (query_heads + 2 kv_heads) * head_dim], normed and rotated; output BF16
[tokens, query_heads * head_dim].
"""

from functools import cache, lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from fp8core.numerics.attention import AttentionFormat, Bf16Attention, Fp8Attention
from fp8core.numerics.decode_attention import HEAD_DIM, LARGEST_GROUP, DecodeAttention, Queries
from fp8core.numerics.e4m3 import E4M3_MAX
from fp8core.numerics.fused_rotary import HeadLayout
from fp8core.numerics.kernel_choice import has_kernels
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.packed_sequences import PAGE, PackedSequences

# What the kernel's workspace for long sequences is made for.
_QUERIES_AT_ONCE = 8192

Heads = tuple[Tensor, Tensor, Tensor]
"""Q [tokens, query_heads, head_dim], K and V [tokens, kv_heads, head_dim]."""


class PackedAttention(Protocol):
    """How one format attends."""

    name: str

    def __call__(self, qkv: Tensor, layout: HeadLayout, pack: "DevicePack", scales: LayerScales | None) -> Tensor: ...


class DevicePack(NamedTuple):
    """A pack with what kernels read of it, on their device.

    Attributes:
        sequences: where each lies.
        positions: int64 [tokens].
        starts: int32 [sequences + 1].
        owners: int32 [tokens]: the sequence of each token.
        pages: int32 [sequences, pages of the longest]: which page of the pack holds keys 16 i and after.
        seen: int32 [tokens]: keys that each token sees, itself included; 0 where the pack is filled up.
    """

    sequences: PackedSequences
    positions: Tensor
    starts: Tensor
    owners: Tensor
    pages: Tensor
    seen: Tensor

    @classmethod
    def of(cls, sequences: PackedSequences, device: torch.device) -> "DevicePack":
        starts = torch.tensor(sequences.starts, dtype=torch.int32)
        pages = starts[:-1, None] // PAGE + torch.arange(-(-sequences.longest // PAGE), dtype=torch.int32)
        # Rows of shorter sequences run on into pages that nobody asks them for.
        pages = pages.clamp(max=sequences.tokens // PAGE - 1)
        seen = torch.where(sequences.valid, sequences.offsets + 1, 0).int()
        tensors = sequences.positions, starts, sequences.owners.int(), pages, seen
        return cls(sequences, *(tensor.to(device, non_blocking=True) for tensor in tensors))


class Bf16PackedAttention:
    """BF16 Q, K, V and P."""

    name = "bf16"

    def __init__(self, exact: Bf16Attention) -> None:
        self._exact = exact

    def __call__(self, qkv: Tensor, layout: HeadLayout, pack: DevicePack, scales: LayerScales | None) -> Tensor:
        if not has_kernels(qkv):
            return _one_by_one(self._exact, qkv, layout, pack.sequences, None)
        return _flash_attention(*heads_of(qkv, layout), pack).flatten(1)


class Fp8PackedAttention:
    """E4M3 Q, K, V and P with static scales; `longest` is the longest request of the engine whose result it is."""

    name = "fp8"

    def __init__(self, longest: int) -> None:
        self._longest = longest

    def __call__(self, qkv: Tensor, layout: HeadLayout, pack: DevicePack, scales: LayerScales | None) -> Tensor:
        assert scales is not None, "FP8 attention without scales: calibrate first"
        if not has_kernels(qkv):
            return _one_by_one(Fp8Attention(), qkv, layout, pack.sequences, scales)
        assert max(pack.sequences.lengths) <= self._longest, "a sequence is longer than the engine's longest request"
        out: Tensor = _Fp8Attention.apply(*heads_of(qkv, layout), pack, scales, self._longest)  # type: ignore[no-untyped-call]
        return out


class _Fp8Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, pack: DevicePack, scales: LayerScales, longest: int
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.pack, ctx.scales = pack, scales
        return _as_queries(q, k, v, pack, scales, longest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        given = ctx.saved_tensors
        scales = ctx.scales.q, ctx.scales.k, ctx.scales.v
        with torch.enable_grad():
            stood_for = [_dequantised(x, scale).requires_grad_() for x, scale in zip(given, scales, strict=True)]
            q, k, v = stood_for
            out = _flash_attention(q, k, v, ctx.pack)
        grads = torch.autograd.grad(out, stood_for, grad.view_as(out))
        kept = [g * (x.abs() <= E4M3_MAX * s) for g, x, s in zip(grads, given, scales, strict=True)]
        return (*kept, None, None, None)


def heads_of(qkv: Tensor, layout: HeadLayout) -> Heads:
    """Q, K and V by head: views of [tokens, all heads * head_dim]."""
    heads = qkv.view(qkv.shape[0], -1, layout.head_dim)
    q, k, v = heads.split([layout.query_heads, layout.kv_heads, layout.kv_heads], dim=1)
    return q, k, v


def static_codes(x: Tensor, scale: float) -> Tensor:
    """float8_e4m3fn codes of x / scale, saturated; any shape, contiguous."""
    # Divided by a tensor: torch multiplies by the reciprocal of a number on a GPU, which is another rounding.
    divided = x.float() / _scalar(scale, x.device)
    return divided.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn, memory_format=torch.contiguous_format)


def _flash_attention(q: Tensor, k: Tensor, v: Tensor, pack: DevicePack) -> Tensor:
    longest = pack.sequences.longest
    out = varlen_attn(q, k, v, pack.starts, pack.starts, longest, longest, window_size=(-1, 0))
    assert isinstance(out, Tensor)
    return out


def _dequantised(x: Tensor, scale: float) -> Tensor:
    """The values that codes stand for, BF16: exact for scales that are powers of two."""
    return (static_codes(x, scale).float() * scale).bfloat16()


def _as_queries(q: Tensor, k: Tensor, v: Tensor, pack: DevicePack, scales: LayerScales, longest: int) -> Tensor:
    """Every token as a query of its own over a pack that is its own paged cache."""
    query, key, value = (static_codes(x, s) for x, s in zip((q, k, v), (scales.q, scales.k, scales.v), strict=True))
    keys, values = (codes.view(-1, PAGE, *codes.shape[1:]) for codes in (key, value))
    each = torch.arange(len(query) + 1, dtype=torch.int32, device=q.device)
    out = torch.empty_like(query, dtype=torch.bfloat16)
    attention = _decode_attention(q.device, k.shape[1], q.shape[1] // k.shape[1], longest)
    scalars = (_scalar(scales.q, q.device), _scalar(scales.k, q.device), _scalar(scales.v, q.device))
    attention(query, keys, values, Queries(pack.pages, pack.owners, each, pack.seen), scalars, out)
    return out.flatten(1)


@cache
def _decode_attention(device: torch.device, kv_heads: int, group: int, longest: int) -> DecodeAttention:
    """One kernel and workspace for all layers, which run one after the other."""
    shape = torch.Size((1, PAGE, kv_heads, HEAD_DIM))
    strides = (PAGE * kv_heads * HEAD_DIM, kv_heads * HEAD_DIM, HEAD_DIM, 1)
    return DecodeAttention(device, shape, strides, group, longest, _QUERIES_AT_ONCE, tokens=LARGEST_GROUP // group)


@lru_cache(maxsize=4096)
def _scalar(value: float, device: torch.device) -> Tensor:
    """FP32 scalar on a device: copying one there waits for it."""
    return torch.tensor(value, device=device)


def _one_by_one(
    form: AttentionFormat, qkv: Tensor, layout: HeadLayout, sequences: PackedSequences, scales: LayerScales | None
) -> Tensor:
    outputs = []
    for start, end in sequences.spans:
        q, k, v = (part.transpose(0, 1)[None].float() for part in heads_of(qkv[start:end], layout))
        mask = torch.ones(end - start, end - start, dtype=torch.bool).tril()[None, None]
        out = form.attend(q, *form.store(k, v, scales), mask, scales)
        outputs.append(out[0].transpose(0, 1).flatten(1))
    return torch.cat(outputs).bfloat16()
