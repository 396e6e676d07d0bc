"""From FP32 master weights to what is shipped, and from what was shipped to what is multiplied.

`stored_weights` quantises once per update: BF16 first, then block FP8 of the BF16 values, so that a BF16 checkpoint
of the policy quantises to the same bytes. `load_policy` makes stored weights ready; engine and trainer both use it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8core.config.precision import LinearFormat
from fp8core.models.architecture import Architecture
from fp8core.numerics.e4m3 import ScaleRule, encode, quantise_tiles
from fp8core.numerics.linear import LinearWeight, StoredWeight, load_weight
from fp8core.numerics.logprobs import HeadWeight, load_head
from fp8core.numerics.rounding import round_to_bf16

SCALE_SUFFIX = "_scale_inv"
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer, ready to compute."""

    input_norm: Tensor
    qkv: LinearWeight
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: LinearWeight
    post_norm: Tensor
    gate_up: LinearWeight
    down: LinearWeight


@dataclass(frozen=True)
class PolicyWeights:
    """A whole decoder, ready to compute."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: HeadWeight


def stored_weights(
    masters: Mapping[str, Tensor], formats: tuple[LinearFormat, ...], rule: ScaleRule
) -> dict[str, Tensor]:
    """Weights as they are shipped to an engine and saved for it.

    Args:
        masters: FP32 weights by Hugging Face name.
        formats: format of each layer's linears.
        rule: scale rule of the tiles.

    Returns:
        By name: E4M3 codes with `<name>_scale_inv` for block-FP8 linears, BF16 for everything else; FP32 throughout
        when the formats are fp32.
    """
    plain = torch.float32 if "fp32" in formats else torch.bfloat16
    stored: dict[str, Tensor] = {}
    for name, master in masters.items():
        narrow = master.detach().to(plain)
        layer = layer_of(name)
        if layer is not None and is_linear(name) and formats[layer] == "fp8_block":
            grid, scales = quantise_tiles(narrow.float(), rule)
            stored[name], stored[name + SCALE_SUFFIX] = encode(grid), scales
        else:
            stored[name] = narrow
    return stored


def layer_of(name: str) -> int | None:
    """Index of the decoder layer a parameter belongs to, or None outside the layers."""
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else None


def is_linear(name: str) -> bool:
    """Whether a parameter is the weight of one of the seven linears of a layer."""
    return name.split(".")[-2] in _PROJECTIONS


def load_policy(
    arch: Architecture, stored: Mapping[str, Tensor], masters: Mapping[str, Tensor] | None = None
) -> PolicyWeights:
    """Make stored weights ready to compute.

    Args:
        arch: shape of the decoder.
        stored: weights as shipped (see `stored_weights`).
        masters: FP32 parameters that receive gradients; None for inference.
    """
    source = _Source(stored, masters)
    head = "model.embed_tokens.weight" if arch.tie_embeddings else "lm_head.weight"
    return PolicyWeights(
        embedding=source.plain("model.embed_tokens.weight"),
        layers=tuple(_layer(source, f"model.layers.{i}", arch.qk_norm) for i in range(arch.num_layers)),
        norm=source.plain("model.norm.weight"),
        head=load_head(stored[head], masters[head] if masters else None),
    )


@dataclass(frozen=True)
class _Source:
    stored: Mapping[str, Tensor]
    masters: Mapping[str, Tensor] | None

    def plain(self, name: str) -> Tensor:
        if self.masters is None:
            return self.stored[name].float()
        if self.stored[name].dtype == torch.float32:
            return self.masters[name]
        return round_to_bf16(self.masters[name])

    def linear(self, *names: str) -> LinearWeight:
        parts = [StoredWeight(self.stored[name], self.stored.get(name + SCALE_SUFFIX)) for name in names]
        return load_weight(parts, [self.masters[name] for name in names] if self.masters else None)


def _layer(source: _Source, prefix: str, qk_norm: bool) -> LayerWeights:
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return LayerWeights(
        input_norm=source.plain(f"{prefix}.input_layernorm.weight"),
        qkv=source.linear(*(f"{attention}.{name}_proj.weight" for name in "qkv")),
        q_norm=source.plain(f"{attention}.q_norm.weight") if qk_norm else None,
        k_norm=source.plain(f"{attention}.k_norm.weight") if qk_norm else None,
        output=source.linear(f"{attention}.o_proj.weight"),
        post_norm=source.plain(f"{prefix}.post_attention_layernorm.weight"),
        gate_up=source.linear(f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"),
        down=source.linear(f"{mlp}.down_proj.weight"),
    )
