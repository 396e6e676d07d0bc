"""Megatron Core as a registered trainer."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fp8core.config.capability import Environment, this_node
from fp8core.config.run import RunConfig
from fp8core.config.training import TrainingConfig
from fp8core.errors import refuse
from fp8core.models.architecture import Architecture
from fp8core.rollout.registry import longest_sequence
from fp8core.training.megatron.requirements import (
    MEMORY,
    grid_refusals,
    machine_refusals,
    package_refusals,
    required_environment,
    suggested_environment,
)
from fp8core.training.memory import Parallel
from fp8core.training.ranks import Ranks
from fp8core.training.registry import TrainerEntry
from fp8core.training.trainer import LocalTrainer

_ALONE = {"tensor_parallel": 1, "pipeline_parallel": 1, "expert_parallel": 1, "sequence_parallel": False}


def _build(config: RunConfig, arch: Architecture, masters: Mapping[str, Tensor], ranks: Ranks) -> LocalTrainer:
    from fp8core.training.megatron.trainer import process_trainer

    return process_trainer(config, arch, masters, ranks)


def _grid(config: RunConfig) -> Parallel:
    spread = config.training.megatron
    return Parallel(config.cluster.ranks, spread.tensor_parallel, spread.pipeline_parallel, spread.expert_parallel)


def _alone(training: TrainingConfig) -> TrainingConfig:
    return training.model_copy(update={"megatron": training.megatron.model_copy(update=_ALONE)})


def _check_model(config: RunConfig, arch: Architecture) -> Iterator[str]:
    return grid_refusals(arch, config.training.megatron, config.precision, longest_sequence(config, arch))


def _requirements() -> str:
    node = this_node(_PACKAGES)
    refuse(package_refusals(node))
    formats = "FP32 on this CPU" if node.platform == "cpu" else "block FP8 and BF16 on Hopper"
    return f"megatron-core {node.packages['megatron-core']}, {formats}"


_PACKAGES = "megatron-core", "transformer-engine"

TRAINER = TrainerEntry(
    name="megatron",
    packages=_PACKAGES,
    chosen=lambda training: training.trainer == "megatron",
    build=_build,
    arithmetic="own",
    scores_updates=False,
    device=lambda _: "cuda" if torch.cuda.is_available() else "cpu",
    requirements=_requirements,
    check=machine_refusals,
    check_model=_check_model,
    environment=lambda config: Environment(required_environment(config), suggested_environment(config)),
    grid=_grid,
    alone=_alone,
    saves_shards=True,
    needs_gpu=lambda config: config.cluster.ranks > 1,
    memory=lambda _: MEMORY,
)
