"""Training state in Megatron's distributed format: every process writes its part, any grid reads it."""

from pathlib import Path

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, StateDict


def save_state(folder: Path, state: ShardedStateDict) -> None:
    """Write the parts of all processes; the folder does not exist."""
    folder.mkdir(exist_ok=True)
    dist_checkpointing.save(state, str(folder))


def load_state(folder: Path, wanted: ShardedStateDict) -> StateDict:
    """This process's parts of what `save_state` wrote."""
    return dist_checkpointing.load(wanted, str(folder))
