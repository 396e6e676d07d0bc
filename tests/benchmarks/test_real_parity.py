"""Trainings of several tasks and precisions, side by side: their settings, their GPUs, and how they are stopped."""

import json
import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks import real_parity
from benchmarks.harness import start
from benchmarks.real_accuracy import FP8, REDRAWN, VARIANTS
from benchmarks.real_checkpoint import questions, rounded_folder, write_rounded
from benchmarks.real_parity import plan, train
from fp8core.parity.measure import BASELINE
from fp8core.store.ledger import CheckpointEntry
from fp8core.store.run_view import RunView

CONFIG = ["--config", "real", "--gpus", "0", "1"]


def options(folder, *more):
    return real_parity._options(["--out", str(folder), "--runs", str(folder / "runs"), *CONFIG, *more])


@pytest.fixture
def data(tmp_path: Path, small_checkpoint: Path) -> Path:
    """A tiny stand-in for the checkpoint, a rounding of it, and questions of one task."""
    folder = tmp_path / "data"
    shutil.copytree(small_checkpoint, folder / "model")
    write_rounded(folder / "model", rounded_folder(folder, 0), 0)
    lines = (json.dumps({"question": text, "answer": f"#### {answer}"}) for text, answer in questions("sums", 64))
    (folder / "sums.jsonl").write_text("\n".join(lines))
    return folder


def test_variants_of_a_seed_differ_in_formats_and_checkpoint_alone(tmp_path):
    trainings = plan(options(tmp_path, "--set", "training.learning_rate=1e-6"))
    assert len({each.folder for each in trainings}) == len(trainings) == 27
    assert {each.seed for each in trainings[:9]} == {0}, "pairs of a seed come together"
    of = {each.variant: each.config for each in trainings if (each.task, each.seed) == ("units", 2)}
    formats = {name: (config.precision.rollout, config.precision.training) for name, config in of.items()}
    assert formats[BASELINE] == formats[REDRAWN] != formats[FP8]
    assert of[FP8].precision.rollout.kv_cache == of[FP8].precision.training.kv_cache == "fp8"
    assert [Path(str(of[name].model)).name for name in of] == ["model", "model-rounded-2", "model"]
    assert {config.training.learning_rate for config in of.values()} == {1e-6}
    assert {config.seed for config in of.values()} == {2}
    assert {Path(str(config.data.source)).name for config in of.values()} == {"units.jsonl"}
    assert len({config.precision.scale_rule for config in of.values()}) == 1


@dataclass
class Sleeping:
    """In place of a training: a process that notes its GPU, and ends by itself or at SIGTERM."""

    name: str
    folder: Path
    seconds: float
    steps: int = 0

    def command(self, config):
        note = f"open({str(self.folder / self.name)!r}, 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])"
        return [sys.executable, "-c", f"import os, time; {note}; time.sleep({self.seconds})"]


def test_trainings_spread_over_gpus_and_the_next_begins_when_one_ends(tmp_path, capfd):
    waiting = [Sleeping(f"training-{number}", tmp_path, 0.1) for number in range(6)]
    train(waiting, options(tmp_path, "--at-once", "2", "--grace", "0"), tmp_path, time.monotonic() + 60)
    gpus = Counter((tmp_path / each.name).read_text() for each in waiting)
    assert set(gpus) == {"0", "1"}
    assert gpus.total() == 6
    assert capfd.readouterr().out.count("ended with 0") == 6


def test_all_are_stopped_before_the_end_and_what_waits_is_not_begun(tmp_path, capfd):
    waiting = [Sleeping(f"training-{number}", tmp_path, 600) for number in range(3)]
    began = time.monotonic()
    train(waiting, options(tmp_path, "--at-once", "1", "--grace", "5"), tmp_path, began + 8)
    assert time.monotonic() - began < 8
    assert capfd.readouterr().out.count("stopped with -15") == 2
    assert not (tmp_path / "training-2").exists()


def small(data, *more):
    words = ["--data", str(data), "--tasks", "sums", "--seeds", "0", *more]
    for setting in ("rollout.prompts_per_step=2", "rollout.group_size=2", "evaluation.prompts=4"):
        words += ["--set", setting]
    return words


@pytest.mark.slow
def test_a_training_that_is_stopped_has_a_checkpoint_of_its_last_step(tmp_path, data):
    given = options(tmp_path, *small(data, "--steps", "1000"))
    training = plan(given)[-1]
    process = start(training.command(given.config))
    end = time.monotonic() + 120
    while training.steps < 1 and process.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    process.terminate()
    assert process.wait(60) == 143
    view = RunView.read(training.folder)
    checkpoints = [entry.step for _, entry in view.entries if isinstance(entry, CheckpointEntry)]
    assert checkpoints == [training.steps]


@pytest.mark.slow
def test_all_variants_of_a_task_are_trained_and_leave_rows_with_their_curves(tmp_path, data, capfd):
    call = ["--out", str(tmp_path), "--runs", str(tmp_path / "runs"), *CONFIG, *small(data, "--steps", "2")]
    assert real_parity.main([*call, "--seconds", "0"]) == 1
    assert "left: sums-bf16-0 after step -1" in capfd.readouterr().out
    assert real_parity.main([*call, "--seconds", "240"]) == 0
    rows = json.loads((tmp_path / "real_accuracy.json").read_text())
    found = {row["variant"]: row for row in rows if row["kind"] == "alignment"}
    assert set(found) == set(VARIANTS)
    assert (found[FP8]["steps"], found[FP8]["tmpe_max"]) == (2, 1.0)
    assert found[BASELINE]["curve"] == {"0": found[BASELINE]["heldout_first"], "2": found[BASELINE]["heldout_last"]}
    assert "all are done" in capfd.readouterr().out
