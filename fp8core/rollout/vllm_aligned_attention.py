"""Attention of the aligned model: every token of a step, of prompts too, goes through `numerics.decode_attention`.

vLLM lays out and writes the cache as for FlashAttention, and says by request what is new; here each new token becomes a
query of its own. A decode step is captured in a CUDA graph, so what it reads lies in tensors that stay: vLLM's own, and
numbers in ascending order. A step with prompts runs eagerly.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

from fp8core.numerics.decode_attention import LARGEST_GROUP, Queries, token_queries
from fp8core.rollout.vllm_decode import DecodeBackend, SharedKernel, ascending, largest_decode_batch

# Tokens of prompts that attend at once; the workspace of long ones grows with it.
_PROMPT_TOKENS = 2048


class AlignedBackend(DecodeBackend):
    """FlashAttention's cache with another builder and implementation."""

    @staticmethod
    def get_impl_cls() -> type["AlignedImpl"]:
        """What layers are built with."""
        return AlignedImpl

    @staticmethod
    def get_builder_cls() -> type["AlignedBuilder"]:
        """What turns a step's requests into queries."""
        return AlignedBuilder


@dataclass
class StepQueries(AttentionMetadata):
    """What the layers of a step are told; in a decode step every request has one token."""

    queries: Queries
    decodes: bool


class AlignedBuilder(AttentionMetadataBuilder[StepQueries]):
    """From a step's requests to queries, once for all layers."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # Numbers are made in `build`: what is allocated here, vLLM's sleep takes away with the cache.
        self._largest = largest_decode_batch(vllm_config)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> StepQueries:
        """Of a decode step, request i has token i; requests that pad a captured graph have length 0."""
        step = common_attn_metadata
        if step.max_query_len == 1:
            numbers = ascending(self.device, self._largest + 1)[: len(step.seq_lens) + 1]
            return StepQueries(Queries(step.block_table_tensor, numbers[:-1], numbers, step.seq_lens), True)
        requests = step.block_table_tensor, step.query_start_loc, step.seq_lens
        return StepQueries(token_queries(*requests, step.num_actual_tokens), False)


class AlignedImpl(FlashAttentionImpl):
    """One layer; FlashAttention's part is to write the cache."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._decode = SharedKernel(self, largest_decode_batch(get_current_vllm_config()))
        # The same bits; tokens side by side mostly are of one prompt.
        self._prompts = SharedKernel(self, _PROMPT_TOKENS, tokens=LARGEST_GROUP // self.num_queries_per_kv)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: StepQueries | None,
        output: Tensor,
        *rest: Any,
        **more: Any,
    ) -> Tensor:
        """As FlashAttention's, whose arguments these are; zeros when vLLM measures memory, before there is a cache."""
        if attn_metadata is None:
            return output.fill_(0)
        kernel = self._decode if attn_metadata.decodes else self._prompts
        kernel(layer, query, kv_cache, attn_metadata.queries, output)
        return output
