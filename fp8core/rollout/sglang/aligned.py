"""Models, attention and sampler of SGLang that compute with the functions that train: equal log-probs bit for bit.

The modules are those of SGLang's own Llama, Qwen2 and Qwen3; the forward is ours (`fp8core.rollout.aligned`). Attention
is as in `rollout.vllm.aligned`. Importing this module gives SGLang the models.
"""

from typing import Any

import torch
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from torch import Tensor

from fp8core.kernels.decode_attention import shared_decode_attention
from fp8core.kernels.sequence_attention import Batch, Span, batches, shared_sequence_attention
from fp8core.numerics.attention import Queries
from fp8core.numerics.fused import HeadLayout
from fp8core.numerics.logprobs import token_statistics
from fp8core.rollout.aligned import AlignedDecoder, decoder_of
from fp8core.rollout.sglang import internals
from fp8core.rollout.sglang.attention import ScaledAttention
from fp8core.rollout.sglang.sampler import TARGET, TEMPERATURE, SeededSampler, draw_tokens, support_logits
from fp8core.rollout.sglang.settings import BEYOND


class AlignedAttention(ScaledAttention):
    """It reads what FlashAttention's backend lays out for a step."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.products = runner.model.recipe.attention
        self._longest = runner.model_config.context_len - BEYOND
        self._requests = int(runner.server_args.max_running_requests)
        self._step: Any = None
        self._prompts: list[Batch] = []

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> Tensor:
        query, _ = self._codes(q, k, v, layer, forward_batch, save_kv_cache)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._decode(query, layer, out)
        return out

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> Tensor:
        query, _ = self._codes(q, k, v, layer, forward_batch, save_kv_cache)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._decode(query, layer, out)
        keys, values = internals.pages(self.token_to_kv_pool, layer, self.page_size)
        layout = keys.device, keys.shape, keys.stride()
        kernel = shared_sequence_attention(*layout, _group(layer), self._longest, self.products)
        split = (-1, layer.tp_q_head_num, layer.head_dim)
        table = self.forward_metadata.page_table
        work = self._work(layer, forward_batch)
        scales = internals.scale_buffers(layer)
        kernel(query.view(split), keys, values, table, work, scales, out.view(split))
        return out

    def _decode(self, query: Tensor, layer: Any, out: Tensor) -> None:
        """Write the rows of `out` that are a request's one new token."""
        keys, values = internals.pages(self.token_to_kv_pool, layer, self.page_size)
        layout = keys.device, keys.shape, keys.stride()
        kernel = shared_decode_attention(*layout, _group(layer), self._longest, self._requests, self.products)
        step = self.forward_metadata
        split = (-1, layer.tp_q_head_num, layer.head_dim)
        queries = Queries(step.page_table, step.cu_seqlens_q, step.cache_seqlens_int32)
        kernel(query.view(split), keys, values, queries, internals.scale_buffers(layer), out.view(split))

    def _work(self, layer: Any, forward_batch: Any) -> list[Batch]:
        if self._step is not self.forward_metadata:
            spans = list[Span]()
            row = 0
            for tokens, cache_length in zip(
                forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu, strict=True
            ):
                spans.append(Span(row, tokens if tokens > 1 else 0, cache_length + tokens))
                row += tokens
            self._prompts = batches(spans, _group(layer), self._longest, forward_batch.seq_lens.device)
            self._step = self.forward_metadata
        return self._prompts


def _group(layer: Any) -> int:
    group_size: int = layer.tp_q_head_num // layer.tp_k_head_num
    return group_size


class AlignedSampler(SeededSampler):
    """Greedy tokens have log-probs of temperature 1."""

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int] | None],
        positions: Tensor,
    ) -> Tensor:
        """As SGLang's. Requests that run together have one temperature."""
        parameters = sampling_info.custom_params
        logits = logits_output.next_token_logits
        if parameters is None:
            # Batches that SGLang captures and warms up with.
            tokens: Tensor = super().forward(
                logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions
            )
            return tokens
        (temperature,) = {each[TEMPERATURE] for each in parameters}
        logits = support_logits(logits.float(), parameters, temperature or 1.0)
        tokens = logits.argmax(-1) if temperature == 0 else draw_tokens(logits, sampling_info, positions)[0]
        logits_output.next_token_logprobs, _ = token_statistics(logits, tokens, temperature or 1.0)
        if any(TARGET in each for each in parameters):
            targets = [each.get(TARGET, 0) for each in parameters]
            logprobs, _ = token_statistics(logits, torch.tensor(targets, device=logits.device), temperature or 1.0)
            logits_output.next_token_token_ids_logprobs_val = list(logprobs[:, None])
            logits_output.next_token_token_ids_logprobs_idx = [[target] for target in targets]
        return tokens.int()


class AlignedForward(AlignedDecoder):
    lm_head: Any
    logits_processor: Any

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config=quant_config, prefix=prefix)
        arch = decoder_of(config)
        self.prepare(config, HeadLayout(arch.num_heads, arch.num_kv_heads, arch.head_dim), self.lm_head.weight.device)

    @torch.no_grad()
    def forward(
        self, input_ids: Tensor, positions: Tensor, forward_batch: Any, input_embeds: Tensor | None = None, **more: Any
    ) -> Any:
        assert input_embeds is None, "an aligned model reads tokens"
        hidden = self.hidden(input_ids, positions, lambda layer, q, k, v: layer.attn(q, k, v, forward_batch))
        return self.logits_processor(input_ids, hidden, self.lm_head, forward_batch)


class AlignedQwen3ForCausalLM(AlignedForward, Qwen3ForCausalLM):
    pass


class AlignedQwen2ForCausalLM(AlignedForward, Qwen2ForCausalLM):
    pass


class AlignedLlamaForCausalLM(AlignedForward, LlamaForCausalLM):
    pass


internals.register_models(AlignedQwen3ForCausalLM, AlignedQwen2ForCausalLM, AlignedLlamaForCausalLM)
