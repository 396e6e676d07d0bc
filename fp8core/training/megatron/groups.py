"""Process groups of Megatron Core: one grid in a process, made once."""

from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import distributed
from torch.distributed import FileStore, HashStore, ProcessGroup  # type: ignore[attr-defined]

from fp8core.config.megatron import MegatronConfig
from fp8core.training.megatron.names import Place

_SEED = 1  # No dropout and no drawn weights: nothing depends on it.


def meet(folder: Path, rank: int, count: int, device: torch.device) -> None:
    """Find the other processes by a folder that all of them see."""
    store = FileStore(str(folder / "rendezvous"), count)
    distributed.init_process_group(_backend(device), store=store, rank=rank, world_size=count)


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
    """Give up the grid, when the last trainer of this process is gone."""
    if distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        distributed.destroy_process_group()


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
