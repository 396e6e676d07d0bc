"""The formats one side of the contract computes in, as objects the decoder calls."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fp8core.config.precision import LinearFormat as LinearName
from fp8core.config.precision import PointsName, PrecisionContract, SidePrecision
from fp8core.models.experts import MlpFormats
from fp8core.models.weights import LayerNames, StoredNames
from fp8core.numerics.attention import AttentionFormat, Bf16Attention, Fp8Attention, Fp32Attention
from fp8core.numerics.e4m3 import ScaleRule
from fp8core.numerics.linear import Bf16Linear, Fp8BlockLinear, Fp8ForwardLinear, Fp32Linear, LinearFormat
from fp8core.numerics.logprobs import Bf16Head, Fp32Head, HeadFormat
from fp8core.numerics.rounding import (
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

_POINTS: dict[PointsName, RoundingPoints] = {
    "stepwise": STEPWISE,
    "native": NATIVE,
    "kernels": KERNELS,
    "fused": FUSED,
}


@dataclass(frozen=True)
class LayerFormats:
    """Formats of one layer: its four linears, and cache and attention."""

    qkv: LinearFormat
    output: LinearFormat
    gate_up: LinearFormat
    down: LinearFormat
    attention: AttentionFormat

    @property
    def linears(self) -> tuple[LinearFormat, LinearFormat, LinearFormat, LinearFormat]:
        """The four linears in the order they are computed."""
        return self.qkv, self.output, self.gate_up, self.down


@dataclass(frozen=True)
class Formats:
    """Everything a decoder needs to know about precision.

    Attributes:
        layers: linears and attention of each layer.
        head: output head.
        rounding: format of values between operations.
        points: what is rounded inside operations; `with_points` changes it.
        scale_rule: rule of every quantiser.
    """

    layers: tuple[LayerFormats, ...]
    head: HeadFormat
    rounding: Rounding
    points: RoundingPoints
    scale_rule: ScaleRule

    def stored_names(self) -> StoredNames:
        """The format that every parameter is stored in."""
        names: dict[str, LinearName] = {"fp8_block": "fp8_block", "bf16": "bf16", "fp32": "fp32"}
        return StoredNames(
            values="fp32" if self.rounding is keep_fp32 else "bf16",
            layers=tuple(LayerNames(*(names[linear.name] for linear in layer.linears)) for layer in self.layers),
        )

    def describe(self) -> dict[str, object]:
        """Names of the formats; linears and attention by layer."""
        return {
            "linear": [_names(layer.linears) for layer in self.layers],
            "attention": _names(layer.attention for layer in self.layers),
            "head": self.head.name,
            "scale_rule": self.scale_rule,
            "rounding_points": self.points.name,
        }

    def mlp(self, layer: int) -> MlpFormats:
        """Of a layer's SwiGLU block, or of its experts."""
        form = self.layers[layer]
        return MlpFormats(form.gate_up, form.down, self.rounding, self.points)

    def with_points(self, points: RoundingPoints) -> "Formats":
        """The same with other roundings inside norms, rotary positions, SwiGLU, BF16 attention and routers."""
        bf16 = Bf16Attention(points.weights)
        layers = (replace(form, attention=bf16) if form.attention.name == "bf16" else form for form in self.layers)
        return replace(self, points=points, layers=tuple(layers))

    def with_attention(self, attention: AttentionFormat) -> "Formats":
        """The same with another attention in every layer."""
        return replace(self, layers=tuple(replace(layer, attention=attention) for layer in self.layers))


def _names(forms: Iterable[LinearFormat | AttentionFormat]) -> str:
    """The name that all share, or every name that occurs."""
    return "+".join(dict.fromkeys(form.name for form in forms))


def rollout_formats(contract: PrecisionContract, num_layers: int) -> Formats:
    """Formats of the rollout side; it never runs a backward."""
    return _formats(contract, contract.rollout, contract.rollout.linear, num_layers)


def training_formats(contract: PrecisionContract, num_layers: int) -> Formats:
    """Formats of the training side."""
    return _formats(contract, contract.training, contract.training.backward_format, num_layers)


def reference_formats(num_layers: int) -> Formats:
    """FP32 throughout: what `transformers` computes with FP32 weights."""
    fp32 = SidePrecision(linear="fp32", kv_cache="fp32")
    return _formats(PrecisionContract(rollout=fp32), fp32, "fp32", num_layers)


def _formats(contract: PrecisionContract, side: SidePrecision, backward: LinearName, num_layers: int) -> Formats:
    inner = _linear(side.linear, backward, contract.scale_rule)
    outer = Fp32Linear() if side.linear == "fp32" else Bf16Linear()
    first, last = contract.bf16_first_layers, num_layers - contract.bf16_last_layers
    points = NOWHERE if side.linear == "fp32" else _POINTS[contract.rounding_points]
    bf16 = Bf16Attention(points.weights)
    forms: dict[str, AttentionFormat] = {"fp8": Fp8Attention(), "bf16": bf16, "fp32": Fp32Attention()}
    attention = forms[side.kv_cache]
    head: dict[str, HeadFormat] = {"fp32": Fp32Head(), "bf16": Bf16Head()}
    return Formats(
        layers=tuple(_layer(inner if first <= i < last else outer, attention) for i in range(num_layers)),
        head=head[side.head],
        rounding=keep_fp32 if side.linear == "fp32" else round_to_bf16,
        points=points,
        scale_rule=contract.scale_rule,
    )


def _layer(linear: LinearFormat, attention: AttentionFormat) -> LayerFormats:
    return LayerFormats(qkv=linear, output=linear, gate_up=linear, down=linear, attention=attention)


def _linear(forward: LinearName, backward: LinearName, rule: ScaleRule) -> LinearFormat:
    match forward, backward:
        case "fp8_block", "fp8_block":
            return Fp8BlockLinear(rule)
        case "fp8_block", _:
            return Fp8ForwardLinear(rule)
        case "bf16", _:
            return Bf16Linear()
        case _:
            return Fp32Linear()
