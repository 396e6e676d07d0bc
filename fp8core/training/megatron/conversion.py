"""The parameters of Megatron Core's GPT that hold those of the Hugging Face layout, and how each GPU's are cut.

| Megatron                   | Hugging Face           | joined by           | cut over tensor parallel |
|----------------------------|------------------------|---------------------|--------------------------|
| embedding, output_layer    | embed_tokens, lm_head  | padding of the rows | rows                     |
| self_attention.linear_qkv  | q_proj, k_proj, v_proj | turn by KV group    | rows                     |
| self_attention.linear_proj | o_proj                 | -                   | columns                  |
| mlp.linear_fc1             | gate_proj, up_proj     | one after the other | rows, of each            |
| mlp.linear_fc2             | down_proj              | -                   | columns                  |
| norms, router              | norms, gate            | -                   | not                      |

Experts are cut over expert parallel alone.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import all_gather_object, broadcast, get_rank, get_world_size

from fp8core.config.training import MegatronConfig
from fp8core.models.architecture import Architecture
from fp8core.models.families import layer_parts
from fp8core.models.families.family import LayerParts
from fp8core.numerics.e4m3 import round_up
from fp8core.numerics.recipe import TILE

Join = Literal["copy", "rows_padded", "by_kv_group", "one_after_another"]
Cut = Literal["no", "rows", "columns", "rows_of_each"]


@dataclass(frozen=True)
class Style:
    """Whose layers hold the parameters: the norm before a linear in that linear, all experts of a GPU in one module."""

    norms_in_linears: bool
    experts_together: bool


TRANSFORMER_ENGINE = Style(norms_in_linears=True, experts_together=True)


@dataclass(frozen=True)
class Parameter:
    """A parameter of one GPU's model: its name there, the Hugging Face parameters it holds, and how."""

    name: str
    sources: tuple[str, ...]
    join: Join = "copy"
    cut: Cut = "no"


@dataclass(frozen=True, order=True)
class ParallelRank:
    """Where a GPU stands in the grid."""

    tensor: int = 0
    expert: int = 0


def padded_vocabulary(arch: Architecture, tensor_parallel: int) -> int:
    """Rows of the embedding and the head: each GPU of a tensor-parallel group has a multiple of 128."""
    return round_up(arch.vocab_size, TILE * tensor_parallel)


def token_multiple(megatron: MegatronConfig) -> int:
    """The multiple that the tokens of a micro-batch are padded to: 128 on each GPU of a sequence-parallel group."""
    return TILE * (megatron.tensor_parallel if megatron.sequence_parallel else 1)


def parallel_ranks(megatron: MegatronConfig) -> list[ParallelRank]:
    """Every rank that holds something different, in order."""
    return [
        ParallelRank(tensor, expert)
        for tensor in range(megatron.tensor_parallel)
        for expert in range(megatron.expert_parallel)
    ]


def parameters(arch: Architecture, megatron: MegatronConfig, style: Style, expert: int) -> Iterator[Parameter]:
    """Those of a GPU with this share of the experts."""
    yield Parameter("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "rows_padded", "rows")
    parts = layer_parts(arch)
    for layer in range(arch.num_layers):
        yield from _attention(parts, style, f"decoder.layers.{layer}", f"model.layers.{layer}")
        if arch.experts is not None and layer in arch.sparse_layers:
            count = arch.experts.count // megatron.expert_parallel
            own = range(expert * count, (expert + 1) * count)
            yield from _experts(parts, style, own, f"decoder.layers.{layer}", f"model.layers.{layer}")
        else:
            yield from _mlp(parts, style, f"decoder.layers.{layer}", f"model.layers.{layer}")
    yield Parameter("decoder.final_layernorm.weight", ("model.norm.weight",))
    if not arch.tie_embeddings:
        yield Parameter("output_layer.weight", ("lm_head.weight",), "rows_padded", "rows")


def _attention(parts: LayerParts, style: Style, into: str, source: str) -> Iterator[Parameter]:
    linear = f"{into}.self_attention.linear_qkv"
    projections = f"{source}.self_attn"
    norm = f"{linear}.layer_norm_weight" if style.norms_in_linears else f"{into}.input_layernorm.weight"
    yield Parameter(norm, (f"{source}.{parts.attention_norm}.weight",))
    qkv = tuple(f"{projections}.{name}_proj.weight" for name in "qkv")
    yield Parameter(f"{linear}.weight", qkv, "by_kv_group", "rows")
    if parts.qkv_bias:
        biases = tuple(f"{projections}.{name}_proj.bias" for name in "qkv")
        yield Parameter(f"{linear}.bias", biases, "by_kv_group", "rows")
    if parts.qk_norm:
        for name in "qk":
            yield Parameter(f"{into}.self_attention.{name}_layernorm.weight", (f"{projections}.{name}_norm.weight",))
    yield Parameter(f"{into}.self_attention.linear_proj.weight", (f"{projections}.o_proj.weight",), cut="columns")


def _mlp(parts: LayerParts, style: Style, into: str, source: str) -> Iterator[Parameter]:
    fc1 = f"{into}.mlp.linear_fc1"
    norm = f"{fc1}.layer_norm_weight" if style.norms_in_linears else f"{into}.pre_mlp_layernorm.weight"
    yield Parameter(norm, (f"{source}.{parts.mlp_norm}.weight",))
    yield Parameter(f"{fc1}.weight", _gate_up(f"{source}.mlp"), "one_after_another", "rows_of_each")
    yield Parameter(f"{into}.mlp.linear_fc2.weight", (f"{source}.mlp.down_proj.weight",), cut="columns")


def _experts(parts: LayerParts, style: Style, own: range, into: str, source: str) -> Iterator[Parameter]:
    # The router reads the normed states too, so that this norm is in no linear.
    yield Parameter(f"{into}.pre_mlp_layernorm.weight", (f"{source}.{parts.mlp_norm}.weight",))
    yield Parameter(f"{into}.mlp.router.weight", (f"{source}.mlp.gate.weight",))
    for local, expert in enumerate(own):
        place = "{}.weight" + str(local) if style.experts_together else f"local_experts.{local}.{{}}.weight"
        fc1, fc2 = (f"{into}.mlp.experts.{place.format(linear)}" for linear in ("linear_fc1", "linear_fc2"))
        yield Parameter(fc1, _gate_up(f"{source}.mlp.experts.{expert}"), "one_after_another")
        yield Parameter(fc2, (f"{source}.mlp.experts.{expert}.down_proj.weight",))


def _gate_up(prefix: str) -> tuple[str, str]:
    return f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"


def share(
    arch: Architecture, megatron: MegatronConfig, style: Style, rank: ParallelRank, policy: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """One GPU's parameters by Megatron's names; `policy`: tensors by Hugging Face name, of any type and device."""
    return {
        each.name: _cut(_megatron_parameter(arch, megatron, each, policy), each, megatron.tensor_parallel, rank)
        for each in parameters(arch, megatron, style, rank.expert)
    }


def policy_of(
    arch: Architecture, megatron: MegatronConfig, style: Style, shares: Mapping[ParallelRank, Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """The whole policy by Hugging Face name, from the shares of ranks that together hold everything."""
    policy: dict[str, Tensor] = {}
    for expert in sorted({rank.expert for rank in shares}):
        for parameter in parameters(arch, megatron, style, expert):
            if not policy.keys() >= set(parameter.sources):
                parts = [shares[rank][parameter.name] for rank in _holders(parameter, shares, expert)]
                policy |= zip(
                    parameter.sources, _policy_tensors(arch, parameter, _uncut(parts, parameter)), strict=True
                )
    return policy


def _holders(parameter: Parameter, ranks: Iterable[ParallelRank], expert: int) -> list[ParallelRank]:
    """The ranks that together hold a parameter, in the order of its cuts: experts are not cut by tensor parallelism."""
    if ".experts." in parameter.name:
        return [next(rank for rank in sorted(ranks) if rank.expert == expert)]
    return [next(same_tensor) for _, same_tensor in groupby(sorted(ranks), key=lambda rank: rank.tensor)]


def _megatron_parameter(
    arch: Architecture, megatron: MegatronConfig, parameter: Parameter, policy: Mapping[str, Tensor]
) -> Tensor:
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


def _policy_tensors(arch: Architecture, parameter: Parameter, whole: Tensor) -> list[Tensor]:
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


def _cut(whole: Tensor, parameter: Parameter, count: int, rank: ParallelRank) -> Tensor:
    """Always a tensor of its own."""
    match parameter.cut:
        case "no":
            return whole.clone()
        case "rows":
            return whole.chunk(count)[rank.tensor].clone()
        case "columns":
            return whole.chunk(count, dim=1)[rank.tensor].clone()
        case "rows_of_each":
            return torch.cat([part.chunk(count)[rank.tensor] for part in whole.chunk(2)])


def _uncut(shares: list[Tensor], parameter: Parameter) -> Tensor:
    match parameter.cut:
        case "no":
            return shares[0].clone()
        case "rows":
            return torch.cat(shares)
        case "columns":
            return torch.cat(shares, dim=1)
        case "rows_of_each":
            halves = zip(*(share.chunk(2) for share in shares), strict=True)
            return torch.cat([part for half in halves for part in half])


Spec = tuple[torch.dtype, tuple[int, ...]]


def gather_policy(
    rank: ParallelRank, tensors: Mapping[str, Tensor], device: torch.device
) -> dict[ParallelRank, dict[str, Tensor]]:
    """The tensors of every rank, by Megatron's names; every process calls it at the same time.

    The first process has them on the CPU, the others have nothing. `device`: that processes exchange tensors on."""
    own = (rank, {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()})
    specs_by_rank: list[tuple[ParallelRank, dict[str, Spec]]] = [own] * get_world_size()
    all_gather_object(specs_by_rank, own)
    first = get_rank() == 0
    parts = dict[ParallelRank, dict[str, Tensor]]()
    for process, name in senders(specs_by_rank):
        of, specs = specs_by_rank[process]
        dtype, shape = specs[name]
        here = process == get_rank()
        tensor = tensors[name].detach().contiguous() if here else torch.empty(shape, dtype=dtype, device=device)
        broadcast(tensor, src=process)
        if first:
            parts.setdefault(of, {})[name] = tensor.cpu()
    return parts


def senders(ranks: Sequence[tuple[ParallelRank, Mapping[str, object]]]) -> Iterator[tuple[int, str]]:
    """The sender of each tensor, in an order that all agree on: nothing is sent twice.

    Experts are alike wherever the share of experts is, all else wherever the share of the linears is.
    """
    processes: dict[ParallelRank, int] = {}
    for process, (rank, _) in enumerate(ranks):
        processes.setdefault(rank, process)
    firsts: dict[tuple[bool, int], ParallelRank] = {}
    for rank in sorted(processes):
        for of_experts, part in ((True, rank.expert), (False, rank.tensor)):
            firsts.setdefault((of_experts, part), rank)
    for (of_experts, _), rank in firsts.items():
        names = ranks[processes[rank]][1]
        yield from ((processes[rank], name) for name in names if (".experts." in name) == of_experts)
