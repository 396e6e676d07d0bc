"""Process groups of Megatron Core: one grid in a process, made once."""

from datetime import timedelta
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import distributed
from torch.distributed import FileStore, HashStore, ProcessGroup  # type: ignore[attr-defined]

from fp8core.config.megatron import MegatronConfig
from fp8core.training.megatron.names import Place

# All wait while one process writes a checkpoint of a large policy. Who waits for the dead is ended sooner (`watch`).
_TIMEOUT = timedelta(minutes=30)
_SEED = 1  # No dropout and no drawn weights: nothing depends on it.


def meet(folder: Path, rank: int, count: int, device: torch.device) -> None:
    """Find the other processes by a folder that all of them see."""
    store = FileStore(str(folder / "rendezvous"), count)
    distributed.init_process_group(_backend(device), store=store, rank=rank, world_size=count, timeout=_TIMEOUT)


def join(megatron: MegatronConfig, device: torch.device) -> None:
    """Make this process part of the grid; several (`meet`), or a process alone."""
    if not distributed.is_initialized():
        distributed.init_process_group(_backend(device), store=HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=megatron.tensor_parallel,
            pipeline_model_parallel_size=megatron.pipeline_parallel,
            expert_model_parallel_size=megatron.expert_parallel,
            expert_tensor_parallel_size=1,
            distributed_timeout_minutes=_TIMEOUT // timedelta(minutes=1),
        )
        if device.type == "cuda":
            model_parallel_cuda_manual_seed(_SEED)
    held = (
        distributed.get_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    )
    wanted = (megatron.gpus, megatron.tensor_parallel, megatron.pipeline_parallel, megatron.expert_parallel)
    assert held == wanted, f"this process is part of the grid {held}, and cannot join {wanted} before it leaves"


def leave() -> None:
    """Give up the grid, when the last trainer of this process is gone and the other processes do so too."""
    if distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        distributed.destroy_process_group()


def abandon() -> None:
    """Give up the grid without the others. Over NCCL that waits for them, so the end of this process does it then."""
    if distributed.is_initialized() and distributed.get_backend() == "gloo":
        leave()


def _backend(device: torch.device) -> str:
    return "gloo" if device.type == "cpu" else "nccl"


def here() -> Place:
    """Where this process stands."""
    return Place(
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )


def stages() -> int:
    """Stages of a pipeline."""
    count: int = parallel_state.get_pipeline_model_parallel_world_size()
    return count


def tensor_group() -> ProcessGroup:
    """Processes that share every linear layer with this one."""
    group: ProcessGroup = parallel_state.get_tensor_model_parallel_group()
    return group


def data_group() -> ProcessGroup:
    """Processes that hold the same weights but for experts, and see other rows."""
    group: ProcessGroup = parallel_state.get_data_parallel_group()
    return group
