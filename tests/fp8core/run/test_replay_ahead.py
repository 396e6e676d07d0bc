"""Replays of steps that go on from completions in flight."""

import pytest

from fp8core.errors import UserError

AHEAD = {
    "pipeline.mode": "asynchronous",
    "pipeline.ahead_tokens": 3,
    "pipeline.max_staleness": 2,
    "warm_start.steps": 20,
    "training.learning_rate": 0.01,
}


@pytest.fixture(scope="module")
def ahead(loop_run):
    return loop_run("ahead", **AHEAD)


@pytest.mark.parametrize("setting", ["pipeline.max_staleness=1", "seed=8"])
def test_a_setting_of_what_is_in_flight_is_refused(ahead, setting):
    key = setting.partition("=")[0]
    with pytest.raises(UserError, match=f"^--set {key}: step 3 goes on from completions begun under the run's own"):
        ahead.replayed([3], setting)
    # Nothing is in flight before the first step.
    (verdict,) = ahead.replayed([1], setting)
    assert not any("Error" in line for line in verdict.difference)


def test_a_replay_keeps_the_mode_and_the_source_of_the_runs_steps(loop_run, ahead):
    with pytest.raises(UserError, match=r"pipeline\.mode=synchronous: pipeline\.steps has tasks\.stream:finish"):
        ahead.replayed([1], "pipeline.mode=synchronous", "pipeline.ahead_tokens=null", "pipeline.max_staleness=1")
    scored = loop_run("scored_by_training", **{"logprobs.source": "training", "warm_start.steps": 20}, steps=1)
    with pytest.raises(UserError, match=r"logprobs\.source=pass: pipeline\.steps has tasks\.train:train_scoring"):
        scored.replayed([1], "logprobs.source=pass")
