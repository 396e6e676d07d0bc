"""Checkpoints that are lost, damaged or replaced by a redo: what a run keeps, and what it writes again."""

import shutil

import pytest

from fp8core.config.run import KeepConfig
from fp8core.run.loop import begin
from fp8core.store.gc import plan_removal, remove

TOLERANT = {"replay.level": "tolerant"}


@pytest.fixture
def lost(run_copy, tmp_path):
    """A run of 4 steps whose checkpoint of step 4 is away, and step 3 comes out otherwise when it is redone."""
    run_copy.change_rewards(3)
    shutil.move(run_copy.folder / "checkpoints" / "00004", tmp_path / "away")
    return run_copy


def test_gc_keeps_what_a_resume_goes_on_from(lost, tmp_path):
    with lost.opened(**TOLERANT) as run:
        begin(run)
    assert lost.ledger.inexact_steps() == [3, 4]
    shutil.move(tmp_path / "away", lost.folder / "checkpoints" / "00004")
    removal = plan_removal(lost.folder, KeepConfig(last=1), "2026-01-02")
    remove(lost.folder, removal.deletions)
    assert removal.dropped == [1]
    lost.resume(steps=5, **TOLERANT)
    assert "00004: the checkpoint holds another policy than the run went on from" in lost.said
    assert lost.ledger.last_step() == 5
