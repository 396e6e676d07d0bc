"""A resume checks what it reads, makes damaged files again where that is possible, and says what it did."""

import pyarrow.compute as pc
import pytest

from fp8core.errors import UserError
from fp8core.run.execute import carried
from fp8core.run.loop import Execution, begin, train
from fp8core.run.recompute import RedoError
from fp8core.run.resume import history
from fp8core.store.artifacts import RolloutShards
from fp8core.store.layout import LEDGER

# Artifacts of an iteration, and a way to damage each.
ARTIFACTS = {"rollouts": "flip", "rewards": "delete", "next_policy": "flip", "next_scales": "delete"}


def damage(path, how):
    """Returns what an error says about it."""
    data = bytearray(path.read_bytes())
    match how:
        case "flip":
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
            return "content differs"
        case "delete":
            path.unlink()
            return "the file is missing"


@pytest.mark.parametrize("artifact", ARTIFACTS)
def test_a_damaged_artifact_of_the_step_that_was_cut_is_made_again(run_copy, artifact):
    run_copy.cut_after(3, "record")
    path, held = run_copy.file(3, artifact), run_copy.file(3, artifact).read_bytes()
    problem = damage(path, ARTIFACTS[artifact])
    with run_copy.opened() as run:
        begin(run)
        assert run.trainer.version == 3
        assert (
            run.engine.fingerprint() == run_copy.store.get_json(run_copy.ledger.artifacts(3)["sync_report"])["digest"]
        )
    assert run_copy.said.count("was damaged") == 1
    assert f"step 3: artifact {artifact} was damaged ({path}: {problem}" in run_copy.said
    assert path.read_bytes() == held


def test_damaged_artifacts_of_the_start_are_made_again(whole_run, run_copy):
    run_copy.cut_after(1, "prompts")
    named = run_copy.ledger.artifacts(0)
    for artifact in named:
        damage(run_copy.file(0, artifact), "flip")
    with run_copy.opened() as run:
        begin(run)
    for artifact, ref in named.items():
        assert f"step 0: artifact {artifact} was damaged" in run_copy.said
        assert run_copy.store.damage(ref) is None


def test_metrics_of_a_step_before_the_checkpoint_are_made_again_for_the_curves(whole_run, run_copy):
    damage(run_copy.file(1, "metrics"), "delete")
    with run_copy.opened() as run:
        begin(run)
        history(run)
        assert run.trainer.version == 4
        assert (
            run.engine.fingerprint() == run_copy.store.get_json(run_copy.ledger.artifacts(4)["sync_report"])["digest"]
        )
    assert run_copy.store.damage(run_copy.ledger.artifacts(1)["metrics"]) is None


def test_what_cannot_be_made_equal_is_one_error_with_both_digests(run_copy):
    run_copy.cut_after(3, "reward")
    run_copy.change_rewards(3)
    lost = run_copy.ledger.artifacts(3)["rewards"]
    made = run_copy.folder / lost.uri
    made.unlink()
    with pytest.raises(UserError) as refused, run_copy.opened() as run:
        begin(run)
    message = str(refused.value)
    assert len(message.splitlines()) == 1
    assert f"step 3: artifact rewards is damaged and cannot be restored: {made}: the file is missing" in message
    assert message.endswith(f"the ledger says {lost.digest}")


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
        assert carried(run, 4) == {"policy": redone.outputs["next_policy"], "scales": stored["next_scales"]}
        assert run.trainer.digest() == run.directory.store.get_json(redone.outputs["next_policy"])["weights_digest"]
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


def test_a_damaged_shard_is_generated_again(whole_run, run_copy):
    run_copy.cut_after(3, "prompts")
    rollouts = whole_run.store.get_table(whole_run.ledger.artifacts(3)["rollouts"])
    shards = RolloutShards(run_copy.folder / "shards" / "00003")
    for group in (1, 0):
        shards.append(rollouts.filter(pc.equal(rollouts["group"], group)))
    first, _ = sorted((run_copy.folder / "shards" / "00003").iterdir())
    damage(first, "flip")
    run_copy.resume()
    assert f"step 3: {first}: content differs" in run_copy.said
    assert "its completions are generated again" in run_copy.said
    assert run_copy.records == whole_run.records
