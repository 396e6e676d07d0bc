"""Process groups of Megatron Core: one grid in a process, made once."""

import atexit
import hashlib
import json
from collections.abc import Mapping
from datetime import timedelta

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor, distributed
from torch.distributed import HashStore, ProcessGroup, all_gather_object, get_world_size  # type: ignore[attr-defined]

from fp8core.config.training import MegatronConfig
from fp8core.numerics.fingerprint import policy_digest
from fp8core.training.megatron.conversion import ParallelRank

# All wait while one process writes a checkpoint of a large policy.
_TIMEOUT = timedelta(minutes=30)
_SEED = 1  # No dropout and no drawn weights: nothing depends on it.


def join(megatron: MegatronConfig, ranks: int, device: torch.device) -> None:
    """Make this process part of the grid: with others in torch's default group, which exists then, or alone."""
    if ranks == 1 and not distributed.is_initialized():
        backend = "gloo" if device.type == "cpu" else "nccl"
        distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        atexit.register(destroy)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=megatron.tensor_parallel,
            expert_model_parallel_size=megatron.expert_parallel,
            expert_tensor_parallel_size=1,
            distributed_timeout_minutes=_TIMEOUT // timedelta(minutes=1),
        )
        if device.type == "cuda":
            model_parallel_cuda_manual_seed(_SEED)
    own = (
        distributed.get_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    )
    layout = (ranks, megatron.tensor_parallel, megatron.expert_parallel)
    assert own == layout, f"this process is part of the grid {own}, and cannot join {layout} before it leaves"


def destroy() -> None:
    """After the last trainer of this process; all processes call it together."""
    if distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        distributed.destroy_process_group()


def own_rank() -> ParallelRank:
    return ParallelRank(
        parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_expert_model_parallel_rank()
    )


def tensor_group() -> ProcessGroup:
    group: ProcessGroup = parallel_state.get_tensor_model_parallel_group()
    return group


def data_group() -> ProcessGroup:
    """Processes that hold the same weights but for experts, and see other rows."""
    group: ProcessGroup = parallel_state.get_data_parallel_group()
    return group


def joint_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over the digests of every process's tensors, in the order of their ranks; of one process its own."""
    own = policy_digest(tensors)
    if get_world_size() == 1:
        return own
    digests = [""] * get_world_size()
    all_gather_object(digests, own)
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()
