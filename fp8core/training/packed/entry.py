"""The trainer for packed sequences as a registered trainer."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8core.config.capability import Environment, Node, this_platform
from fp8core.config.run import RunConfig
from fp8core.config.training import TrainingConfig
from fp8core.models.architecture import Architecture
from fp8core.models.weights import rollout_formats, training_formats
from fp8core.rl.objective import Objective
from fp8core.rollout.registry import engine_entry
from fp8core.training.lora import adapter_refusals
from fp8core.training.memory import Parallel
from fp8core.training.packed.requirements import (
    MEMORY,
    contract_refusals,
    model_refusals,
    packs,
    products,
    required_environment,
)
from fp8core.training.ranks import ALONE, Ranks
from fp8core.training.registry import TrainerEntry

if TYPE_CHECKING:
    from fp8core.training.packed.trainer import PackedTrainer


def _on_gpu(training: TrainingConfig) -> bool:
    return training.device == "cuda"


def _build(
    config: RunConfig, arch: Architecture, masters: Mapping[str, Tensor], ranks: Ranks = ALONE
) -> "PackedTrainer":
    from fp8core.training.packed.trainer import PackedFormats, PackedTrainer

    formats = PackedFormats(
        training_formats(config.precision, arch.num_layers),
        rollout_formats(config.precision, arch.num_layers),
        longest=engine_entry(config).longest(config, arch),
        amax_only=config.calibration.statistic == "amax",
    )
    objective = Objective(config.loss, config.correction)
    device = torch.device(config.training.device)
    return PackedTrainer(arch, masters, formats, config.training, objective, device, ranks, config.seed)


def _check(config: RunConfig, node: Node) -> Iterator[str]:
    if config.cluster.ranks > 1 and not _on_gpu(config.training):
        yield (
            f"cluster.ranks={config.cluster.ranks}: on a CPU training.packed trains in one process; set it to 1, or "
            "training.packed to false"
        )
    yield from contract_refusals(config.precision, config.training.device, node.platform)


def _check_model(config: RunConfig, arch: Architecture) -> Iterator[str]:
    yield from model_refusals(arch, config.precision, config.training.device)
    yield from adapter_refusals(arch, config.training.lora)


def _requirements() -> str:
    return "references of its kernels on this CPU" if this_platform() == "cpu" else "block FP8 and BF16 on Hopper"


TRAINER = TrainerEntry(
    name="packed",
    chosen=lambda training: training.trainer == "torch" and training.computes_packed,
    build=_build,
    arithmetic="kernels",
    scores_updates=True,
    device=lambda training: training.device,
    build_sft=_build,
    requirements=_requirements,
    check=_check,
    check_model=_check_model,
    environment=lambda config: Environment(required_environment(config.training)),
    grid=lambda config: Parallel(config.cluster.ranks) if _on_gpu(config.training) else None,
    needs_gpu=lambda config: _on_gpu(config.training),
    memory=lambda training: MEMORY if _on_gpu(training) else None,
    products=products,
    packs=packs,
)
