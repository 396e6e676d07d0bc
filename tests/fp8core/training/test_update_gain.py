"""What arrives in the quantised policy of what an optimiser intends."""

import pytest
import torch

from fp8core.config.loss import LossConfig
from fp8core.config.precision import PrecisionContract
from fp8core.config.training import CorrectionConfig, LoraConfig, TrainingConfig
from fp8core.models.weights import is_linear, rollout_formats, training_formats
from fp8core.numerics.e4m3 import quantise_tiles
from fp8core.numerics.recipe import POW2
from fp8core.rl.objective import Objective
from fp8core.training.exact import ExactTrainer
from fp8core.training.packed.trainer import PackedFormats, PackedTrainer

CPU = torch.device("cpu")
MIXED = PrecisionContract(rounding_points="kernels", bf16_last_layers=1)


def exact(masters, contract, arch, **settings):
    formats = (side(contract, arch.num_layers) for side in (training_formats, rollout_formats))
    training = TrainingConfig(warmup_steps=0, micro_batch=16, **settings)
    return ExactTrainer(arch, masters, *formats, training, Objective(LossConfig(), CorrectionConfig()))


def packed(masters, contract, arch, **settings):
    formats = (side(contract, arch.num_layers) for side in (training_formats, rollout_formats))
    training, objective = TrainingConfig(warmup_steps=0, **settings), Objective(LossConfig(), CorrectionConfig())
    return PackedTrainer(arch, masters, PackedFormats(*formats, 4096), training, objective, CPU)


@pytest.fixture(params=[exact, packed], ids=["exact", "packed"])
def make(request, masters_of):
    return lambda contract, arch, **settings: request.param(masters_of(arch), contract, arch, **settings)


def shipped(name, weight, contract, layers):
    """The FP64 values of what is shipped of a weight."""
    narrow = weight.bfloat16().float()
    if int(name.split(".")[2]) >= layers - contract.bf16_last_layers:
        return narrow.double()
    grid, scales = quantise_tiles(narrow, POW2.weights)
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return grid.double() * wide[: len(grid), : grid.shape[1]]


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, targets=["q_proj", "down_proj"])], ids=["full", "adapters"])
def test_it_is_the_projection_of_one_change_on_the_other(make, lora, architecture, batch_of) -> None:
    arch = architecture()
    batch, scales = batch_of(MIXED, arch)
    trainer = make(MIXED, arch, lora=lora, learning_rate=1e-3)
    start = {name: tensor.detach().clone() for name, tensor in trainer.masters.items() if is_linear(name)}
    for _ in range(2):
        report = trainer.step(batch, 1.0, scales)
        sums = [0.0, 0.0]
        for name, before in start.items():
            now = trainer.masters[name].detach()
            moved = now.double() - before.double()
            arrived = shipped(name, now, MIXED, arch.num_layers) - shipped(name, before, MIXED, arch.num_layers)
            sums = [sums[0] + float((arrived * moved).sum()), sums[1] + float((moved * moved).sum())]
        assert report.update_gain == pytest.approx(sums[0] / sums[1], rel=1e-9)
