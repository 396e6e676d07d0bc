"""A decoder in an engine's modules that computes with the functions that train: the part that no engine decides.

An engine's model brings weights, named and laid out as it has them, and attention over its cache. Everything between is
called from `fp8core.numerics`, as the trainer calls it. None of it depends on other rows. So a token's log-prob is the
same decoded alone, in a batch, after a hit in the prefix cache, and scored in training.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final

import torch
from torch import Tensor, nn

from fp8core.config.precision import PrecisionContract
from fp8core.models.architecture import Architecture, RopeScaling
from fp8core.models.decoder import rotary_tables
from fp8core.numerics.attention import HEAD_DIMS, LARGEST_GROUP, decode_kernel_takes
from fp8core.numerics.e4m3 import Codes, FiniteFlag, row_codes
from fp8core.numerics.elementwise import KERNELS
from fp8core.numerics.fused import HeadLayout, add_norm, add_norm_row_codes, norm_rotate, swiglu_row_codes
from fp8core.numerics.gemm import OUTPUT_MULTIPLE, forward_gemm

SCALE_RULE: Final = "pow2"
POINTS: Final = "kernels"
"""Scale rule and rounding points of these decoders."""
NAMES: Final = {
    "LlamaForCausalLM": "AlignedLlamaForCausalLM",
    "MistralForCausalLM": "AlignedLlamaForCausalLM",
    "Qwen2ForCausalLM": "AlignedQwen2ForCausalLM",
    "Qwen3ForCausalLM": "AlignedQwen3ForCausalLM",
}
"""An engine's class -> the name of the one derived from it."""
Attend = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""Attention of an engine's layer: of its module, Q, K and V [tokens, heads * head_dim], BF16."""

# The key of a config.json that holds the decoder as an `Architecture`.
_KEY = "fp8_grpo_decoder"
# Logits of a row that begins on 16 bytes, as TMA stores it; `log_softmax` sums another way from elsewhere.
_ALIGNED_ROW = 4


def aligned_config(config: Mapping[str, Any], arch: Architecture) -> dict[str, Any]:
    """A config.json for an engine's class, as one for ours."""
    (name,) = config["architectures"]
    return {**config, "architectures": [NAMES[name]], _KEY: asdict(arch)}


def decoder_of(config: Any) -> Architecture:
    """The decoder that the configuration of an aligned model describes (`aligned_config`), as an engine holds it."""
    fields = dict(getattr(config, _KEY))
    scaling = fields["rope_scaling"]
    return Architecture(**fields | {"rope_scaling": None if scaling is None else RopeScaling(**scaling)})


def is_aligned(described: Mapping[str, Any]) -> bool:
    return described["model"] in NAMES.values()


def contract_refusals(
    place: str, contract: PrecisionContract, also: Mapping[str, tuple[Any, Any, str]]
) -> Iterator[str]:
    """The refusals of an aligned model: the setting, its required value and why.

    Args:
        place: the setting that asks for it, `rollout.ENGINE.model=aligned`.
        contract: formats.
        also: what else an engine needs: the setting -> its value, the one it must be, and the reason.
    """
    rollout, layers = contract.rollout, "all of its linears multiply codes"
    needed = {
        "precision.rounding_points": (contract.rounding_points, POINTS, "its operations round there"),
        "precision.scale_rule": (contract.scale_rule, SCALE_RULE, "codes are then equal by quotient and reciprocal"),
        "precision.rollout.linear": (rollout.linear, "fp8_block", "its linears multiply codes"),
        "precision.bf16_first_layers": (contract.bf16_first_layers, 0, layers),
        "precision.bf16_last_layers": (contract.bf16_last_layers, 0, layers),
        "precision.rollout.kv_cache": (rollout.kv_cache, "fp8", "its attention reads an FP8 cache"),
        "precision.rollout.head": (rollout.head, "fp32", "its logits are FP32"),
        **also,
    }
    for setting, (value, wanted, reason) in needed.items():
        if value != wanted:
            yield f"{place}: {setting}={value}, it must be {wanted}: {reason}"


def shape_refusals(place: str, arch: Architecture) -> Iterator[str]:
    """Properties of a decoder that an aligned model does not compute; `place` as of `contract_refusals`."""
    group = arch.num_heads // arch.num_kv_heads
    if arch.experts is not None:
        yield f"{place}: the model has experts, only dense ones are aligned; set it to stock"
    if not decode_kernel_takes(arch.head_dim, group):
        yield (
            f"{place}: head_dim {arch.head_dim} with {group} query heads per KV head; its attention "
            f"needs head_dim {' or '.join(map(str, HEAD_DIMS))} and at most {LARGEST_GROUP}; set it to stock"
        )
    if arch.hidden_size % OUTPUT_MULTIPLE:
        yield (
            f"{place}: a hidden size of {arch.hidden_size}, which is no multiple of {OUTPUT_MULTIPLE}; set it to stock"
        )
    if arch.vocab_size % _ALIGNED_ROW:
        yield f"{place}: a vocabulary of {arch.vocab_size}, which is no multiple of {_ALIGNED_ROW}; set it to stock"


class AlignedDecoder(nn.Module):
    """The forward; to be mixed into a dense model of an engine, before it.

    Modules and parameters are the engine's. GPUs that share a layer override `joined` and `joined_codes`.
    """

    model: Any
    cosines: Tensor
    sines: Tensor

    def prepare(self, arch: Architecture, heads: HeadLayout, device: torch.device) -> None:
        """Lay out what the forward reads beside weights; `heads`: of this GPU, `device`: of the weights."""
        self._arch, self._heads = arch, heads
        tables = [KERNELS.tables(table) for table in rotary_tables(arch)]
        # Buffers survive an engine's sleep. The flag is not read: a value that is not finite reaches the log-probs.
        self._flag = FiniteFlag(device)
        self.register_buffer("not_finite", self._flag.not_finite, persistent=False)
        for name, table in zip(("cosines", "sines"), tables, strict=True):
            self.register_buffer(name, table.to(device), persistent=False)

    def hidden(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states after the final norm, BF16 [tokens, hidden], of int64 [tokens] each."""
        total, added = self.model.embed_tokens(input_ids), None
        for layer in self.model.layers:
            total, rows = self._add_norm_codes(total, added, layer.input_layernorm)
            attended = self._attention(layer.self_attn, rows, positions, attend)
            total, rows = self._add_norm_codes(total, attended, layer.post_attention_layernorm)
            activated = swiglu_row_codes(_multiply(rows, layer.mlp.gate_up_proj), SCALE_RULE, self._flag)
            added = self.joined(_multiply(self.joined_codes(activated), layer.mlp.down_proj))
        normed: Tensor = add_norm(total, added, self.model.norm.weight, self._arch.rms_norm_eps)[1]
        return normed

    def joined(self, part: Tensor) -> Tensor:
        """All columns, of which this GPU has computed a part."""
        return part

    def joined_codes(self, part: Codes) -> Codes:
        """All columns of codes and scales; groups are whole on each GPU."""
        return part

    def _add_norm_codes(self, x: Tensor, added: Tensor | None, norm: Any) -> tuple[Tensor, Codes]:
        return add_norm_row_codes(x, added, norm.weight, self._arch.rms_norm_eps, SCALE_RULE, self._flag)

    def _attention(self, attention: Any, rows: Codes, positions: Tensor, attend: Attend) -> Tensor:
        """A layer's attention with both of its linears; the engine stores K and V and tracks what is cached."""
        heads, arch = self._heads, self._arch
        norms = (attention.q_norm.weight, attention.k_norm.weight) if arch.qk_norm else None
        qkv = _multiply(rows, attention.qkv_proj)
        if arch.qkv_bias:
            qkv = qkv + attention.qkv_proj.bias
        rotated = norm_rotate(qkv, norms, self.cosines, self.sines, positions, heads, arch.rms_norm_eps)
        sizes = [n * heads.head_dim for n in (heads.query_heads, heads.kv_heads, heads.kv_heads)]
        attended = attend(attention, *rotated.split(sizes, dim=-1))
        codes = self.joined_codes(row_codes(attended, SCALE_RULE, self._flag))
        return self.joined(_multiply(codes, attention.o_proj))


def _multiply(rows: Codes, linear: Any) -> Tensor:
    """BF16 [tokens, out], by the bytes that were shipped."""
    return forward_gemm(rows, (linear.weight, linear.weight_scale_inv))
