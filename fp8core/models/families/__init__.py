"""The families of decoders that are computed here, one file each.

A family is registered in `FAMILIES`. Decoders, trainers, engines, plans and checkpoints ask `family_of`."""

from collections.abc import Mapping
from typing import Final

from fp8core.models.architecture import Architecture
from fp8core.models.families import llama, mistral, olmo2, qwen2, qwen3, qwen3_moe
from fp8core.models.families.family import Family, LayerParts, Shapes

FAMILIES: Final[Mapping[str, Family]] = {
    each.FAMILY.name: each.FAMILY for each in (llama, mistral, olmo2, qwen2, qwen3, qwen3_moe)
}


def family_of(arch: Architecture) -> Family:
    return FAMILIES[arch.family]


def layer_parts(arch: Architecture) -> LayerParts:
    return family_of(arch).layer


def parameter_shapes(arch: Architecture) -> Shapes:
    return family_of(arch).parameter_shapes(arch)
