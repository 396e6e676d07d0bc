"""From FP32 master weights to what is shipped, and from what was shipped to what is multiplied.

`stored_weights` quantises once per update: BF16 first, then block FP8 of the BF16 values, so that a BF16 checkpoint
of the policy quantises to the same bytes. `load_policy` makes stored weights ready; engine and trainer both use it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from fp8core.config.precision import LinearFormat
from fp8core.models.architecture import Architecture, Experts
from fp8core.models.experts import ExpertWeights, MlpWeights
from fp8core.numerics.block_codes import tile_codes
from fp8core.numerics.e4m3 import ScaleRule
from fp8core.numerics.linear import LinearWeight, StoredWeight, load_weight
from fp8core.numerics.logprobs import HeadWeight, load_head
from fp8core.numerics.rounding import round_to_bf16

SCALE_SUFFIX = "_scale_inv"
# What tensor maps and vector loads of every width want.
_ALIGNMENT = 256
# The fused linear of a layer that each projection is part of.
_FUSED = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "o_proj": "output",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
    "down_proj": "down",
}


@dataclass(frozen=True)
class LayerNames:
    """Format that the weights of each linear of a layer are stored in."""

    qkv: LinearFormat
    output: LinearFormat
    gate_up: LinearFormat
    down: LinearFormat


@dataclass(frozen=True)
class StoredNames:
    """Format that every parameter of a decoder is stored in.

    Attributes:
        values: of everything that is no linear of a layer; bf16 or fp32.
        layers: of the linears.
    """

    values: LinearFormat
    layers: tuple[LayerNames, ...]

    @classmethod
    def by_layer(cls, *names: LinearFormat) -> "StoredNames":
        """One format for all linears of a layer; the rest in BF16, or in FP32 when a layer is."""
        return cls("fp32" if "fp32" in names else "bf16", tuple(LayerNames(*[name] * 4) for name in names))

    def of(self, parameter: str) -> LinearFormat:
        """The format of a parameter by its Hugging Face name."""
        layer = layer_of(parameter)
        if layer is None or not is_linear(parameter):
            return self.values
        name: LinearFormat = getattr(self.layers[layer], fused_linear(parameter))
        return name


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer, ready to compute."""

    input_norm: Tensor
    qkv: LinearWeight
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: LinearWeight
    post_norm: Tensor
    mlp: MlpWeights | ExpertWeights


@dataclass(frozen=True)
class PolicyWeights:
    """A whole decoder, ready to compute."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: HeadWeight


def stored_weights(masters: Mapping[str, Tensor], formats: StoredNames, rule: ScaleRule) -> dict[str, Tensor]:
    """Weights as they are shipped to an engine and saved for it.

    Args:
        masters: FP32 weights by Hugging Face name.
        formats: format of each parameter.
        rule: scale rule of the tiles.

    Returns:
        By name: E4M3 codes with `<name>_scale_inv` for block-FP8 linears, BF16 or FP32 for everything else.
    """
    stored: dict[str, Tensor] = {}
    for name, master in masters.items():
        form = formats.of(name)
        narrow = master.detach().to(torch.float32 if form == "fp32" else torch.bfloat16)
        if form == "fp8_block":
            stored[name], stored[name + SCALE_SUFFIX] = tile_codes(narrow, rule)
        else:
            stored[name] = narrow
    return stored


def in_one_buffer(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tensors of one device, side by side in one piece of memory: one handle lends it to another process."""
    ends = list(accumulate(_aligned(tensor.nbytes) for tensor in tensors.values()))
    buffer = torch.empty(ends[-1], dtype=torch.uint8, device=next(iter(tensors.values())).device)
    copies = {}
    for (name, tensor), end in zip(tensors.items(), ends, strict=True):
        start = end - _aligned(tensor.nbytes)
        copies[name] = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return copies


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def layer_of(name: str) -> int | None:
    """Index of the decoder layer a parameter belongs to, or None outside the layers."""
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else None


def is_linear(name: str) -> bool:
    """Whether a parameter is the weight of one of the seven linears of a layer."""
    return name.split(".")[-2] in _FUSED


def fused_linear(name: str) -> str:
    """The fused linear (a field of `LayerWeights`) that the weight of one of the seven linears is part of."""
    return _FUSED[name.split(".")[-2]]


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
        layers=tuple(_layer(source, arch, i) for i in range(arch.num_layers)),
        norm=source.plain("model.norm.weight"),
        head=source.head(head),
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

    def head(self, name: str) -> HeadWeight:
        return load_head(self.stored[name], self.masters[name] if self.masters else None)

    def mlp(self, prefix: str) -> MlpWeights:
        return MlpWeights(
            gate_up=self.linear(f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"),
            down=self.linear(f"{prefix}.down_proj.weight"),
        )

    def experts(self, prefix: str, experts: Experts) -> ExpertWeights:
        return ExpertWeights(
            router=self.head(f"{prefix}.gate.weight"),
            experts=tuple(self.mlp(f"{prefix}.experts.{e}") for e in range(experts.count)),
            per_token=experts.per_token,
            normalise_top_k=experts.normalise_top_k,
        )


def _layer(source: _Source, arch: Architecture, i: int) -> LayerWeights:
    prefix = f"model.layers.{i}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return LayerWeights(
        input_norm=source.plain(f"{prefix}.input_layernorm.weight"),
        qkv=source.linear(*(f"{attention}.{name}_proj.weight" for name in "qkv")),
        q_norm=source.plain(f"{attention}.q_norm.weight") if arch.qk_norm else None,
        k_norm=source.plain(f"{attention}.k_norm.weight") if arch.qk_norm else None,
        output=source.linear(f"{attention}.o_proj.weight"),
        post_norm=source.plain(f"{prefix}.post_attention_layernorm.weight"),
        mlp=source.experts(mlp, arch.experts) if arch.experts and i in arch.sparse_layers else source.mlp(mlp),
    )
