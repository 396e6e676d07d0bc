"""A resume hands trainer and engine the versions of the policy that the next tasks expect."""

import shutil

import pytest

from fp8core.errors import UserError
from fp8core.models.checkpoint import load_checkpoint, save_checkpoint
from fp8core.run import loop
from fp8core.run.execute import carried
from fp8core.run.loop import BoundError, begin, iterate
from fp8core.store.run_directory import LEDGER

AHEAD = {
    "pipeline.mode": "asynchronous",
    "pipeline.ahead_tokens": 3,
    "pipeline.verified_share": 1.0,
    "warm_start.steps": 20,
    "training.learning_rate": 0.01,
}


def copy_of(run, folder):
    shutil.copytree(run.folder.parent, folder / "loop")
    return type(run)(folder / "loop" / run.folder.name)


def cut_before(run, index):
    """Before the first task of a step, whose rollout then asks for older policies."""
    run.cut_after(index, "rollout")
    path = run.folder / LEDGER
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    shutil.rmtree(run.folder / "shards", ignore_errors=True)


def test_the_engine_has_the_next_policy_after_its_sync_whatever_is_left_to_do(loop_run, tmp_path):
    """A step of the user's own that reads the old policy comes after it."""
    step = {"name": "look", "uses": "policy_step:look", "needs": ["policy", "scales"]}
    settings = {"warm_start.steps": 20, "training.learning_rate": 0.02, "evaluation.every": 1}
    whole = loop_run("looking", **settings, **{"pipeline.insert": [{"after": "sync", "step": step}]})
    run = copy_of(whole, tmp_path)
    run.cut_after(3, "sync")
    with run.opened() as live:
        begin(live)
        iterate(live, 3, carried(live, 3))
    assert run.records[3] == whole.records[3]


def test_damaged_scales_of_an_older_policy_are_made_again(loop_run, tmp_path):
    whole = loop_run("scaled", **AHEAD, checkpoint={"every": 1, "keep": 5})
    run = copy_of(whole, tmp_path)
    cut_before(run, 4)
    run.file(2, "next_scales").write_bytes(b"{}")
    run.resume()
    assert run.records == whole.records


def test_older_policies_that_come_out_otherwise_leave_the_one_of_the_checkpoint(loop_run, tmp_path, monkeypatch):
    """Other code redoes an update between two checkpoints for the tokens of an older version, and gets another one."""
    run = copy_of(loop_run("other", **AHEAD, steps=5, checkpoint={"every": 3, "keep": 1}), tmp_path)
    expected = run.store.get_json(run.ledger.artifacts(3)["next_policy"])["weights_digest"]
    cut_before(run, 4)
    run.change_records(code_version="0" * 64)
    run.change_rewards(2)
    held, run_step = dict[str, str](), loop.run_step

    def noted(live, index, planned, inputs):
        if index == 4 and planned.name in ("reward", "logprobs", "train"):
            held[planned.name] = live.trainer.digest()
        return run_step(live, index, planned, inputs)

    monkeypatch.setattr(loop, "run_step", noted)
    # The tokens of the version that came out otherwise have other log-probs than were sampled.
    with pytest.raises(BoundError, match="after step 4"):
        run.resume(new_code=True)
    assert held == dict.fromkeys(("reward", "logprobs", "train"), expected)


def test_a_model_folder_with_other_weights_is_refused(loop_run, small_checkpoint, tmp_path):
    """A reference would be made of them."""
    model = tmp_path / "model"
    shutil.copytree(small_checkpoint, model)
    shape = {"architecture": None, "warm_start": None, "reward.verifier": "chain"}
    run = loop_run("based", model=str(model), **shape, steps=1)
    run.resume(steps=2)
    found = load_checkpoint(small_checkpoint)
    changed = {name: tensor * 1.5 if tensor.dim() == 2 else tensor for name, tensor in found.tensors.items()}
    shutil.rmtree(model)
    save_checkpoint(model, found.architecture, changed, found.tokenizer)
    with pytest.raises(UserError, match=r"^model=.*: its weights are others than the run began with"):
        run.resume(steps=3)


@pytest.mark.parametrize("mode", ["asynchronous", "one_step_off"])
def test_a_replay_in_another_mode_is_refused_where_steps_hand_on_other_things(run_copy, mode, capsys):
    from flows.cli import main

    assert main(["replay", str(run_copy.folder), "--step", "3", "--set", f"pipeline.mode={mode}"]) == 2
    assert "step 3 starts from what the run's own pipeline hands on" in capsys.readouterr().err
