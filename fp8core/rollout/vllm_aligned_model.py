"""Models of vLLM that compute with the functions that train, so that both sides have the same log-probs bit for bit.

The modules are those of vLLM's own Qwen3 and Llama, so weights lie, are named, written and read back as in these. What
is ours is the forward: linears, norms, rotary positions, SwiGLU, attention and head are called from `fp8core.numerics`,
as the trainer calls them. None of them depends on the rows beside a token's, so a token's log-prob is the same decoded
alone, in a batch, after a prefix-cache hit, and scored in training.

Importing this module gives vLLM the attention that belongs to these models.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from fp8core.models.rotary import rotary_tables
from fp8core.numerics.block_codes import Codes, FiniteFlag, row_codes
from fp8core.numerics.fused_norm import add_norm, add_norm_row_codes
from fp8core.numerics.fused_rotary import HeadLayout, norm_rotate
from fp8core.numerics.fused_swiglu import swiglu_row_codes
from fp8core.numerics.hopper_gemm import forward_gemm
from fp8core.numerics.packed_head import head_logits, log_softmax
from fp8core.numerics.rounding import KERNELS
from fp8core.rollout.vllm_aligned import SCALE_RULE, decoder_of

register_backend(AttentionBackendEnum.CUSTOM, "fp8core.rollout.vllm_aligned_attention.AlignedBackend")


class AlignedForward(nn.Module):
    """The forward; to be mixed into a model of vLLM, before it."""

    model: Any
    lm_head: Any
    temperature: float = 1.0
    cosines: Tensor
    sines: Tensor

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._arch = decoder_of(vllm_config.model_config.hf_config)
        self._heads = HeadLayout(self._arch.num_heads, self._arch.num_kv_heads, self._arch.head_dim)
        device = self.lm_head.weight.device
        with torch.device("cpu"):
            tables = [KERNELS.tables(table) for table in rotary_tables(self._arch)]
        # Buffers survive vLLM's sleep. Nobody asks the flag: what is not finite reaches the log-probs.
        self._flag = FiniteFlag(device)
        self.register_buffer("not_finite", self._flag.not_finite, persistent=False)
        for name, table in zip(("cosines", "sines"), tables, strict=True):
            self.register_buffer(name, table.to(device), persistent=False)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: object = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, BF16 [tokens, hidden], of int64 [tokens] each."""
        assert intermediate_tensors is None, "an aligned model is not split into stages"
        assert inputs_embeds is None, "an aligned model reads tokens"
        total, added = self.model.embed_tokens(input_ids), None
        for layer in self.model.layers:
            total, rows = self._add_norm_codes(total, added, layer.input_layernorm)
            attended = self._attend(layer.self_attn, rows, positions)
            total, rows = self._add_norm_codes(total, attended, layer.post_attention_layernorm)
            gate_up = _multiply(rows, layer.mlp.gate_up_proj)
            added = _multiply(swiglu_row_codes(gate_up, SCALE_RULE, self._flag), layer.mlp.down_proj)
        normed: Tensor = add_norm(total, added, self.model.norm.weight, self._arch.rms_norm_eps)[1]
        return normed

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Log-probs of the distribution that is sampled from, in the place of logits: FP32 [tokens, vocabulary].

        vLLM samples from them at temperature 1 and reports them as they are (`logprobs_mode`), so that its sampler,
        which sums in an order of its own, has no part in them.
        """
        # The head has rows beyond the vocabulary, which vLLM pads it with.
        logits = head_logits(hidden_states, self.lm_head.weight)[:, : self._arch.vocab_size]
        return log_softmax(logits, self.temperature).float()

    def _add_norm_codes(self, x: Tensor, added: Tensor | None, norm: Any) -> tuple[Tensor, Codes]:
        return add_norm_row_codes(x, added, norm.weight, self._arch.rms_norm_eps, SCALE_RULE, self._flag)

    def _attend(self, attention: Any, rows: Codes, positions: Tensor) -> Tensor:
        """A layer's attention with both of its linears; vLLM's own layer stores K and V and knows what is cached."""
        heads, arch = self._heads, self._arch
        norms = (attention.q_norm.weight, attention.k_norm.weight) if arch.qk_norm else None
        qkv = _multiply(rows, attention.qkv_proj)
        rotated = norm_rotate(qkv, norms, self.cosines, self.sines, positions, heads, arch.rms_norm_eps)
        sizes = [n * heads.head_dim for n in (heads.query_heads, heads.kv_heads, heads.kv_heads)]
        attended = attention.attn(*rotated.split(sizes, dim=-1))
        return _multiply(row_codes(attended, SCALE_RULE, self._flag), attention.o_proj)


def _multiply(rows: Codes, linear: Any) -> Tensor:
    """BF16 [tokens, out], by the bytes that were shipped."""
    return forward_gemm(rows, (linear.weight, linear.weight_scale_inv))


class AlignedQwen3ForCausalLM(AlignedForward, Qwen3ForCausalLM):
    """Qwen3."""


class AlignedLlamaForCausalLM(AlignedForward, LlamaForCausalLM):
    """Llama."""
