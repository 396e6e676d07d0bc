"""What a trainer asks of an optimiser, and which one a device takes."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from torch import Tensor

from fp8core.config.run import TrainingConfig
from fp8core.training.megatron.local_optimiser import LocalOptimiser
from fp8core.training.megatron.megatron_optimiser import MegatronOptimiser
from fp8core.training.megatron.model import PolicyModel


class Optimiser(Protocol):
    """Owns the FP32 masters of this process and the gradients of all."""

    def clear(self) -> None:
        """Forget all gradients."""
        ...

    def finish(self) -> float:
        """Complete the gradients over all processes and return their global norm."""
        ...

    def step(self, norm: float, learning_rate: float) -> None:
        """Clip by the norm that `finish` returned and update."""
        ...

    def gradients(self) -> dict[str, Tensor]:
        """Of this process, by Megatron's names, after `finish`."""
        ...

    def masters(self) -> dict[str, Tensor]:
        """FP32 masters of this process, whole parameters or its parts of them, by Megatron's names."""
        ...

    def save(self, folder: Path, model: ShardedStateDict) -> None:
        """Write masters and moments, every process its own; `model` says which part of what a parameter is."""
        ...

    def load(self, folder: Path, model: ShardedStateDict, updates: int) -> None:
        """Take what `save` wrote after so many updates; parameters follow."""
        ...


OptimiserFactory = Callable[[PolicyModel, TrainingConfig], Optimiser]


def optimiser_for(device: torch.device) -> OptimiserFactory:
    """Megatron's own on a GPU."""
    return MegatronOptimiser if device.type == "cuda" else LocalOptimiser
