"""A resume checks what it reads, makes damaged files again where that is possible, and says what it did."""

import json
import shutil

import pyarrow.compute as pc
import pytest

from fp8core.errors import UserError
from fp8core.store.ledger import RedoEntry
from fp8core.store.run_directory import LEDGER
from fp8core.store.shards import RolloutShards
from tasks.commit import history
from tasks.loop import begin, train
from tasks.restore import RedoError, carried, ensure

# Every artifact of an iteration, and a way to damage it.
ARTIFACTS = {
    "prompts": "flip",
    "rollouts": "truncate",
    "rewards": "delete",
    "logprobs": "swap",
    "kv_statistics": "truncate",
    "next_policy": "flip",
    "train_report": "delete",
    "next_scales": "swap",
    "sync_report": "flip",
    "evaluation": "truncate",
    "metrics": "delete",
}


def damage(path, how):
    """Returns what an error says about it."""
    data = bytearray(path.read_bytes())
    match how:
        case "flip":
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
            return "content differs"
        case "truncate":
            path.write_bytes(data[:-1])
            return "truncated"
        case "delete":
            path.unlink()
            return "the file is missing"
        case "swap":
            others = (other.read_bytes() for other in path.parents[1].rglob(f"*{path.suffix}") if other != path)
            path.write_bytes(next(other for other in others if len(other) > len(data)))
            return "content differs"


def as_made_by(copy, code):
    """Rewrite history: another code version made every step, and said so in its manifests."""
    ledger, lines = copy.ledger, []
    for line in (copy.folder / LEDGER).read_text().splitlines():
        entry = json.loads(line)
        if entry["event"] == "segment":
            entry["code_version"] = code
        if entry["event"] == "step":
            manifest = copy.store.get_json(ledger.steps()[entry["step"]].manifest)
            manifest["record"]["code_version"] = code
            entry["manifest"] = copy.store.put_json("manifest", manifest).model_dump()
        lines.append(json.dumps(entry) + "\n")
    (copy.folder / LEDGER).write_text("".join(lines))


def with_other_reward(copy, index):
    """Make the stored update of a step one that its redo cannot give: the rewards it names were changed afterwards."""
    table = copy.store.get_table(copy.ledger.artifacts(index)["rewards"])
    rows = table.to_pylist()
    rows[0]["reward"] += 1.0
    changed = copy.store.put_table("rewards", table.from_pylist(rows, schema=table.schema))
    lines = (copy.folder / LEDGER).read_text().splitlines(keepends=True)
    for i, line in enumerate(lines):
        entry = json.loads(line)
        if entry.get("step") == index and entry.get("task") == "reward":
            lines[i] = json.dumps({**entry, "outputs": {"rewards": changed.model_dump()}}) + "\n"
    (copy.folder / LEDGER).write_text("".join(lines))


@pytest.mark.parametrize("artifact", ARTIFACTS)
def test_a_damaged_artifact_of_the_step_that_was_cut_is_made_again(copy, artifact):
    copy.cut_after(3, "record")
    path, held = copy.file(3, artifact), copy.file(3, artifact).read_bytes()
    problem = damage(path, ARTIFACTS[artifact])
    with copy.opened() as run:
        begin(run)
        assert run.trainer.version == 3
        assert run.engine.fingerprint() == copy.store.get_json(copy.ledger.artifacts(3)["sync_report"])["digest"]
    assert copy.said.count("was damaged") == 1
    assert f"step 3: artifact {artifact} was damaged ({path}: {problem}" in copy.said
    assert path.read_bytes() == held


@pytest.mark.parametrize("artifact", ["rewards", "logprobs", "next_policy", "next_scales"])
def test_a_damaged_input_of_an_update_that_is_redone_is_made_again(whole, copy, artifact):
    copy.cut_after(4, "prompts")
    damage(copy.file(3, artifact), "flip")
    with copy.opened() as run:
        begin(run)
        assert run.trainer.digest() == whole.records[3]["weights_digest"]
    assert f"step 3: artifact {artifact} was damaged" in copy.said


def test_a_run_whose_artifacts_are_all_gone_comes_back(whole, copy):
    copy.cut_after(4, "record")
    for path in (copy.folder / "artifacts").rglob("*.*"):
        path.unlink()
    with copy.opened() as run:
        train(run)
        history(run)
        assert run.trainer.digest() == whole.records[4]["weights_digest"]
    assert copy.store.get_json(copy.ledger.steps()[4].manifest)["record"] == whole.records[4]
    assert all(copy.store.damage(ref) is None for index in (3, 4) for ref in copy.ledger.artifacts(index).values())
    assert all(copy.file(index, "metrics").exists() for index in range(1, 5))


def test_damaged_artifacts_of_the_start_are_made_again(whole, copy):
    copy.cut_after(1, "prompts")
    named = copy.ledger.artifacts(0)
    for artifact in named:
        damage(copy.file(0, artifact), "flip")
    with copy.opened() as run:
        begin(run)
    for artifact, ref in named.items():
        assert f"step 0: artifact {artifact} was damaged" in copy.said
        assert copy.store.damage(ref) is None


def test_a_damaged_shelf_of_warm_starts_is_trained_again(copy):
    damage(copy.file(0, "weights"), "delete")
    for path in (copy.folder.parent / "warm_starts").rglob("*.safetensors"):
        damage(path, "flip")
    with copy.opened() as run:
        begin(run)
    assert "it is trained again" in copy.said
    assert "step 0: artifact weights was damaged" in copy.said


def test_metrics_of_a_step_before_the_checkpoint_are_made_again_for_the_curves(whole, copy):
    for artifact in ("metrics", "train_report", "evaluation"):
        damage(copy.file(1, artifact), "delete")
    with copy.opened() as run:
        begin(run)
        history(run)
        assert run.trainer.version == 4
        assert run.engine.fingerprint() == copy.store.get_json(copy.ledger.artifacts(4)["sync_report"])["digest"]
        ensure(run, 1, {"train_report", "evaluation"})
    for artifact in ("metrics", "train_report", "evaluation"):
        assert copy.store.damage(copy.ledger.artifacts(1)[artifact]) is None


def test_what_cannot_be_made_equal_is_one_error_with_both_digests(copy):
    copy.cut_after(3, "reward")
    with_other_reward(copy, 3)
    lost = copy.ledger.artifacts(3)["rewards"]
    made = copy.folder / lost.uri
    made.unlink()
    with pytest.raises(UserError) as refused, copy.opened() as run:
        begin(run)
    message = str(refused.value)
    assert len(message.splitlines()) == 1
    assert f"step 3: artifact rewards is damaged and cannot be restored: {made}: the file is missing" in message
    assert message.endswith(f"the ledger says {lost.digest}")


def test_a_damaged_manifest_is_put_back_from_its_second_copy(copy):
    copy.cut_after(4, "prompts")
    manifest = copy.ledger.steps()[3].manifest
    damage(copy.folder / manifest.uri, "truncate")
    with copy.opened() as run:
        begin(run)
    assert "step 3: the manifest was damaged" in copy.said
    assert copy.store.damage(manifest) is None


def test_a_manifest_without_a_second_copy_is_refused(copy):
    copy.cut_after(4, "prompts")
    damage(copy.folder / copy.ledger.steps()[3].manifest.uri, "truncate")
    second = copy.folder / "manifests" / "00003.json"
    second.write_text(second.read_text().replace('"level": "exact"', '"level": "tolerant"'))
    with (
        pytest.raises(UserError, match=r"step 3: the manifest is lost: .* truncated: .*00003\.json has other content"),
        copy.opened() as run,
    ):
        begin(run)


@pytest.mark.parametrize("how", ["flip", "delete"])
def test_a_damaged_checkpoint_gives_way_to_an_older_one(whole, copy, how):
    damage(copy.folder / "checkpoints" / "00004" / "optimiser.safetensors", how)
    with copy.opened() as run:
        assert begin(run) == 2
        assert run.trainer.digest() == whole.records[4]["weights_digest"]
    assert f"{copy.folder}/checkpoints/00004: the checkpoint is damaged: digest" in copy.said


def test_without_any_checkpoint_every_update_is_redone_from_policy_0(whole, copy):
    for folder in ("00002", "00004"):
        shutil.rmtree(copy.folder / "checkpoints" / folder)
    with copy.opened() as run:
        assert begin(run) == 4
        assert run.trainer.digest() == whole.records[4]["weights_digest"]
    assert copy.said.count("the checkpoint is missing; an older state is taken") == 2


def test_a_checkpoint_that_was_pruned_is_not_missed(copy):
    shutil.rmtree(copy.folder / "checkpoints" / "00002")
    with copy.opened(**{"checkpoint.keep": 1}) as run:
        assert begin(run) == 0
    assert "missing" not in copy.said


def test_a_redo_that_differs_is_refused_by_an_exact_run(copy):
    copy.cut_after(4, "prompts")
    with_other_reward(copy, 3)
    refused = pytest.raises(
        RedoError, match=r"^step 3, task train: redoing it gave next_policy \w{16}, the ledger says"
    )
    with refused, copy.opened() as run:
        begin(run)


@pytest.mark.parametrize("cause", ["tolerant", "new code"])
def test_a_redo_may_differ_in_a_tolerant_run_and_under_new_code(copy, cause):
    copy.cut_after(4, "rollout")
    with_other_reward(copy, 3)
    options = {"replay.level": "tolerant"}
    if cause == "new code":
        as_made_by(copy, "0" * 64)
        options = {"new_code": True}
    stored = copy.ledger.artifacts(3)
    with copy.opened(**options) as run:
        begin(run)
        redone = run.directory.ledger.redone(3)["train"]
        assert carried(run, 4) == {"policy": redone.outputs["next_policy"], "scales": stored["next_scales"]}
        assert run.trainer.digest() == run.directory.store.get_json(redone.outputs["next_policy"])["weights_digest"]
    assert "the run goes on from the new policy and is inexact" in copy.said
    assert redone.outputs["next_policy"] != stored["next_policy"]
    copy.resume(**({} if cause == "new code" else options))
    lines = [line for line in (copy.folder / LEDGER).read_text().splitlines() if '"event":"redo"' in line]
    assert len(lines) == 1, "an equal redo is not entered again"
    assert copy.ledger.inexact_steps() == [3]
    assert copy.ledger.artifacts(3) == stored
    assert copy.records[4]["inputs"]["train"]["policy"]["digest"] == redone.outputs["next_policy"].digest
    assert copy.records[4]["inputs"]["train"]["scales"]["digest"] == stored["next_scales"].digest
    with copy.opened(**({} if cause == "new code" else options)) as run:
        assert begin(run) == 0
        assert run.trainer.digest() == copy.records[4]["weights_digest"]


def test_a_tolerant_redo_of_the_step_that_was_cut_replaces_its_update(whole, copy):
    copy.cut_after(3, "evaluate")
    ledger = copy.folder / LEDGER
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    earlier, trained = (entry for entry in lines if entry.get("task") == "train" and entry["step"] in (1, 3))
    trained["outputs"] = earlier["outputs"]
    ledger.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    copy.resume(**{"replay.level": "tolerant"})
    assert copy.ledger.inexact_steps() == [3]
    assert copy.ledger.artifacts(3) == whole.ledger.artifacts(3), "the later tasks found the update that was redone"
    assert copy.records[4]["weights_digest"] == whole.records[4]["weights_digest"]


def test_a_checkpoint_of_the_line_that_was_left_is_not_loaded(copy):
    copy.cut_after(4, "prompts")
    stored = copy.ledger.artifacts(2)
    other = {name: copy.ledger.artifacts(1)[name] for name in ("next_policy", "train_report")}
    with (copy.folder / LEDGER).open("a") as file:
        file.write(RedoEntry(step=2, task="train", outputs=other, code_version="0" * 64).model_dump_json() + "\n")
    assert copy.ledger.handed_over(2)["next_policy"] != stored["next_policy"]
    with copy.opened() as run:
        begin(run)
        assert run.directory.ledger.handed_over(2)["next_policy"] == stored["next_policy"]
    assert "00002: the checkpoint holds another policy than the run went on from" in copy.said


def test_a_step_that_other_code_began_is_done_again_as_a_whole(whole, copy):
    copy.cut_after(3, "train")
    as_made_by(copy, "0" * 64)
    with pytest.raises(UserError, match="was made by code version 000000000000, this is"):
        copy.resume()
    shards = copy.folder / "shards" / "00003"
    shards.mkdir()
    (shards / f"000000-{'0' * 64}.parquet").touch()
    lines = (copy.folder / LEDGER).read_text().splitlines()
    for i, line in enumerate(lines):
        entry = json.loads(line)
        if entry.get("step") == 3 and entry["event"] == "task":
            lines[i] = json.dumps({**entry, "key": "0" * 64})
    (copy.folder / LEDGER).write_text("\n".join(lines) + "\n")
    copy.resume(new_code=True)
    assert "generated again" not in copy.said
    assert [record["weights_digest"] for record in copy.records] == [
        record["weights_digest"] for record in whole.records
    ]
    assert copy.records[3]["code_version"] == whole.records[3]["code_version"]
    assert copy.records[2]["code_version"] == "0" * 64


def test_a_damaged_shard_is_generated_again(whole, copy):
    copy.cut_after(3, "prompts")
    rollouts = whole.store.get_table(whole.ledger.artifacts(3)["rollouts"])
    shards = RolloutShards(copy.folder / "shards" / "00003")
    for group in (1, 0):
        shards.append(rollouts.filter(pc.equal(rollouts["group"], group)))
    first, _ = sorted((copy.folder / "shards" / "00003").iterdir())
    damage(first, "truncate")
    copy.resume()
    assert f"step 3: {first}: content differs" in copy.said
    assert "its completions are generated again" in copy.said
    assert copy.records == whole.records


def test_shards_of_a_committed_step_are_swept(whole, copy):
    shards = RolloutShards(copy.folder / "shards" / "00004")
    shards.append(whole.store.get_table(whole.ledger.artifacts(4)["rollouts"]))
    with copy.opened() as run:
        begin(run)
    assert not list((copy.folder / "shards").iterdir())
