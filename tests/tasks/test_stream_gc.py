"""`fp8-grpo gc` on a run that generates ahead: it goes on afterwards, and its last step can be replayed."""

import shutil

import pytest

from flows.cli import main
from fp8core.run.verify import verify
from fp8core.store.layout import LEDGER
from fp8core.store.run_view import RunView

SETTINGS = {
    "warm_start.steps": 20,
    "training.learning_rate": 0.01,
    "pipeline.mode": "asynchronous",
    "pipeline.ahead_tokens": 3,
    "pipeline.verified_share": 1.0,
    "checkpoint": {"every": 1, "keep": 5},
    "steps": 5,
}


@pytest.fixture(scope="module")
def ahead(loop_run):
    """A run with a checkpoint after each step; for reading only."""
    run = loop_run("ahead", **SETTINGS)
    artifacts = run.ledger.artifacts(5)
    assert artifacts["behaviour"].digest != artifacts["logprobs"].digest, "tokens of step 5 are of older policies"
    return run


def collect(run, kept):
    """Remove what the last step does not need, and check which steps are kept."""
    assert main(["gc", str(run.folder), "--yes", "--set", "artifacts.keep={last: 1}"]) == 0
    there = {int(path.name) for path in (run.folder / "checkpoints").iterdir()}
    # The warm start is an artifact, and has no checkpoint.
    assert there == kept - {0}
    for step in range(1, 1 + max(run.ledger.steps())):
        artifacts = run.ledger.artifacts(step)
        there = {name for name, ref in artifacts.items() if run.store.path(ref).exists()}
        if step in kept:
            assert there == artifacts.keys()
        else:
            assert not there & {"rollouts", "behaviour", "schedule"}
    # A kept step begins with what the one before has left.
    assert run.store.path(run.ledger.artifacts(min(kept - {0}) - 1)["next_stream"]).exists()


def test_the_last_step_is_replayed_after_gc(ahead, copy_of, capsys):
    """It needs policy 3, which wrote some of its tokens."""
    run = copy_of(ahead)
    collect(run, {0, 3, 4, 5})
    capsys.readouterr()
    assert main(["replay", str(run.folder), "--step", "5"]) == 0
    assert "equal" in capsys.readouterr().out
    assert [found for found in verify(RunView.read(run.folder)) if found.severity != "note"] == []


@pytest.mark.parametrize("lost", [(), (3, 4)])
def test_a_run_that_was_cut_goes_on_after_gc(ahead, copy_of, lost):
    """Step 5 needs the policies 3 and 4, also where their checkpoints are lost."""
    run = copy_of(ahead)
    run.cut_after(5, "rollout")
    lines = (run.folder / LEDGER).read_text().splitlines(keepends=True)
    (run.folder / LEDGER).write_text("".join(lines[:-1]))
    shutil.rmtree(run.folder / "checkpoints" / "00005")
    collect(run, {0, 2, 3, 4})
    for step in lost:
        shutil.rmtree(run.folder / "checkpoints" / f"{step:05}")
    run.resume()
    assert run.records == ahead.records
