"""Attention over packed sequences and RMSNorm in plain torch, for Megatron's local layers on a CPU.

Megatron's own `DotProductAttention` takes no packed sequences and needs a GPU for its scratch memory; its own norm
knows neither BF16 weights nor sequence parallelism.
"""

import math
from itertools import pairwise
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


class PackedAttention(torch.nn.Module):
    """Takes the constructor and the call of Megatron's core attention (`transformer.attention.CoreAttention`)."""

    def __init__(self, config: Any, layer_number: int, *_: Any, **__: Any) -> None:
        super().__init__()
        self._scale = 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: None, packed_seq_params: PackedSeqParams, **_: Any
    ) -> Tensor:
        """[T, heads, d], [T, KV heads, d] twice to [T, heads, d]; a token sees those before it in its sequence."""
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        parts = [self._attend(*(x[start:end] for x in (query, key, value))) for start, end in pairwise(bounds)]
        return torch.cat(parts)

    def _attend(self, *qkv: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in qkv)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self._scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)


class LocalNorm(torch.nn.RMSNorm):
    """Takes the constructor of Megatron's norms."""

    def __init__(self, config: Any, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        # Each GPU of the group normalises other tokens, so that Megatron adds up the gradients.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 - no such attribute declared
