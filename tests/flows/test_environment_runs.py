"""Runs whose policy speaks with an environment: exact, resumable in mid-episode, replayed from recorded answers."""

import signal

import pyarrow.compute as pc
import pytest
from episode_life import exit_code_of_life

from flows.cli import main


@pytest.fixture(scope="module")
def settings(digits):
    return {
        "environment": {"name": f"{digits}:Digits", "max_turns": 12, "turn_tokens": 3},
        "rollout.max_new_tokens": 28,
        "rollout.group_size": 4,
        "rollout.prompts_per_step": 2,
        "steps": 2,
    }


@pytest.fixture(scope="module")
def talked(loop_run, settings):
    return loop_run("talked", **settings)


def test_both_policies_are_equal_over_all_turns(talked):
    run = talked
    for step in (1, 2):
        metrics = run.store.get_json(run.ledger.artifacts(step)["metrics"])
        assert metrics["alignment/token_mult_prob_error"] == 1
        assert metrics["alignment/tokens_differing"] == 0
        assert metrics["train/mask_differing"] == 0
        assert metrics["environment/turns"] > 1
        assert metrics["alignment/logprob_abs_diff_max_turn_1"] == 0
        assert metrics["alignment/tokens_differing_turn_2_3"] == 0
        rollouts = run.store.get_table(run.ledger.artifacts(step)["rollouts"])
        assert pc.any(pc.invert(pc.list_flatten(rollouts["written"]))).as_py(), "no token of the environment"
        assert metrics["train/tokens"] == sum(sum(row) for row in rollouts["written"].to_pylist())
    assert main(["verify", str(run.folder)]) == 0


def test_a_kill_in_mid_episode_ends_with_equal_bytes(talked, tmp_path):
    assert exit_code_of_life(talked.folder / "run.json", tmp_path, after=90) == -signal.SIGKILL
    assert exit_code_of_life(talked.folder / "run.json", tmp_path) == 0
    killed = type(talked)(tmp_path / "killed")
    ours, theirs = ([record["outputs"] for record in run.records] for run in (killed, talked))
    assert ours == theirs


def replayed(capsys, *arguments):
    code = main(["replay", *map(str, arguments), "--trust"])
    return code, capsys.readouterr().out.splitlines()


def test_a_replay_takes_recorded_answers(talked, digits, capsys):
    assert replayed(capsys, talked.folder, "--from", 0)[0] == 0
    text = digits.read_text()
    digits.write_text(text.replace("% 3", "% 2"))
    try:
        assert replayed(capsys, talked.folder, "--step", 2)[0] == 0
    finally:
        digits.write_text(text)
