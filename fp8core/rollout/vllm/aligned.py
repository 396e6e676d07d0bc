"""Models of vLLM that compute with the functions that train, so that both sides have the same log-probs bit for bit.

The modules are those of vLLM's own Llama, Qwen2, Qwen3 and Qwen3-MoE; the forward is ours (`fp8core.rollout.aligned`).

Requests with one new token go through `kernels.decode_attention`, those with more through `kernels.sequence_attention`,
which has the same bytes. A decode step is captured in a CUDA graph, so it reads only vLLM's own tensors and numbers in
ascending order, which stay. With drafts (`speculation`) each row is a query of the former, also those of short prompts.

GPUs that share a layer (tensor parallelism) have rows of each linear, expert and of the head, and heads of their own.
Each has the whole router. A sum is never cut: what the next product reads is put together from all of them, as codes or
rounded results. So one GPU and several have equal bytes.

Importing this module gives vLLM the attention that belongs to these models.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from fp8core.kernels.sequence_attention import Batch, Span, batches, shared_sequence_attention
from fp8core.numerics.attention import Queries
from fp8core.numerics.e4m3 import Codes
from fp8core.numerics.fused import HeadLayout
from fp8core.numerics.grouped import Operand
from fp8core.numerics.logprobs import log_softmax
from fp8core.numerics.packed import head_logits
from fp8core.numerics.support import truncated
from fp8core.numerics.truncation import Truncation
from fp8core.rollout.aligned import AlignedDecoder, aligned_recipe, decoder_of
from fp8core.rollout.vllm import internals
from fp8core.rollout.vllm.decode import DecodeBackend, SharedKernel, keys_and_values, largest_decode_batch

# FP32 scales of a column that begins on 16 bytes, as TMA reads it.
_SCALE_PITCH = 4


class AlignedBackend(DecodeBackend):
    @staticmethod
    def get_impl_cls() -> type["AlignedImpl"]:
        return AlignedImpl

    @staticmethod
    def get_builder_cls() -> type["AlignedBuilder"]:
        return AlignedBuilder


@dataclass
class StepQueries(AttentionMetadata):
    """`decodes`: requests with one new token, or rows of drafts; `prompts`: those with more, by `block_table`."""

    decodes: Queries
    prompts: list[Batch]
    block_table: Tensor


class AlignedBuilder(AttentionMetadataBuilder[StepQueries]):
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        model = vllm_config.model_config
        parallel = vllm_config.parallel_config
        self._group = model.get_num_attention_heads(parallel) // model.get_num_kv_heads(parallel)
        self._longest = model.max_model_len
        # Numbers are made in `build`: what is allocated here, vLLM's sleep takes away with the cache.
        self._largest = largest_decode_batch(vllm_config)
        self._draft = vllm_config.num_speculative_tokens

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        """With drafts each row is a query of its own, so a captured graph may have any requests in it."""
        return AttentionCGSupport.ALWAYS if vllm_config.num_speculative_tokens else cls._cudagraph_support

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> StepQueries:
        """In a decode step, request i has token i; requests that pad a captured graph have length 0."""
        step = common_attn_metadata
        if self._draft:
            return self._build_rows(step)
        if step.max_query_len == 1:
            starts = _ascending(self.device, self._largest + 1)[: len(step.seq_lens) + 1]
            return _queries(step, starts, [])
        return _queries(step, step.query_start_loc, self._prompts(_spans(step, 1)))

    def _build_rows(self, step: Any) -> StepQueries:
        """Rows as queries: the host has no more than an upper bound on the length of a request with a draft.

        vLLM sorts requests by their rows, but for those with the longest draft, which come first. So those with more
        rows than a draft are the last. They are prompts, of which the host has the length.
        """
        rows, prompts = step.num_actual_tokens, list[Batch]()
        if rows > self._largest:
            spans = _spans(step, 1 + self._draft)
            rows = next((span.row for span in spans if span.tokens), rows)
            prompts = self._prompts(spans)
        columns = step.block_table_tensor.shape[1]
        queries = _shared_rows(self.device, self._largest, columns)
        if rows > self._largest:
            queries = _rows(self.device, rows, columns)
        table, starts, lengths = (each[: rows + i] for each, i in zip(queries, (0, 1, 0), strict=True))
        fill_rows(step, starts[:-1], table, lengths)
        return StepQueries(Queries(table, starts, lengths), prompts, step.block_table_tensor)

    def _prompts(self, spans: Sequence[Span]) -> list[Batch]:
        return batches(spans, self._group, self._longest, self.device)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> StepQueries:
        """A captured step with prompts has no attention in it: attention runs between the graphs."""
        step = common_attn_metadata
        if step.max_query_len == 1 or self._draft:
            return self.build(0, step)
        return _queries(step, step.query_start_loc, [])


class AlignedImpl(FlashAttentionImpl):
    """One layer; FlashAttention's part is to write the cache."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        config = get_current_vllm_config()
        self.products = aligned_recipe(config.model_config.hf_config).attention
        # vLLM gives codes of Q where this is true, and Q where it is not.
        self.supports_quant_query_input = self.products == "fp8"
        self._decode = SharedKernel(self, largest_decode_batch(config), self.products)
        self._longest = config.model_config.max_model_len

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
        self._decode(layer, query, kv_cache, attn_metadata.decodes, output)
        if attn_metadata.prompts:
            keys, values = keys_and_values(kv_cache, self.head_size)
            layout = keys.device, keys.shape, keys.stride()
            kernel = shared_sequence_attention(*layout, self.num_queries_per_kv, self._longest, self.products)
            split = (-1, self.num_heads, self.head_size)
            table = attn_metadata.block_table
            scales = (layer._q_scale, layer._k_scale, layer._v_scale)
            kernel(query.view(split), keys, values, table, attn_metadata.prompts, scales, output.view(split))
        return output


@cache
def _ascending(device: torch.device, count: int) -> Tensor:
    """int32 0, 1, ...; it stays where it is, for captured graphs."""
    return torch.arange(count, dtype=torch.int32, device=device)


def _rows(device: torch.device, count: int, columns: int) -> Queries:
    numbers = torch.arange(count + 1, dtype=torch.int32, device=device)
    return Queries(numbers.new_empty(count, columns), numbers, numbers.new_empty(count))


_shared_rows = cache(_rows)
"""They stay where they are, for captured graphs."""


def fill_rows(step: Any, rows: Tensor, table: Tensor, lengths: Tensor) -> None:
    """Write to `table` the block table's row of the request of each row, and to `lengths` the keys that it sees."""
    ends = step.query_start_loc[1:]
    owners = torch.searchsorted(ends, rows, right=True).clamp_(max=len(ends) - 1)
    torch.index_select(step.block_table_tensor, 0, owners, out=table)
    # Rows that pad a captured graph are beyond all requests.
    torch.mul(step.seq_lens[owners] - (ends[owners] - 1 - rows), rows < ends[-1], out=lengths)


def _spans(step: Any, short: int) -> list[Span]:
    """Of all requests, without the rows of those with up to `short` of them; a read from the device would wait."""
    starts = step.query_start_loc_cpu.tolist()
    keys = step.seq_lens_cpu_upper_bound.tolist()
    sizes = [end - start for start, end in pairwise(starts)]
    return [Span(start, size if size > short else 0, n) for start, size, n in zip(starts, sizes, keys, strict=False)]


def _queries(step: Any, starts: Tensor, prompts: list[Batch]) -> StepQueries:
    return StepQueries(Queries(step.block_table_tensor, starts, step.seq_lens), prompts, step.block_table_tensor)


register_backend(AttentionBackendEnum.CUSTOM, "fp8core.rollout.vllm.aligned.AlignedBackend")


class AlignedForward(AlignedDecoder):
    lm_head: Any
    judge: Any = None
    temperature: float = 1.0
    truncation: Truncation | None = None

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config.hf_config
        arch = decoder_of(config)
        _, self._ranks = internals.layer_share()
        for index, layer in enumerate(self.model.layers):
            down = self._down(layer.mlp) if index in arch.sparse_layers else layer.mlp.down_proj.parameters()
            for parameter in (*layer.self_attn.o_proj.parameters(), *down):
                # vLLM has made room for columns of every row; rows of all columns take as much.
                *experts, rows, _ = parameter.shape
                parameter.data = parameter.data.view(*experts, rows // self._ranks, -1)
        heads = arch.num_heads // self._ranks
        kv_heads = arch.num_kv_heads // self._ranks
        self.prepare(config, HeadLayout(heads, kv_heads, arch.head_dim), self.lm_head.weight.device)

    @staticmethod
    def get_model_state_cls() -> type:
        """Of vLLM's second runner alone, so imported there."""
        from fp8core.rollout.vllm.speculation import AlignedState

        return AlignedState

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: object = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        assert intermediate_tensors is None, "an aligned model is not split into stages"
        assert inputs_embeds is None, "an aligned model reads tokens"
        return self.hidden(input_ids, positions, lambda attention, q, k, v: attention.attn(q, k, v))

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Log-probs of the distribution that is sampled from, instead of logits: FP32 [tokens, vocabulary]."""
        # The head has rows beyond the vocabulary, which vLLM pads it with.
        logits = self.joined(head_logits(hidden_states, self.lm_head.weight))[:, : self._arch.vocab_size]
        return log_softmax(truncated(logits, self.temperature, self.truncation), self.temperature).float()

    def _down(self, mlp: Any) -> tuple[Tensor, ...]:
        _, down = self.expert_weights(mlp)
        return (down,) if isinstance(down, Tensor) else down

    def joined(self, part: Tensor) -> Tensor:
        return part if self._ranks == 1 else internals.gather(part, 1)

    def joined_codes(self, part: Codes) -> Codes:
        if self._ranks == 1:
            return part
        codes, scales = part
        rows = scales.shape[0]
        # Scales stay column-major, with columns that begin on 16 bytes.
        by_column = internals.gather(pad(scales.t(), (0, -rows % _SCALE_PITCH)), 0)
        return internals.gather(codes, 1), by_column.t()[:rows]


class AlignedQwen3ForCausalLM(AlignedForward, Qwen3ForCausalLM):
    pass


class AlignedQwen3MoeForCausalLM(AlignedForward, Qwen3MoeForCausalLM):
    def expert_weights(self, mlp: Any) -> tuple[Operand, Operand]:
        experts = mlp.experts.routed_experts
        gate_up, down = experts.w13_weight, experts.w2_weight
        if gate_up.dtype != torch.float8_e4m3fn:
            return gate_up, down
        return (gate_up, experts.w13_weight_scale_inv), (down, experts.w2_weight_scale_inv)


class AlignedQwen2ForCausalLM(AlignedForward, Qwen2ForCausalLM):
    pass


class AlignedLlamaForCausalLM(AlignedForward, LlamaForCausalLM):
    pass
