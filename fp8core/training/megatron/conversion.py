"""Weights from the Hugging Face layout to each GPU's share in Megatron's, and back, byte for byte.

Everything here is a function of tensors and of a place in the grid; no process group is needed. Weights are converted
in high precision and quantised in the Hugging Face layout alone: the rows of a head of 64 would share a 128 x 128 tile
with other rows once Q, K and V take turns.
"""

from collections.abc import Iterable, Mapping
from itertools import groupby

import torch
from torch import Tensor

from fp8core.config.megatron import MegatronConfig
from fp8core.models.architecture import Architecture
from fp8core.training.megatron.grid import padded_vocabulary
from fp8core.training.megatron.names import Parameter, Place, Style, parameters


def share(
    arch: Architecture, megatron: MegatronConfig, style: Style, place: Place, policy: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """One GPU's parameters by Megatron's names.

    Args:
        arch: the model.
        megatron: the grid.
        style: whose layers hold the parameters.
        place: of the GPU.
        policy: tensors by Hugging Face name, any type and device.
    """
    return {
        parameter.name: _cut(_joined(arch, megatron, parameter, policy), parameter, megatron.tensor_parallel, place)
        for parameter in parameters(arch, megatron, style, place)
    }


def policy_of(
    arch: Architecture, megatron: MegatronConfig, style: Style, shares: Mapping[Place, Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """The whole policy by Hugging Face name.

    Args:
        arch, megatron, style: as for `share`.
        shares: of places that together hold everything; in a small grid not every combination of ranks exists.
    """
    policy: dict[str, Tensor] = {}
    for pipeline, expert in sorted({(place.pipeline, place.expert) for place in shares}):
        for parameter in parameters(arch, megatron, style, Place(0, pipeline, expert)):
            if not policy.keys() >= set(parameter.sources):
                held = [shares[place][parameter.name] for place in _holders(parameter, shares, pipeline, expert)]
                policy |= zip(parameter.sources, _parted(arch, parameter, _uncut(held, parameter)), strict=True)
    return policy


def _holders(parameter: Parameter, places: Iterable[Place], pipeline: int, expert: int) -> list[Place]:
    """The places that together hold a parameter, in the order of its cuts: experts know no tensor parallelism."""
    stage = sorted(place for place in places if place.pipeline == pipeline)
    if ".experts." in parameter.name:
        return [next(place for place in stage if place.expert == expert)]
    return [next(found) for _, found in groupby(stage, key=lambda place: place.tensor)]


def _joined(arch: Architecture, megatron: MegatronConfig, parameter: Parameter, policy: Mapping[str, Tensor]) -> Tensor:
    parts = [policy[name] for name in parameter.sources]
    match parameter.join:
        case "copy":
            return parts[0]
        case "one_after_another":
            return torch.cat(parts)
        case "by_kv_group":
            groups = [part.unflatten(0, (arch.num_kv_heads, -1)) for part in parts]
            return torch.cat(groups, dim=1).flatten(0, 1)
        case "rows_padded":
            padding = padded_vocabulary(arch, megatron.tensor_parallel) - arch.vocab_size
            return torch.cat([parts[0], parts[0].new_zeros(padding, parts[0].shape[1])])


def _parted(arch: Architecture, parameter: Parameter, whole: Tensor) -> list[Tensor]:
    match parameter.join:
        case "copy":
            return [whole]
        case "one_after_another":
            return list(whole.chunk(len(parameter.sources)))
        case "by_kv_group":
            heads = (arch.num_heads // arch.num_kv_heads, 1, 1)
            groups = whole.unflatten(0, (arch.num_kv_heads, -1))
            parts = groups.split([count * arch.head_dim for count in heads], dim=1)
            return [part.flatten(0, 1) for part in parts]
        case "rows_padded":
            return [whole[: arch.vocab_size]]


def _cut(whole: Tensor, parameter: Parameter, count: int, place: Place) -> Tensor:
    """A tensor-parallel share: always a tensor of its own."""
    match parameter.cut:
        case "no":
            return whole.clone()
        case "rows":
            return whole.chunk(count)[place.tensor].clone()
        case "columns":
            return whole.chunk(count, dim=1)[place.tensor].clone()
        case "rows_of_each":
            return torch.cat([part.chunk(count)[place.tensor] for part in whole.chunk(2)])


def _uncut(shares: list[Tensor], parameter: Parameter) -> Tensor:
    match parameter.cut:
        case "no":
            return shares[0].clone()
        case "rows":
            return torch.cat(shares)
        case "columns":
            return torch.cat(shares, dim=1)
        case "rows_of_each":
            halves = zip(*(held.chunk(2) for held in shares), strict=True)
            return torch.cat([part for half in halves for part in half])
