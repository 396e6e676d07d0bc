"""Tensors of all places of a grid brought to the first process's main memory, one after another.

No GPU has room for the policies of the others, and no machine for a whole policy in each process.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import all_gather_object, broadcast, get_rank, get_world_size

from fp8core.training.megatron.names import Place

Spec = tuple[torch.dtype, tuple[int, ...]]


def gathered(place: Place, held: Mapping[str, Tensor], device: torch.device) -> dict[Place, dict[str, Tensor]]:
    """What every place holds, as `conversion.policy_of` takes it; every process calls it at the same time.

    Args:
        place: of this process.
        held: its tensors by Megatron's names.
        device: that processes exchange tensors on.

    Returns:
        on the first process tensors on the CPU, each of the first place that holds it; on the others nothing.
    """
    own = (place, {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in held.items()})
    found: list[tuple[Place, dict[str, Spec]]] = [own] * get_world_size()
    all_gather_object(found, own)
    first, parts = get_rank() == 0, dict[Place, dict[str, Tensor]]()
    for rank, name in senders(found):
        of, specs = found[rank]
        dtype, shape = specs[name]
        here = rank == get_rank()
        tensor = held[name].detach().contiguous() if here else torch.empty(shape, dtype=dtype, device=device)
        broadcast(tensor, src=rank)
        if first:
            parts.setdefault(of, {})[name] = tensor.cpu()
    return parts


def senders(found: Sequence[tuple[Place, Mapping[str, object]]]) -> Iterator[tuple[int, str]]:
    """Which process sends what, in an order that all agree on: nothing is sent twice.

    Experts are alike wherever the stage and the share of experts are, all else wherever the stage and the share of the
    linears are.
    """
    ranks: dict[Place, int] = {}
    for rank, (place, _) in enumerate(found):
        ranks.setdefault(place, rank)
    firsts: dict[tuple[bool, int, int], Place] = {}
    for place in sorted(ranks):
        for experts, share in ((True, place.expert), (False, place.tensor)):
            firsts.setdefault((experts, place.pipeline, share), place)
    for (experts, _, _), place in firsts.items():
        names = found[ranks[place]][1]
        yield from ((ranks[place], name) for name in names if (".experts." in name) == experts)
