"""Training state in Megatron's format: every process writes its part, and a grid of another shape reads it."""

import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, is_main_replica
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

_THREADS = 2


def save_state(folder: Path, state: dict[str, Any]) -> None:
    """Write the parts of all processes; what several hold is written by one of them.

    Args:
        folder: may exist, and is the same for all processes.
        state: `ShardedTensor` and factories of several, by name, nested; whatever else is in it, all processes share.
    """
    folder.mkdir(exist_ok=True)
    dist_checkpointing.save(state, str(folder), sharded_strategy=ThreadedWriter())


def load_state(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """This process's tensors of what `save_state` wrote, by the names in `wanted`."""
    with warnings.catch_warnings():
        # Megatron calls torch's loader by its old name.
        warnings.filterwarnings("ignore", "`load_state_dict` is deprecated", FutureWarning)
        loaded: dict[str, Any] = dist_checkpointing.load(wanted, str(folder))
    return loaded


class ThreadedWriter(SaveShardedStrategy):
    """Megatron's format, written by threads of this process.

    Its own writer forks a process for each file and leaves one behind for their results, which outlives a training that
    is killed and holds its standard output open.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Objects are written beside tensors."""
        return True

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str) -> None:
        """Write this process's parts."""
        parts = defaultdict(list)
        for part in nested_values(sharded_state_dict):
            if is_main_replica(part.replica_id):
                parts[part.unique_key if isinstance(part, ShardedObject) else part.key].append(part)
        writer = FileSystemWriter(checkpoint_dir, thread_count=_THREADS)
        planner = MCoreSavePlanner(flatten_state_dict=False)
        save(mcore_to_pyt_state_dict(parts), storage_writer=writer, planner=planner)
