"""FlashAttention 3 for prompts and `kernels.decode_attention` for decode steps, as an attention backend of vLLM."""

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl

from fp8core.kernels.decode_attention import shared_decode_attention
from fp8core.numerics.attention import Queries
from fp8core.numerics.recipe import AttentionProducts


class DecodeBackend(FlashAttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["DecodeImpl"]:
        return DecodeImpl


class SharedKernel:
    """The kernel as layers of one engine call it: compiled and given its workspace when vLLM warms up."""

    def __init__(self, implementation: FlashAttentionImpl, queries: int, products: AttentionProducts) -> None:
        self._heads = implementation.num_heads
        self._size = implementation.head_size
        self._group = implementation.num_queries_per_kv
        self._longest = get_current_vllm_config().model_config.max_model_len
        self._queries = queries
        self._products = products

    def __call__(self, layer: Any, query: Tensor, kv_cache: Tensor, queries: Queries, output: Tensor) -> None:
        """Attention of one layer, with its scales; query and output are [tokens, heads * head_size] or split."""
        keys, values = keys_and_values(kv_cache, self._size)
        layout = keys.device, keys.shape, keys.stride()
        attention = shared_decode_attention(*layout, self._group, self._longest, self._queries, self._products)
        heads = (-1, self._heads, self._size)
        scales = (layer._q_scale, layer._k_scale, layer._v_scale)
        attention(query.view(heads), keys, values, queries, scales, output.view(heads))


def largest_decode_batch(config: Any) -> int:
    """Requests of the largest decode step under a `VllmConfig`; a captured graph is padded to its own size."""
    requests = config.scheduler_config.max_num_seqs
    largest_graph = config.compilation_config.max_cudagraph_capture_size
    return max(int(requests), int(largest_graph or 0))


class DecodeImpl(FlashAttentionImpl):
    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._requests = largest_decode_batch(get_current_vllm_config())
        self._kernel = SharedKernel(self, self._requests, "fp8")

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *rest: Any,
        **more: Any,
    ) -> Tensor:
        """As FlashAttention's. It computes a step with prompts first, so that decodes do not depend on these."""
        # vLLM 0.32 has no cascade attention any more.
        cascades = getattr(attn_metadata, "use_cascade", False)
        if attn_metadata is None or attn_metadata.max_query_len > 1 or cascades:
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *rest, **more)
        if attn_metadata is not None:
            lengths = attn_metadata.seq_lens
            queries = Queries(attn_metadata.block_table, attn_metadata.query_start_loc, lengths)
            self._kernel(layer, query, kv_cache, queries, output)
        return output


def keys_and_values(cache: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """E4M3 [blocks, page, kv_heads, head_size] views of values beside keys."""
    keys, values = cache.view(torch.float8_e4m3fn).transpose(1, 2).split(head_size, dim=-1)
    return keys, values
