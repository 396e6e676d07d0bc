"""A packed trainer on the CPU, for fixtures and for processes that tests start."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fp8core.config.loss import LossConfig
from fp8core.config.precision import PrecisionContract
from fp8core.config.training import CorrectionConfig, TrainingConfig
from fp8core.models.architecture import Architecture
from fp8core.models.weights import rollout_formats, training_formats
from fp8core.rl.objective import Objective
from fp8core.training.packed.trainer import PackedFormats, PackedTrainer
from fp8core.training.ranks import ALONE, Ranks


def packed(
    masters: Mapping[str, Tensor],
    contract: PrecisionContract,
    arch: Architecture,
    training: TrainingConfig | None = None,
    objective: Objective | None = None,
    ranks: Ranks = ALONE,
) -> PackedTrainer:
    formats = training_formats(contract, arch.num_layers), rollout_formats(contract, arch.num_layers)
    objective = objective or Objective(LossConfig(), CorrectionConfig())
    given = training or TrainingConfig(), objective, torch.device("cpu"), ranks
    return PackedTrainer(arch, masters, PackedFormats(*formats, 4096), *given)
