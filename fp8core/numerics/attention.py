"""Attention over a KV cache, in the formats of the contract.

FP8 follows FlashAttention 3 on Hopper: Q, K and V are quantised per tensor with static scales, P is scaled by 256
and quantised to E4M3, and its row sum is taken before that rounding. Both products are exact in FP64 (see
`numerics.gemm`) and the row sum is a sum of fixed-point numbers, so a token's output is the same whether it is
decoded alone or scored in a full pass, and whatever padding surrounds it.

Shapes: q [B, H, Tq, d]; k, v [B, H_kv, Tk, d]; mask bool [B, 1, Tq, Tk], True where a query may look; every query
must be allowed at least one key, and what is masked must be finite too. Output FP32 [B, H, Tq, d].
"""

import math
from typing import Protocol

import torch
from torch import Tensor

from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.rounding import Rounding, keep_fp32, round_to_bf16, to_e4m3_grid, to_fixed_point

_P_RANGE = 256.0
_SUM_BITS = 32


class AttentionFormat(Protocol):
    """What is stored in the cache and how it is attended to."""

    name: str

    def store(self, k: Tensor, v: Tensor, scales: LayerScales | None) -> tuple[Tensor, Tensor]:
        """K and V as the cache holds them."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scales: LayerScales | None) -> Tensor:
        """Attention of fresh queries over stored K and V."""
        ...


class Fp8Attention:
    """E4M3 cache and E4M3 products with calibrated per-tensor scales."""

    name = "fp8"

    def store(self, k: Tensor, v: Tensor, scales: LayerScales | None) -> tuple[Tensor, Tensor]:
        assert scales is not None, "FP8 cache without scales: calibrate first"
        return to_e4m3_grid(k, scales.k), to_e4m3_grid(v, scales.v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scales: LayerScales | None) -> Tensor:
        assert scales is not None, "FP8 attention without scales: calibrate first"
        scores = _scores(to_e4m3_grid(q, scales.q), k, mask, scales.q * scales.k)
        p, row_sum = _weights(scores)
        values = _per_query_head(to_e4m3_grid(p * _P_RANGE, 1.0), v) * (scales.v / _P_RANGE)
        return round_to_bf16(values / row_sum)


class Bf16Attention:
    """BF16 cache, FP64 accumulation; P is rounded to BF16, as FlashAttention does, or as said."""

    name = "bf16"

    def __init__(self, weights: Rounding = round_to_bf16) -> None:
        self._weights = weights

    def store(self, k: Tensor, v: Tensor, scales: LayerScales | None) -> tuple[Tensor, Tensor]:
        return k.double(), v.double()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scales: LayerScales | None) -> Tensor:
        p, row_sum = _weights(_scores(q.double(), k, mask, 1.0))
        return round_to_bf16(_per_query_head(self._weights(p).double(), v) / row_sum)


class Fp32Attention:
    """The reference mode: nothing is rounded below FP32."""

    name = "fp32"

    def store(self, k: Tensor, v: Tensor, scales: LayerScales | None) -> tuple[Tensor, Tensor]:
        return k.double(), v.double()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scales: LayerScales | None) -> Tensor:
        p, row_sum = _weights(_scores(q.double(), k, mask, 1.0))
        return keep_fp32(_per_query_head(p, v) / row_sum)


def _scores(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Scaled scores, FP64 [B, H, Tq, Tk], minus infinity where masked."""
    batch, heads, queries, dim = q.shape
    grouped = q.reshape(batch, k.shape[1], -1, dim)
    products = (grouped @ k.transpose(-1, -2)).view(batch, heads, queries, k.shape[2])
    return (products * (scale / math.sqrt(dim))).masked_fill(~mask, -math.inf)


def _weights(scores: Tensor) -> tuple[Tensor, Tensor]:
    """exp(score - row maximum) and its row sum, which is exact because its terms are fixed-point."""
    p = torch.exp(scores - scores.detach().amax(-1, keepdim=True))
    return p, to_fixed_point(p, _SUM_BITS).sum(-1, keepdim=True)


def _per_query_head(p: Tensor, v: Tensor) -> Tensor:
    """P @ V for grouped-query attention: [B, H, Tq, Tk] and [B, H_kv, Tk, d] to [B, H, Tq, d]."""
    batch, heads, queries, keys = p.shape
    return (p.reshape(batch, v.shape[1], -1, keys) @ v).view(batch, heads, queries, v.shape[-1])
