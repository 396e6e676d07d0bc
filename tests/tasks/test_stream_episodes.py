"""Episodes that are played beside the update, whole or over several policies: durable, and equal when replayed."""

import re
import signal
from pathlib import Path

import pytest
from episode_life import exit_code_of_life

from fp8core.run.verify import verify
from fp8core.store.run_view import RunView

DIGITS = (Path(__file__).parents[1] / "parts" / "digits_environment.py").read_text()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("environment") / "digits.py"
    path.write_text(DIGITS)
    return path


@pytest.fixture(scope="module")
def settings(place):
    return {
        "environment": {"name": f"{place}:Digits", "max_turns": 12, "turn_tokens": 3},
        **{"rollout.max_new_tokens": 28, "rollout.group_size": 4, "rollout.prompts_per_step": 2, "steps": 3},
        "pipeline.verified_share": 1.0,
    }


MODES = {
    "one_step_off": {"pipeline.mode": "one_step_off"},
    # Some updates land within a turn, and some episodes are over beside them.
    "asynchronous": {"pipeline.mode": "asynchronous", "pipeline.ahead_tokens": 12, "pipeline.chunk_tokens": 2},
}


@pytest.fixture(scope="module", params=["asynchronous", pytest.param("one_step_off", marks=pytest.mark.slow)])
def mode(request):
    return request.param


ASYNCHRONOUS = pytest.mark.parametrize("mode", ["asynchronous"], indirect=True)


@pytest.fixture(scope="module")
def ahead(loop_run, settings, mode):
    """For reading only."""
    return loop_run(f"ahead-{mode}", **settings, **MODES[mode])


def artifact(run, step, name):
    ref = run.ledger.artifacts(step)[name]
    return run.store.get_json(ref) if ref.kind == "metrics" else run.store.get_table(ref)


def test_the_log_prob_of_each_token_is_that_of_the_policy_that_wrote_it(ahead, mode):
    spans = []
    for step in range(1, 4):
        metrics, rollouts = artifact(ahead, step, "metrics"), artifact(ahead, step, "rollouts").to_pylist()
        assert metrics["alignment/tokens_differing"] == 0
        assert metrics["alignment/token_mult_prob_error"] == 1
        assert metrics["alignment/tokens_differing_turn_2_3"] == 0
        assert metrics["environment/turns"] > 2
        spans += [{*row["versions"]} for row in rollouts]
        assert {version for row in rollouts for version in row["versions"]} <= {max(0, step - 2), step - 1}
        if mode == "one_step_off":
            assert metrics["rollout/prompts_waiting"] == len({row["group"] for row in rollouts})
            assert {version for row in rollouts for version in row["versions"]} == {max(0, step - 2)}
        assert any(not all(row["written"]) for row in rollouts)
        assert metrics["train/tokens"] == sum(sum(row["written"]) for row in rollouts)
    staleness = artifact(ahead, 2, "metrics")["rollout/staleness_mean"]
    assert staleness == 1 if mode == "one_step_off" else 0 < staleness < 1
    assert any(len(versions) > 1 for versions in spans) == (mode == "asynchronous")
    assert [found for found in verify(RunView.read(ahead.folder)) if found.severity != "note"] == []


def test_tokens_of_the_environment_are_not_counted_as_generated(ahead, mode):
    for step in range(1, 4):
        metrics = artifact(ahead, step, "metrics")
        left, after = (artifact(ahead, step, name).to_pylist() for name in ("left", "next_stream"))
        before, now = (sum(sum(row["written"]) for row in rows) for rows in (left, after))
        assert now < sum(len(row["tokens"]) for row in after)
        assert metrics["rollout/tokens_ahead"] == now
        assert metrics["rollout/tokens_beside_update"] == now - before
        # One step ahead, all are played at once and to their ends.
        steps = 12 if mode == "asynchronous" else max(sum(row["written"]) for row in after)
        assert metrics["rollout/decode_steps_beside_update"] == steps


@ASYNCHRONOUS
def test_an_update_lands_within_a_turn_and_between_two(ahead):
    landed = {"within": 0, "between": 0}
    for step in range(1, 4):
        versions = {
            (row["group"], row["sample"]): row["versions"] for row in artifact(ahead, step, "rollouts").to_pylist()
        }
        for turn in artifact(ahead, step, "turns").to_pylist():
            wrote = versions[turn["group"], turn["sample"]][turn["begin"] : turn["observation_end"] + 1]
            whole = len({*wrote[: turn["end"] - turn["begin"]]}) == 1
            landed["between" if whole else "within"] += len({*wrote}) > 1
    assert min(landed.values()) > 0, landed


def test_fewer_processes_than_episodes_change_nothing(ahead, loop_run, settings, mode):
    """Those that rest end where others wait, and are asked again."""
    environment = settings["environment"] | {"at_once": 3}
    few = loop_run(f"few-{mode}", **settings | {"environment": environment, "steps": 2}, **MODES[mode])
    for step in (1, 2):
        ours, theirs = few.ledger.artifacts(step), ahead.ledger.artifacts(step)
        for name in ("turns", "rollouts", "next_stream", "behaviour", "next_policy"):
            assert ours[name].digest == theirs[name].digest, name


def test_kills_while_episodes_are_open_end_with_equal_records(ahead, tmp_path):
    """Environments of episodes that go on are asked the same again."""
    for after, code in ((150, -signal.SIGKILL), (100, -signal.SIGKILL), (10**9, 0)):
        assert exit_code_of_life(ahead.folder / "run.json", tmp_path, after) == code
    assert type(ahead)(tmp_path / "killed").records == ahead.records


def replayed(run, first, last=3, *, rerun=False):
    """The outcomes of the steps from `first` to `last`."""
    return [verdict.outcome for verdict in run.replayed(range(first, last + 1), rerun_environments=rerun)]


def test_replays_take_the_recorded_answers_or_ask_again(ahead, place):
    assert replayed(ahead, 0) == ["equal"] * 4
    assert replayed(ahead, 3, rerun=True) == ["equal"]
    place.write_text(DIGITS.replace("% 3", "% 2"))
    try:
        assert replayed(ahead, 3) == ["equal"]
        assert replayed(ahead, 3, rerun=True) == ["different"]
    finally:
        place.write_text(DIGITS)


DICE = """
import os
from fp8core.environments.protocol import Outcome, Said, Turn


class Dice:
    def start(self, task):
        self.thrown = 0
        return Turn((Said("user", task.question),))

    def step(self, action):
        self.thrown += 1
        said = int.from_bytes(os.urandom(3))
        return Turn((Said("user", str(said)),)) if self.thrown < 4 else Outcome("judge")

    def close(self):
        pass
"""


def test_episodes_whose_environment_answers_otherwise_after_a_restart_begin_anew(loop_run, settings, tmp_path):
    (tmp_path / "dice.py").write_text(DICE)
    environment = {"name": f"{tmp_path / 'dice.py'}:Dice", "max_turns": 6, "turn_tokens": 2}
    changes = {"environment": environment, "rollout.max_new_tokens": 60, "pipeline.max_staleness": 2}
    run = loop_run("thrown", **settings | MODES["asynchronous"] | changes | {"pipeline.ahead_tokens": 4})
    before = artifact(run, 3, "next_stream").to_pylist()
    run.resume(steps=4)
    asked = sum(len(row["turns"]) > 1 and not row["finish"] for row in before)
    assert asked > 0
    assert re.search(rf"step 4: {asked} of \d+ episodes in flight begin anew: environment\.name=", run.said)
    assert run.ledger.inexact_steps() == [3]
    assert {turn["outcome"] for turn in artifact(run, 4, "turns").to_pylist() if turn["outcome"]} == {"judge"}
    assert [found for found in verify(RunView.read(run.folder)) if found.severity != "note"] == []
    assert replayed(run, 4, 4) == ["equal"]
