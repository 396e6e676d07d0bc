"""What arrives in the quantised policy of what an optimiser intends."""

import pytest

from fp8core.config.precision import PrecisionContract
from fp8core.config.training import LoraConfig, TrainingConfig
from fp8core.models.weights import is_linear
from fp8core.numerics.e4m3 import quantise_tiles
from fp8core.numerics.recipe import POW2

MIXED = PrecisionContract(rounding_points="kernels", bf16_last_layers=1)


@pytest.fixture(params=["exact", "packed"])
def make(request, trainer_of, packed_of):
    build, size = {"exact": (trainer_of, {"micro_batch": 16}), "packed": (packed_of, {})}[request.param]
    return lambda contract, arch, **settings: build(contract, arch, TrainingConfig(warmup_steps=0, **size, **settings))


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
