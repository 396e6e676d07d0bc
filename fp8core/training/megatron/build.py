"""A Megatron trainer of one process, from a configuration."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fp8core.config.run import RunConfig
from fp8core.models.architecture import Architecture
from fp8core.models.formats import rollout_formats
from fp8core.rl.objective import Objective
from fp8core.training.megatron.optimiser import optimiser_for
from fp8core.training.megatron.trainer import MegatronTrainer


def process_device(rank: int) -> torch.device:
    """Where a process computes: the GPU of its rank, or the CPU of a machine without."""
    return torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")


def process_trainer(
    config: RunConfig, arch: Architecture, masters: Mapping[str, Tensor], device: torch.device
) -> MegatronTrainer:
    """This process's part; torch.distributed is up where there are several."""
    return MegatronTrainer(
        arch,
        masters,
        config.precision,
        rollout_formats(config.precision, arch.num_layers),
        config.training,
        Objective(config.loss, config.correction),
        device,
        optimiser_for(device),
        deterministic=config.training.deterministic,
    )
