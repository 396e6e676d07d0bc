"""Checkpoints that are lost, damaged or replaced by a redo: what a run keeps, and what it writes again."""

import shutil

import pytest

from fp8core.config.run import KeepConfig
from fp8core.run.loop import begin, save_last
from fp8core.store.gc import is_intact, plan_removal, remove

TOLERANT = {"replay.level": "tolerant"}


@pytest.fixture
def lost(run_copy, tmp_path):
    """A run of 4 steps whose checkpoint of step 4 is away, and step 3 comes out otherwise when it is redone."""
    run_copy.change_rewards(3)
    shutil.move(run_copy.folder / "checkpoints" / "00004", tmp_path / "away")
    return run_copy


def test_the_newest_checkpoint_is_written_again_by_the_next_resume(whole_run, run_copy):
    folder = run_copy.folder / "checkpoints" / "00004"
    folder.rename(run_copy.folder.parent / "away")
    run_copy.resume()
    entries = run_copy.ledger.checkpoints()
    assert [entry.step for entry in entries] == [2, 4, 4]
    assert entries[-1].weights_digest == whole_run.records[4]["weights_digest"]
    assert is_intact(folder, entries[-1].digest)
    run_copy.resume()
    assert len(run_copy.ledger.checkpoints()) == 3, "one that is whole is not written again"


def test_a_stop_writes_the_policy_of_a_redo(lost):
    with lost.opened(**TOLERANT) as run:
        begin(run)
        save_last(run)
    *_, left, written = lost.ledger.checkpoints()
    assert (left.step, written.step) == (4, 4)
    assert written.weights_digest != left.weights_digest
    with lost.opened(**TOLERANT) as run:
        assert begin(run) == 0
        save_last(run)
    assert lost.ledger.checkpoints()[-1] == written


def test_gc_keeps_what_a_resume_goes_on_from(lost, tmp_path):
    with lost.opened(**TOLERANT) as run:
        begin(run)
    assert lost.ledger.inexact_steps() == [3, 4]
    shutil.move(tmp_path / "away", lost.folder / "checkpoints" / "00004")
    removal = plan_removal(lost.folder, KeepConfig(last=1))
    remove(lost.folder, removal)
    assert removal.dropped_steps == [1]
    lost.resume(steps=5, **TOLERANT)
    assert "00004: the checkpoint holds another policy than the run went on from" in lost.said
    assert lost.ledger.last_step() == 5
