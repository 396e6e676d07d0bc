"""Attention over a KV cache, in the formats of the contract.

FP8 follows FlashAttention 3 on Hopper. Q, K and V have static scales. P is scaled by 256 and quantised to E4M3; its row
sum is taken before that rounding, and is one of fixed-point numbers. Products are exact in FP64. So a token's output is
the same whether it is decoded alone or scored in a full pass, and whatever padding surrounds it.

`fp16_over_fp8_cache` rounds Q and P to FP16; the row sum is that of the rounded P. Q keeps so many bits below the
largest of its row that its product with codes is exact. P is a multiple of 2^-24, so P V is exact for 2,340 keys of the
largest weight and code (2^53 / 2^24 / (448 * 2^9)).

Shapes: q and output [B, H, Tq, d]; k, v [B, H_kv, Tk, d]; mask bool [B, 1, Tq, Tk]. The mask is true where a query may
look, at one key at least. Masked values are finite; the output is FP32."""

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fp8core.numerics import elementwise
from fp8core.numerics.gemm import ordered_gemm, sliced_gemm
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.recipe import AttentionProducts

# Shapes that the decode kernel takes; the group is query heads per KV head.
HEAD_DIMS = (64, 128)
LARGEST_GROUP = 8
QUERY_TYPES: dict[AttentionProducts, torch.dtype] = {"fp8": torch.float8_e4m3fn, "fp16_over_fp8_cache": torch.bfloat16}
"""The types of queries that the kernels take."""


def decode_kernel_takes(head_dim: int, group: int) -> bool:
    return head_dim in HEAD_DIMS and group <= LARGEST_GROUP


_P_RANGE = 256.0
_SUM_BITS = 32
# Of FP64's 53, for Q and the number of terms. A code has the others: it is at most 448 * 2^9 times its last bit.
_PRODUCT_BITS = 35


class AttentionFormat(Protocol):
    name: str

    def store(self, k: Tensor, v: Tensor, scales: LayerScales | None) -> tuple[Tensor, Tensor]: ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scales: LayerScales | None) -> Tensor: ...


class Fp8Attention:
    name = "fp8"

    def store(self, k: Tensor, v: Tensor, scales: LayerScales | None) -> tuple[Tensor, Tensor]:
        assert scales is not None, "FP8 cache without scales: calibrate first"
        return elementwise.to_e4m3_grid(k, scales.k), elementwise.to_e4m3_grid(v, scales.v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scales: LayerScales | None) -> Tensor:
        assert scales is not None, "FP8 attention without scales: calibrate first"
        scores = _scores(elementwise.to_e4m3_grid(q, scales.q), k, mask, scales.q * scales.k)
        p, row_sum = _weights(scores)
        values = _per_query_head(elementwise.to_e4m3_grid(p * _P_RANGE, 1.0), v) * (scales.v / _P_RANGE)
        return elementwise.round_to_bf16(values / row_sum)


class Fp16OverFp8Attention(Fp8Attention):
    name = "fp16_over_fp8_cache"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scales: LayerScales | None) -> Tensor:
        assert scales is not None, "FP8 attention without scales: calibrate first"
        q_fp16 = elementwise.to_fp16_rows(q, _PRODUCT_BITS - (q.shape[-1] - 1).bit_length())
        scores = _scores(q_fp16, k, mask, scales.k)
        p = elementwise.to_fp16(torch.exp(scores - scores.detach().amax(-1, keepdim=True)))
        return elementwise.round_to_bf16(_per_query_head(p, v) * scales.v / p.sum(-1, keepdim=True))


FP8_CACHE_FORMS: dict[str, AttentionFormat] = {"fp8": Fp8Attention(), "fp16_over_fp8_cache": Fp16OverFp8Attention()}


class _NoQuantisation:
    def store(self, k: Tensor, v: Tensor, scales: LayerScales | None) -> tuple[Tensor, Tensor]:
        return k.double(), v.double()


class Bf16Attention(_NoQuantisation):
    """FP64 accumulation; P is rounded to BF16, as FlashAttention does, or as said."""

    name = "bf16"

    def __init__(self, weights: elementwise.Rounding = elementwise.round_to_bf16) -> None:
        self._weights = weights

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scales: LayerScales | None) -> Tensor:
        p, row_sum = _weights(_scores(q.double(), k, mask, 1.0))
        return elementwise.round_to_bf16(_per_query_head(self._weights(p).double(), v) / row_sum)


class _ExactFp32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        batch, heads, queries, dim = q.shape
        q_groups = q.reshape(batch, k.shape[1], -1, dim)
        products = sliced_gemm(q_groups, k).view(batch, heads, queries, -1)
        p, row_sum = _weights((products / math.sqrt(dim)).masked_fill(~mask, -math.inf))
        p_groups = p.reshape(batch, k.shape[1], -1, p.shape[-1])
        ctx.save_for_backward(q, k, v, mask)
        return (ordered_gemm(p_groups, v.double()).view(q.shape) / row_sum).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        with torch.enable_grad():
            q, k, v = (saved.detach().requires_grad_() for saved in ctx.saved_tensors[:3])
            out = Fp32Attention().attend(q, k, v, ctx.saved_tensors[3], None)
        by_q, by_k, by_v = torch.autograd.grad(out, (q, k, v), grad)
        return by_q, by_k, by_v, None


class ExactFp32Attention(_NoQuantisation):
    """No order of summation shows; the backward is that of `Fp32Attention`."""

    name = "fp32"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scales: LayerScales | None) -> Tensor:
        out: Tensor = _ExactFp32.apply(q.double(), k, v, mask)  # type: ignore[no-untyped-call]
        return out


class Fp32Attention(_NoQuantisation):
    """The reference mode: sums run in FP64, in an order that depends on the batch."""

    name = "fp32"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scales: LayerScales | None) -> Tensor:
        p, row_sum = _weights(_scores(q.double(), k, mask, 1.0))
        return elementwise.keep_fp32(_per_query_head(p, v) / row_sum)


def _scores(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
    batch, heads, queries, dim = q.shape
    q_groups = q.reshape(batch, k.shape[1], -1, dim)
    products = (q_groups @ k.transpose(-1, -2)).view(batch, heads, queries, k.shape[2])
    return (products * (scale / math.sqrt(dim))).masked_fill(~mask, -math.inf)


def _weights(scores: Tensor) -> tuple[Tensor, Tensor]:
    """exp(score - row maximum), and its exact row sum."""
    p = torch.exp(scores - scores.detach().amax(-1, keepdim=True))
    return p, elementwise.to_fixed_point(p, _SUM_BITS).sum(-1, keepdim=True)


def _per_query_head(p: Tensor, v: Tensor) -> Tensor:
    batch, heads, queries, keys = p.shape
    return (p.reshape(batch, v.shape[1], -1, keys) @ v).view(batch, heads, queries, v.shape[-1])


class Queries(NamedTuple):
    """Tokens that attend, one of each sequence, and what they attend to; int32.

    block_table: [queries, blocks of the longest]. starts: [queries + 1], the first token of each; one without exactly
    one token is left out. lengths: [queries], the keys each sees, its own counted; 0 gives zeros."""

    block_table: Tensor
    starts: Tensor
    lengths: Tensor


def decode_attention_reference(
    query: Tensor, keys: Tensor, values: Tensor, queries: Queries, scales: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """The result of `kernels.decode_attention` before it is rounded to BF16: FP64 [tokens, heads, head_dim].

    The maximum that P is relative to is rounded up to a power of two, so that moving on to a higher one is exact. The
    row sum is that of the rounded P."""
    q_scale, k_scale, v_scale = (float(scale) for scale in scales)
    in_fp16 = query.dtype == QUERY_TYPES["fp16_over_fp8_cache"]
    # In powers of two.
    factor = (k_scale if in_fp16 else q_scale * k_scale) / math.sqrt(query.shape[-1]) / math.log(2)
    q = elementwise.to_fp16(query) if in_fp16 else query.double()
    group = query.shape[1] // keys.shape[2]
    out = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    for i, length in enumerate(queries.lengths.tolist()):
        if length == 0:
            continue
        blocks = queries.block_table[i, : -(-length // keys.shape[1])].long()
        k, v = (x[blocks].flatten(0, 1)[:length].double().repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("hd,khd->hk", q[i], k) * factor
        p = torch.exp2(scores - scores.amax(-1, keepdim=True).ceil()) * _P_RANGE
        p = elementwise.to_fp16(p) if in_fp16 else elementwise.to_e4m3_grid(p, 1.0)
        out[i] = torch.einsum("hk,khd->hd", p, v) * v_scale / p.sum(-1, keepdim=True)
    return out
