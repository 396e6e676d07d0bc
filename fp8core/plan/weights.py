"""Sizes of weights by their shapes alone: in the formats they are shipped and held in, whole or sharded."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fp8core.config.precision import LinearFormat
from fp8core.models.architecture import Architecture, parameter_shapes
from fp8core.models.weights import StoredNames, is_linear, layer_of
from fp8core.numerics.e4m3 import TILE

Shapes = Mapping[str, tuple[int, ...]]
Part = list[tuple[Shapes, int]]
"""Parameters of one GPU before they are cut, by the number of GPUs they are cut over."""

_WIDTH: dict[LinearFormat, int] = {"fp8_block": 1, "bf16": 2, "fp32": 4}
_SCALE_BYTES = 4
_EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROUTER = ".mlp.gate.weight"


@dataclass(frozen=True)
class StoredBytes:
    """Bytes of weights as they are shipped: E4M3 codes, their tile scales, and everything that is not block FP8."""

    codes: int
    scales: int
    kept: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.codes + self.scales + self.kept


def stored_bytes(shapes: Shapes, formats: StoredNames) -> StoredBytes:
    """What `models.weights.stored_weights` makes of parameters of these shapes."""
    codes = scales = kept = 0
    for name, shape in shapes.items():
        form, size = formats.of(name), math.prod(shape)
        if form == "fp8_block":
            codes += size
            scales += _SCALE_BYTES * math.prod(math.ceil(side / TILE) for side in shape)
        else:
            kept += size * _WIDTH[form]
    return StoredBytes(codes, scales, kept)


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a decoder: all, those of its layers' linears, of the head (its own or the embedding's), and what
    one token is multiplied by (`active`: fewer than all where there are experts)."""

    total: int
    linear: int
    head: int
    active: int


def count_parameters(arch: Architecture) -> ParameterCounts:
    """Count by shapes."""
    shapes = parameter_shapes(arch)
    total = count(shapes)
    experts = count({name: shape for name, shape in shapes.items() if is_expert(name)})
    idle = 0 if arch.experts is None else experts - experts * arch.experts.per_token // arch.experts.count
    return ParameterCounts(
        total=total,
        linear=count({name: shape for name, shape in shapes.items() if is_linear(name)}),
        head=math.prod(shapes[_EMBEDDING if arch.tie_embeddings else HEAD]),
        active=total - idle,
    )


def count(shapes: Shapes) -> int:
    """Parameters of all shapes."""
    return sum(math.prod(shape) for shape in shapes.values())


def held(part: Part) -> int:
    """Parameters of a part on one GPU."""
    return sum(math.ceil(count(shapes) / parts) for shapes, parts in part)


def is_expert(name: str) -> bool:
    """Whether a parameter is one expert's."""
    return ".experts." in name


def stages(arch: Architecture, count: int) -> list[dict[str, tuple[int, ...]]]:
    """Parameters of each pipeline stage: layers in equal runs, the embedding first, norm and head last.

    A head that shares the embedding's weight has a copy of it in the last stage.
    """
    shapes, run = parameter_shapes(arch), math.ceil(arch.num_layers / count)
    parts: list[dict[str, tuple[int, ...]]] = [{} for _ in range(math.ceil(arch.num_layers / run))]
    for name, shape in shapes.items():
        layer = layer_of(name)
        index = layer // run if layer is not None else 0 if name == _EMBEDDING else -1
        parts[index][name] = shape
    if arch.tie_embeddings:
        parts[-1][_EMBEDDING] = shapes[_EMBEDDING]
    return parts
