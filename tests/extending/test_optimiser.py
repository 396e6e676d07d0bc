"""The optimiser of docs/extending.md trains, and its state is in the checkpoint."""

import pytest
from safetensors.torch import load_file


@pytest.mark.parametrize("packed", [False, True])
def test_the_optimiser_of_the_page_trains(example, loop_run, small, packed):
    folder = example("An optimiser")
    settings = {"training.packed": packed, "precision.rounding_points": "kernels", "training.learning_rate": 0.01}
    run = loop_run("lion", str(folder / "lion.yaml"), **small, **settings, steps=2)
    state = load_file(run.folder / "checkpoints" / "00002" / "optimiser.safetensors")
    assert {name.partition("/")[0] for name in state} == ({"exp_avg"} if packed else {"exp_avg", "step"})
    assert run.records[-1]["executed"]["training"]["rounding_points"] == "kernels"
