"""What each process of a grid does in a test: train a little on several grids, one after another, and write it down."""

from pathlib import Path
from typing import Any

import torch
from megatron_cases import FAMILIES, FP32
from pretended_gpu import pretended_gpu
from torch import distributed

from fp8core.config.run import CorrectionConfig, LossConfig, TrainingConfig
from fp8core.models.architecture import Architecture
from fp8core.models.formats import rollout_formats
from fp8core.rl.objective import Objective
from fp8core.training.megatron import groups
from fp8core.training.megatron.megatron_optimiser import MegatronOptimiser
from fp8core.training.megatron.trainer import MegatronTrainer

CPU = torch.device("cpu")
GRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "data": ("qwen3", {}),
    "data, whole optimisers": ("qwen3", {"distributed_optimizer": False}),
    "data of experts": ("moe", {}),
    "experts": ("moe", {"expert_parallel": 2}),
    "tensor": ("qwen3", {"tensor_parallel": 2}),
    "tensor, tied": ("tied", {"tensor_parallel": 2}),
    "tensor and sequence": ("qwen3", {"tensor_parallel": 2, "sequence_parallel": True, "micro_batch_tokens": 256}),
    "tensor, sequence and experts": (
        "moe",
        {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2, "micro_batch_tokens": 256},
    ),
}


def train(arch: Architecture, masters: Any, batch: Any, gpus: int, folder: Path, **grid: Any) -> dict[str, Any]:
    """Two updates with a checkpoint between them, on this process's part of a grid."""
    megatron = {"gpus": gpus, "micro_batch_tokens": 128, **grid}
    training = TrainingConfig(learning_rate=1e-3, megatron=megatron)
    formats, objective = rollout_formats(FP32, arch.num_layers), Objective(LossConfig(), CorrectionConfig())
    trainer = MegatronTrainer(arch, masters, FP32, formats, training, objective, CPU, MegatronOptimiser, False)
    scored = trainer.logprobs(batch.sequences, 0.9, None)
    first = trainer.step(batch, 0.9, None)
    folder.mkdir(exist_ok=True)
    trainer.save(folder)
    distributed.barrier()
    second = trainer.step(batch, 0.9, None)
    trainer.load(folder)
    found = {
        "logprobs": scored.logprobs,
        "amax": [vars(layer) for layer in scored.statistics.amax()],
        "elements": [sum(layer.k.counts) for layer in scored.statistics.histograms()],
        "steps": [vars(first), vars(second)],
        "again": vars(trainer.step(batch, 0.9, None)),
        "masters": trainer.masters,
    }
    trainer.close()
    return found


def work(rank: int, folder: str, policies: dict[str, tuple[Architecture, Any]], batch: Any) -> None:
    """A process of two: every grid, the first process writes what came out."""
    torch.set_num_threads(1)
    with pretended_gpu():
        for number, (name, (family, grid)) in enumerate(GRIDS.items()):
            place = Path(folder) / str(number)
            place.mkdir(exist_ok=True)
            groups.meet(place, rank, 2, CPU)
            found = train(*policies[family], batch, 2, place / "state", **grid)
            groups.leave()
            if rank == 0:
                torch.save(found, place / "found.pt")
                print(name, flush=True)


def families_used() -> list[str]:
    """Of `GRIDS`."""
    return [family for family in FAMILIES if family in {used for used, _ in GRIDS.values()}]
