"""Process groups of Megatron Core: one grid in a process, made once."""

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import distributed
from torch.distributed import ProcessGroup

from fp8core.config.megatron import MegatronConfig
from fp8core.training.megatron.names import Place

_SEED = 1  # No dropout and no drawn weights: nothing depends on it.


def join(megatron: MegatronConfig, device: torch.device) -> None:
    """Make this process part of the grid; a process alone needs no launcher.

    With more GPUs than one, `torch.distributed` must have been initialised by who started the processes.
    """
    if not distributed.is_initialized():
        assert megatron.gpus == 1, f"{megatron.gpus} processes are to be started by a launcher"
        backend = "gloo" if device.type == "cpu" else "nccl"
        distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    assert distributed.get_world_size() == megatron.gpus, "the launcher started another number of processes"
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
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    )
    wanted = (megatron.tensor_parallel, megatron.pipeline_parallel, megatron.expert_parallel)
    assert held == wanted, f"this process is part of the grid {held} already, and cannot join {wanted}"


def here() -> Place:
    """Where this process stands."""
    return Place(
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )


def tensor_group() -> ProcessGroup:
    """Processes that share every linear layer with this one."""
    group: ProcessGroup = parallel_state.get_tensor_model_parallel_group()
    return group


def data_group() -> ProcessGroup:
    """Processes that hold the same weights but for experts, and see other rows."""
    group: ProcessGroup = parallel_state.get_data_parallel_group()
    return group
