"""A resume checks what it reads, makes damaged files again where that is possible, and says what it did."""

import shutil

import pytest

from fp8core.errors import UserError
from fp8core.run.execute import carried_artifacts
from fp8core.run.loop import Execution, begin, train
from fp8core.run.resume import RedoError
from fp8core.run.verify import verify
from fp8core.store.artifacts import RolloutShards
from fp8core.store.layout import LEDGER
from fp8core.store.run_view import RunView


def damage(path, how):
    data = bytearray(path.read_bytes())
    path.unlink()
    if how == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize(("artifact", "how"), [("rollouts", "flip"), ("rewards", "delete"), ("next_scales", "delete")])
def test_a_damaged_artifact_is_made_again(whole_run, run_copy, artifact, how):
    """Of a step that was cut, and of one that is committed, whose checkpoint is gone."""
    run_copy.cut_after(4, "record")
    shutil.rmtree(run_copy.folder / "checkpoints" / "00004")
    for step in (3, 4):
        damage(run_copy.file(step, artifact), how)
    run_copy.resume()
    assert "step 3: artifacts were damaged; all of its tasks ran again" in run_copy.said
    assert run_copy.records == whole_run.records
    assert [found for found in verify(RunView.read(run_copy.folder)) if found.severity == "error"] == []


def test_what_cannot_be_made_equal_is_one_error_with_both_digests(run_copy):
    run_copy.change_rewards(3)
    shutil.rmtree(run_copy.folder / "checkpoints" / "00004")
    lost = run_copy.ledger.artifacts(3)["rewards"]
    (run_copy.folder / lost.uri).unlink()
    with pytest.raises(RedoError, match=f"^step 3, task reward: redoing it gave .*says {lost.digest[:16]}$"):
        run_copy.resume()


@pytest.mark.parametrize("how", ["flip", "delete"])
def test_a_damaged_checkpoint_gives_way_to_an_older_one(whole_run, run_copy, how):
    damage(run_copy.folder / "checkpoints" / "00004" / "optimiser.safetensors", how)
    with run_copy.opened() as run:
        assert begin(run) == 2
        assert run.trainer.digest() == whole_run.records[4]["weights_digest"]
    assert f"{run_copy.folder}/checkpoints/00004: the checkpoint is damaged: digest" in run_copy.said


def test_a_step_whose_checkpoint_fails_is_done(run_copy, monkeypatch):
    class Noted(Execution):
        def __init__(self):
            self.done = []

        def step_done(self, run, index, results):
            self.done.append(index)

    def save(trainer, folder):
        raise OSError("no space left")

    run_copy.cut_after(1, "record")
    monkeypatch.setattr("fp8core.training.exact.ExactTrainer.save", save)
    with pytest.raises(UserError, match="checkpoint cannot be written: no space left"), run_copy.opened() as run:
        train(run, execution := Noted())
    assert execution.done == [1, 2]
    assert run_copy.ledger.last_step() == 2


def test_a_redo_that_differs_is_refused_by_an_exact_run(run_copy):
    run_copy.cut_after(4, "prompts")
    run_copy.change_rewards(3)
    refused = pytest.raises(
        RedoError, match=r"^step 3, task train: redoing it gave next_policy \w{16}, the ledger says"
    )
    with refused, run_copy.opened() as run:
        begin(run)


@pytest.mark.parametrize("cause", ["tolerant", "new code"])
def test_a_redo_may_differ_in_a_tolerant_run_and_under_new_code(run_copy, cause):
    run_copy.cut_after(4, "rollout")
    run_copy.change_rewards(3)
    options = {"replay.level": "tolerant"}
    if cause == "new code":
        run_copy.change_records(code_version="0" * 64)
        options = {"new_code": True}
    stored, begun = run_copy.ledger.artifacts(3), RolloutShards(run_copy.folder / "shards" / "00004")
    begun.append(run_copy.store.get_table(run_copy.ledger.artifacts(4)["rollouts"]))
    with run_copy.opened(**options) as run:
        begin(run)
        assert begun.read() is None, "it is of the policy that is replaced"
        redone = run.directory.ledger.redone(3)["train"]
        assert carried_artifacts(run, 4) == {"policy": redone.outputs["next_policy"], "scales": stored["next_scales"]}
        assert run.trainer.digest() == run.store.get_json(redone.outputs["next_policy"])["weights_digest"]
    assert "the run goes on from the new policy and is inexact" in run_copy.said
    assert redone.outputs["next_policy"] != stored["next_policy"]
    run_copy.resume(**({} if cause == "new code" else options))
    lines = [line for line in (run_copy.folder / LEDGER).read_text().splitlines() if '"event":"redo"' in line]
    assert len(lines) == 1, "an equal redo is not entered again"
    assert run_copy.ledger.inexact_steps() == [3]
    assert run_copy.ledger.artifacts(3) == stored
    assert run_copy.records[4]["inputs"]["train"]["policy"]["digest"] == redone.outputs["next_policy"].digest
    assert run_copy.records[4]["inputs"]["train"]["scales"]["digest"] == stored["next_scales"].digest


def test_a_tolerant_redo_of_the_step_that_was_cut_replaces_its_update(whole_run, run_copy):
    run_copy.cut_after(3, "evaluate")
    run_copy.forge_update(3)
    run_copy.resume(**{"replay.level": "tolerant"})
    assert run_copy.ledger.inexact_steps() == [3]
    found, expected = run_copy.ledger.artifacts(3), whole_run.ledger.artifacts(3)
    assert found == expected, "the later tasks found the update that was redone"
    assert run_copy.records[4]["weights_digest"] == whole_run.records[4]["weights_digest"]
