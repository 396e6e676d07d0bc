"""From FP32 master weights to the shipped ones, from these to the multiplied ones, and the formats that multiply them.

`stored_weights` quantises BF16 values, so a BF16 checkpoint of the policy quantises to the same bytes."""

from collections.abc import KeysView, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fp8core.config.precision import LinearFormat as LinearName
from fp8core.config.precision import PointsName, PrecisionContract, SidePrecision
from fp8core.models.architecture import Architecture, Experts
from fp8core.models.experts import ExpertWeights, MlpFormats, MlpWeights
from fp8core.models.families import layer_parts
from fp8core.numerics.attention import (
    FP8_CACHE_FORMS,
    AttentionFormat,
    Bf16Attention,
    ExactFp32Attention,
    Fp32Attention,
)
from fp8core.numerics.e4m3 import round_up, tile_codes
from fp8core.numerics.elementwise import (
    FUSED,
    KERNELS,
    NATIVE,
    NOWHERE,
    STEPWISE,
    Rounding,
    RoundingPoints,
    keep_fp32,
    round_to_bf16,
)
from fp8core.numerics.fingerprint import policy_digest
from fp8core.numerics.linear import (
    Bf16Linear,
    ExactFp32Linear,
    Fp8BlockLinear,
    Fp8ForwardLinear,
    Fp32Linear,
    LinearFormat,
    LinearWeight,
    StoredWeight,
    load_weight,
)
from fp8core.numerics.logprobs import BF16_HEAD, FP32_HEAD, HeadFormat, HeadWeight, load_head
from fp8core.numerics.recipe import FP32_ACTIVATIONS, Grouping, Recipe

SCALE_SUFFIX = "_scale_inv"
# Alignment for tensor maps and vector loads of every width.
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
class StoredNames:
    """`values`: the format of everything that is no linear of a layer; bf16 or fp32. `layers`: of a layer's linears."""

    values: LinearName
    layers: tuple[LinearName, ...]

    @classmethod
    def by_layer(cls, *names: LinearName) -> "StoredNames":
        """The rest in BF16, or in FP32 when a layer is."""
        return cls("fp32" if "fp32" in names else "bf16", names)

    def of(self, parameter: str) -> LinearName:
        layer = layer_of(parameter)
        return self.values if layer is None or not is_linear(parameter) else self.layers[layer]


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Its family places the norms before attention and MLP or after them (`LayerParts.norms`)."""

    attention_norm: Tensor
    qkv: LinearWeight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: LinearWeight
    mlp_norm: Tensor
    mlp: MlpWeights | ExpertWeights


@dataclass(frozen=True)
class PolicyWeights:
    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: HeadWeight


def stored_weights(masters: Mapping[str, Tensor], formats: StoredNames, tiles: Grouping) -> dict[str, Tensor]:
    """Weights as they are shipped to an engine and saved for it, from FP32 masters by Hugging Face name.

    E4M3 codes with `<name>_scale_inv` for block-FP8 linears, BF16 or FP32 for everything else."""
    tensors: dict[str, Tensor] = {}
    for name, master in masters.items():
        form = formats.of(name)
        narrow = master.detach().to(torch.float32 if form == "fp32" else torch.bfloat16)
        if form == "fp8_block":
            tensors[name], tensors[name + SCALE_SUFFIX] = tile_codes(narrow, tiles)
        else:
            tensors[name] = narrow
    return tensors


class EngineWeights(Protocol):
    """Weights for a rollout engine by name: tensors, or the layouts of tensors that lie in another process."""

    def digest(self) -> str:
        """Digest of the tensors (`numerics.fingerprint.policy_digest`)."""

    def __getitem__(self, name: str) -> Any: ...

    def keys(self) -> KeysView[str]: ...


class ShippedTensors(dict[str, Tensor]):
    def digest(self) -> str:
        return policy_digest(self)


def in_one_buffer(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors of one device, side by side in one piece of memory: one handle lends it to another process."""
    sizes = [round_up(tensor.nbytes, _ALIGNMENT) for tensor in tensors]
    parts = torch.empty(sum(sizes), dtype=torch.uint8, device=tensors[0].device).split(sizes)
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        for part, tensor in zip(parts, tensors, strict=True)
    ]


def layer_of(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else None


def is_linear(name: str) -> bool:
    return name.endswith(".weight") and name.split(".")[-2] in _FUSED


def fused_linear(name: str) -> str:
    """The fused linear (a field of `LayerWeights`) that one of the seven linears is part of."""
    return _FUSED[name.split(".")[-2]]


@dataclass(frozen=True)
class PreparedWeights:
    """Stored weights, and what was made ready of them: passes under one policy share it, with masters or without.

    `tiles` are those that codes were quantised in, as every shipped recipe has them.
    """

    tensors: Mapping[str, Tensor]
    tiles: Grouping = FP32_ACTIVATIONS.weights
    _linears: dict[tuple[str, ...], LinearWeight] = field(default_factory=dict)
    _heads: dict[str, HeadWeight] = field(default_factory=dict)

    def linear(self, names: tuple[str, ...]) -> LinearWeight:
        if names not in self._linears:
            tile = self.tiles.rows, self.tiles.columns
            parts = [StoredWeight(self.tensors[name], self.tensors.get(name + SCALE_SUFFIX), tile) for name in names]
            self._linears[names] = load_weight(parts)
        return self._linears[names]

    def head(self, name: str) -> HeadWeight:
        if name not in self._heads:
            self._heads[name] = load_head(self.tensors[name])
        return self._heads[name]


def load_policy(
    arch: Architecture, tensors: Mapping[str, Tensor] | PreparedWeights, masters: Mapping[str, Tensor] | None = None
) -> PolicyWeights:
    """Make stored weights ready to compute; `masters`: FP32 parameters that receive gradients, None for inference."""
    source = _Source(tensors if isinstance(tensors, PreparedWeights) else PreparedWeights(tensors), masters)
    head = "model.embed_tokens.weight" if arch.tie_embeddings else "lm_head.weight"
    return PolicyWeights(
        embedding=source.plain("model.embed_tokens.weight"),
        layers=tuple(_layer_weights(source, arch, i) for i in range(arch.num_layers)),
        norm=source.plain("model.norm.weight"),
        head=source.head(head),
    )


@dataclass(frozen=True)
class _Source:
    prepared: PreparedWeights
    masters: Mapping[str, Tensor] | None

    def plain(self, name: str) -> Tensor:
        if self.masters is None:
            return self.prepared.tensors[name].float()
        if self.prepared.tensors[name].dtype == torch.float32:
            return self.masters[name]
        return round_to_bf16(self.masters[name])

    def linear(self, *names: str) -> LinearWeight:
        linear = self.prepared.linear(names)
        return replace(linear, master=torch.cat([self.masters[name] for name in names])) if self.masters else linear

    def head(self, name: str) -> HeadWeight:
        head = self.prepared.head(name)
        return replace(head, master=self.masters[name]) if self.masters else head

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


def _layer_weights(source: _Source, arch: Architecture, i: int) -> LayerWeights:
    parts = layer_parts(arch)
    prefix = f"model.layers.{i}"
    attention = f"{prefix}.self_attn"
    mlp = f"{prefix}.mlp"
    return LayerWeights(
        attention_norm=source.plain(f"{prefix}.{parts.attention_norm}.weight"),
        qkv=source.linear(*(f"{attention}.{name}_proj.weight" for name in "qkv")),
        qkv_bias=torch.cat([source.plain(f"{attention}.{name}_proj.bias") for name in "qkv"])
        if parts.qkv_bias
        else None,
        q_norm=source.plain(f"{attention}.q_norm.weight") if parts.qk_norm else None,
        k_norm=source.plain(f"{attention}.k_norm.weight") if parts.qk_norm else None,
        output=source.linear(f"{attention}.o_proj.weight"),
        mlp_norm=source.plain(f"{prefix}.{parts.mlp_norm}.weight"),
        mlp=source.experts(mlp, arch.experts) if arch.experts and i in arch.sparse_layers else source.mlp(mlp),
    )


_POINTS: dict[PointsName, RoundingPoints] = {"stepwise": STEPWISE, "native": NATIVE, "kernels": KERNELS, "fused": FUSED}


@dataclass(frozen=True)
class Formats:
    """Everything that sets the precision of a decoder.

    `linears`: by layer. `rounding`: of values between operations. `points`: what is rounded inside operations."""

    linears: tuple[LinearFormat, ...]
    attention: AttentionFormat
    head: HeadFormat
    rounding: Rounding
    points: RoundingPoints
    recipe: Recipe

    def stored_names(self) -> StoredNames:
        names: dict[str, LinearName] = {"fp8_block": "fp8_block", "bf16": "bf16", "fp32": "fp32"}
        return StoredNames(
            values="fp32" if self.rounding is keep_fp32 else "bf16",
            layers=tuple(names[linear.name] for linear in self.linears),
        )

    def describe(self) -> dict[str, object]:
        return {
            "linear": [linear.name for linear in self.linears],
            "attention": self.attention.name,
            "head": self.head.name,
            "scale_rule": self.recipe.name,
            "rounding_points": self.points.name,
        }

    def mlp(self, layer: int) -> MlpFormats:
        return MlpFormats(self.linears[layer], self.rounding, self.points)

    def with_points(self, points: RoundingPoints) -> "Formats":
        """The same with other roundings inside norms, rotary positions, SwiGLU, BF16 attention and routers."""
        attention = Bf16Attention(points.weights) if self.attention.name == "bf16" else self.attention
        return replace(self, points=points, attention=attention)


def rollout_formats(contract: PrecisionContract, num_layers: int) -> Formats:
    return _formats(contract, contract.rollout, contract.rollout.linear, num_layers)


def training_formats(contract: PrecisionContract, num_layers: int) -> Formats:
    return _formats(contract, contract.training, contract.training.backward_format, num_layers)


def reference_formats(num_layers: int) -> Formats:
    """FP32 throughout, as `transformers` computes with FP32 weights; faster than the FP32 side of a contract."""
    fp32 = SidePrecision(linear="fp32", kv_cache="fp32")
    exact = _formats(PrecisionContract(rollout=fp32), fp32, "fp32", num_layers)
    return replace(exact, linears=(Fp32Linear(),) * num_layers, attention=Fp32Attention())


def _formats(contract: PrecisionContract, side: SidePrecision, backward: LinearName, num_layers: int) -> Formats:
    recipe = contract.recipe
    inner = _linear(side.linear, backward, recipe)
    outer = ExactFp32Linear() if side.linear == "fp32" else Bf16Linear()
    points = NOWHERE if side.linear == "fp32" else _POINTS[contract.rounding_points]
    bf16 = Bf16Attention(points.weights)
    forms: dict[str, AttentionFormat] = {**FP8_CACHE_FORMS, "bf16": bf16, "fp32": ExactFp32Attention()}
    return Formats(
        linears=tuple(inner if recipe.in_fp8(i, num_layers) else outer for i in range(num_layers)),
        attention=forms[contract.attention_of(side)],
        head=FP32_HEAD if side.head == "fp32" else BF16_HEAD,
        rounding=keep_fp32 if side.linear == "fp32" else round_to_bf16,
        points=points,
        recipe=recipe,
    )


def _linear(forward: LinearName, backward: LinearName, recipe: Recipe) -> LinearFormat:
    match forward, backward:
        case "fp8_block", "fp8_block":
            return Fp8BlockLinear(recipe)
        case "fp8_block", _:
            return Fp8ForwardLinear(recipe)
        case "bf16", _:
            return Bf16Linear()
        case _:
            return ExactFp32Linear()
