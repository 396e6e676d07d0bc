"""A decoder in an engine's modules that computes with the functions that train.

An engine's model brings weights, named and laid out as it has them, and attention over its cache. None of what lies
between depends on other rows. So a token's log-prob is the same decoded alone, in a batch, after a hit in the prefix
cache, and scored in training.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from fp8core.models.architecture import Architecture
from fp8core.models.decoder import rotary_tables
from fp8core.models.families import FAMILIES, layer_parts
from fp8core.numerics.e4m3 import Codes, FiniteFlag, row_codes
from fp8core.numerics.elementwise import KERNELS
from fp8core.numerics.fused import HeadLayout, add_norm, add_norm_row_codes, norm_rotate, swiglu, swiglu_row_codes
from fp8core.numerics.gemm import bf16_gemm, forward_gemm
from fp8core.numerics.grouped import (
    Operand,
    choose_experts,
    expert_rows,
    forward_multiple,
    gathered,
    gathered_codes,
    grouped_bf16_gemm,
    grouped_gemm,
    mixed,
)
from fp8core.numerics.packed import head_logits
from fp8core.numerics.recipe import Recipe, recipe_of

POINTS: Final = "kernels"
"""Rounding points of these decoders."""
NAMES: Final = {family.hf_class: name for family in FAMILIES.values() if (name := family.aligned_class) is not None}
"""An engine's class -> the name of the one derived from it."""
Attend = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""Attention of an engine's layer: of its module, Q, K and V [tokens, heads * head_dim], BF16."""

# The keys of a config.json that hold the decoder as an `Architecture`, and arguments of `recipe_of`.
_KEY = "fp8_grpo_decoder"
_RECIPE_KEY = "fp8_grpo_recipe"


def aligned_config(config: Mapping[str, Any], arch: Architecture, recipe: Recipe) -> dict[str, Any]:
    (name,) = config["architectures"]
    recipe_keys = {"name": recipe.name, "attention": recipe.attention}
    return {**config, "architectures": [NAMES[name]], _KEY: asdict(arch), _RECIPE_KEY: recipe_keys}


def decoder_of(config: Any) -> Architecture:
    return TypeAdapter(Architecture).validate_python(getattr(config, _KEY))


def aligned_recipe(config: Any) -> Recipe:
    """The types of weights say which layers stay in BF16."""
    return recipe_of(**getattr(config, _RECIPE_KEY))


def is_aligned(description: Mapping[str, Any]) -> bool:
    return description["model"] in NAMES.values()


class AlignedDecoder(nn.Module):
    """The forward, to be mixed into a model of an engine before it; GPUs may share a layer (`joined`)."""

    model: Any
    cosines: Tensor
    sines: Tensor

    def prepare(self, config: Any, heads: HeadLayout, device: torch.device) -> None:
        """`config` is that of `aligned_config`, `heads` of this GPU."""
        arch = decoder_of(config)
        self._arch = arch
        self._heads = heads
        self.recipe = aligned_recipe(config)
        self._parts = layer_parts(arch)
        tables = [KERNELS.tables(table) for table in rotary_tables(arch)]
        # Buffers survive an engine's sleep. The flag is not read: a value that is not finite reaches the log-probs.
        self._flag = FiniteFlag(device)
        self.register_buffer("not_finite", self._flag.not_finite, persistent=False)
        for name, table in zip(("cosines", "sines"), tables, strict=True):
            self.register_buffer(name, table.to(device), persistent=False)

    def hidden(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states after the final norm, BF16 [tokens, hidden], of int64 [tokens] each."""
        total = self.model.embed_tokens(input_ids)
        delta = None
        for index, layer in enumerate(self.model.layers):
            attention = layer.self_attn
            mlp = layer.mlp
            total, normed = self._add_norm(total, delta, layer.input_layernorm, attention.qkv_proj)
            attended = self._attention(attention, normed, positions, attend)
            if index in self._arch.sparse_layers:
                total, delta = self._mixed(total, attended, layer.post_attention_layernorm, mlp)
                continue
            total, normed = self._add_norm(total, attended, layer.post_attention_layernorm, mlp.gate_up_proj)
            activated = self._activated(_multiply(normed, mlp.gate_up_proj), mlp.down_proj)
            delta = self.joined(_multiply(activated, mlp.down_proj))
        final: Tensor = add_norm(total, delta, self.model.norm.weight, self._arch.rms_norm_eps)[1]
        return final

    def expert_weights(self, mlp: Any) -> tuple[Operand, Operand]:
        """Of an engine's module: gate above up, [experts, 2 width, hidden], and down, [experts, hidden, width].

        A GPU has its rows of gate, of up and of down.
        """
        raise NotImplementedError

    def joined(self, part: Tensor) -> Tensor:
        """All columns, of which this GPU has computed a part."""
        return part

    def joined_codes(self, part: Codes) -> Codes:
        return part

    def _add_norm(self, x: Tensor, delta: Tensor | None, norm: Any, linear: Any) -> tuple[Tensor, Operand]:
        arguments = x, delta, norm.weight, self._arch.rms_norm_eps
        if _multiplies_codes(linear):
            return add_norm_row_codes(*arguments, self.recipe.activations, self._flag)
        total, normed, _inverse = add_norm(*arguments)
        return total, normed

    def _mixed(self, x: Tensor, delta: Tensor, norm: Any, mlp: Any) -> tuple[Tensor, Tensor]:
        """As `training.packed.experts` computes a layer's second half."""
        experts = self._arch.experts
        assert experts is not None, "a dense layer"
        gate_up, down = self.expert_weights(mlp)
        total, normed, _inverse = add_norm(x, delta, norm.weight, self._arch.rms_norm_eps)
        logits = KERNELS.routed(head_logits(normed, mlp.gate.weight))
        chosen, gates = choose_experts(logits, experts.per_token, experts.normalise_top_k)
        rows = expert_rows(chosen, experts.count, forward_multiple(chosen.numel(), experts.count))
        if isinstance(gate_up, Tensor):
            assert isinstance(down, Tensor), "experts of two formats"
            inner = grouped_bf16_gemm(gathered(normed, rows), gate_up, rows)
            outputs = grouped_bf16_gemm(self.joined(swiglu(inner)), down, rows)
            return total, self.joined(mixed(outputs, rows, gates))
        assert not isinstance(down, Tensor), "experts of two formats"
        quantiser = self.recipe.activations, self._flag
        inner = grouped_gemm(gathered_codes(row_codes(normed, *quantiser), rows), gate_up, rows)
        outputs = grouped_gemm(self.joined_codes(swiglu_row_codes(inner, *quantiser, rows)), down, rows)
        return total, self.joined(mixed(outputs, rows, gates))

    def _activated(self, inner: Tensor, linear: Any) -> Operand:
        if _multiplies_codes(linear):
            return self.joined_codes(swiglu_row_codes(inner, self.recipe.activations, self._flag))
        return self.joined(swiglu(inner))

    def _attention(self, attention: Any, rows: Operand, positions: Tensor, attend: Attend) -> Tensor:
        heads = self._heads
        arch = self._arch
        parts = self._parts
        norms = (attention.q_norm.weight, attention.k_norm.weight) if parts.qk_norm else None
        qkv = _multiply(rows, attention.qkv_proj)
        if parts.qkv_bias:
            qkv = qkv + attention.qkv_proj.bias
        rotated = norm_rotate(qkv, norms, self.cosines, self.sines, positions, heads, arch.rms_norm_eps)
        sizes = [n * heads.head_dim for n in (heads.query_heads, heads.kv_heads, heads.kv_heads)]
        attended = attend(attention, *rotated.split(sizes, dim=-1))
        if not _multiplies_codes(attention.o_proj):
            return self.joined(_multiply(self.joined(attended), attention.o_proj))
        codes = self.joined_codes(row_codes(attended, self.recipe.activations, self._flag))
        return self.joined(_multiply(codes, attention.o_proj))


def _multiplies_codes(linear: Any) -> bool:
    codes: bool = linear.weight.dtype == torch.float8_e4m3fn
    return codes


def _multiply(rows: Operand, linear: Any) -> Tensor:
    if isinstance(rows, Tensor):
        return bf16_gemm(rows, linear.weight)
    return forward_gemm(rows, (linear.weight, linear.weight_scale_inv))
