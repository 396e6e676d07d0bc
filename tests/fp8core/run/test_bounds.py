"""Bounds on alignment in a training without an orchestrator: when it stops, and how it goes on."""

import re

import pytest

from fp8core.report.run_data import read_run
from fp8core.run.loop import BoundError, TrainingPaused

# Trains in BF16 what was sampled in FP8: no step has an error of exactly 1.
MISMATCHED = {"precision.training.linear": "bf16", "alignment.stop.error": 1.0, "alignment.stop.patience": 2}
NAMED = r"after step 2: alignment\.stop\.error=1: above it for 2 steps in a row \(1\.\d+, 1\.\d+\)"


@pytest.fixture
def begun(loop_run):
    """One step of a training that the bound stops after the second."""
    return lambda action: loop_run("bounded", steps=1, **MISMATCHED, **{"alignment.stop.action": action})


def crossed_at(run) -> list[int]:
    return [entry.step for entry in run.ledger.bounds(1)]


def test_a_paused_training_has_a_checkpoint_and_goes_on_for_as_long_again(begun) -> None:
    run = begun("pause")
    with pytest.raises(TrainingPaused, match=NAMED):
        run.resume(steps=5, **{"checkpoint.every": 100})
    assert re.search(rf"2 of 5 steps; paused {NAMED}", read_run(run.folder, "paused").status)
    assert run.ledger.last_step() == 2
    assert run.ledger.checkpoints()[-1].step == 2
    with pytest.raises(TrainingPaused, match="after step 4"):
        run.resume(steps=5)
    assert crossed_at(run) == [2, 4]
    run.resume(steps=5)
    assert run.ledger.last_step() == 5
    assert read_run(run.folder, "over").status == "finished, 5 steps"


def test_failing_is_an_error_and_a_warning_none(begun) -> None:
    run = begun("fail")
    with pytest.raises(BoundError, match=NAMED):
        run.resume(steps=4)
    assert re.search(rf"2 of 4 steps; failed {NAMED}", read_run(run.folder, "failed").status)
    run.resume(steps=5, **{"alignment.stop.action": "warn"})
    assert crossed_at(run) == [2, 4]
    assert "warn: step 4: alignment.stop.error=1" in run.said
