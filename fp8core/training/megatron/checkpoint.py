"""Training state as Megatron describes it, in torch's distributed format: every process writes its part, and a grid of
another shape reads it. Megatron's own writer (`dist_checkpointing.save`) needs a GPU."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor, LocalShardsContainer
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save


def save_state(folder: Path, state: ShardedStateDict) -> None:
    """Write the parts of all processes; what several hold is written by one of them.

    Args:
        folder: may exist, and is the same for all processes.
        state: `ShardedTensor` and factories of several, by name.
    """
    parts = [part for _, entry in _built(state) for part in _tensors(entry) if is_main_replica(part.replica_id)]
    save(_by_key(parts), checkpoint_id=folder)


def load_state(folder: Path, wanted: ShardedStateDict) -> dict[str, Tensor]:
    """This process's tensors of what `save_state` wrote, by the names in `wanted`."""
    built = dict(_built(wanted))
    parts = [part for entry in built.values() for part in _tensors(entry)]
    for part in parts:
        part.data = torch.empty_like(part.data)
    load(_by_key(parts), checkpoint_id=folder)
    return {name: _merged(wanted[name], entry) for name, entry in built.items()}


def _built(state: ShardedStateDict) -> Iterator[tuple[str, Any]]:
    """Each entry as a tensor, or as the list or mapping of tensors that its factory makes."""
    for name, entry in state.items():
        yield name, entry.build() if isinstance(entry, ShardedTensorFactory) else entry


def _tensors(entry: Any) -> list[ShardedTensor]:
    return [entry] if isinstance(entry, ShardedTensor) else list(nested_values(entry))


def _merged(wanted: ShardedTensor | ShardedTensorFactory, entry: Any) -> Tensor:
    if isinstance(wanted, ShardedTensor):
        loaded: Tensor = entry.data
        return loaded
    merged: Tensor = wanted.merge_fn([part.data for part in _tensors(entry)])
    return merged


def _by_key(parts: list[ShardedTensor]) -> dict[str, Any]:
    """What torch's format takes: for each tensor of the whole model the parts that are here."""
    found: dict[str, list[CheckpointableShardedTensor]] = defaultdict(list)
    for part in parts:
        found[part.key].append(CheckpointableShardedTensor.from_sh_ten(part))
    return {key: here[0] if len(here) == 1 else LocalShardsContainer(here) for key, here in found.items()}
