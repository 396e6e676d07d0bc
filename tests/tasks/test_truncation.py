"""Runs that sample with top-k and top-p: log-probs of both sides are equal, and so are a resumed run and a replay."""

import math

import pytest

from fp8core.config.load import load_config
from fp8core.errors import UserError
from fp8core.run.refusals import pipeline_of

CUT = {"rollout.top_k": 5, "rollout.top_p": 0.9}


@pytest.fixture(scope="module")
def truncated(loop_run):
    """A run of 3 steps, for reading only."""
    return loop_run("truncated", **CUT, steps=3)


def metrics(run, index):
    return run.store.get_json(run.ledger.artifacts(index)["metrics"])


def digests(run, index):
    return {name: ref.digest for name, ref in run.ledger.artifacts(index).items()}


def assert_equal_sides(run, steps):
    """Every token has one of at most 5 places, and both sides give it the same log-prob."""
    for index in steps:
        found = metrics(run, index)
        assert found["alignment/token_mult_prob_error"] == 1
        assert found["alignment/tokens_differing"] == 0
        assert 0 < found["rollout/entropy"] <= math.log(5)
        rollouts = run.store.get_table(run.ledger.artifacts(index)["rollouts"])
        scored = run.store.get_table(run.ledger.artifacts(index)["logprobs"])
        assert rollouts["logprobs"].to_pylist() == scored["logprobs"].to_pylist()


def test_both_sides_are_equal(truncated, whole_run):
    assert_equal_sides(truncated, range(1, 4))
    for index in range(1, 4):
        # An untrained policy is nearly flat over its 17 tokens.
        assert metrics(whole_run, index)["rollout/entropy"] > math.log(5)


def test_a_run_that_is_cut_and_a_replay_are_equal(truncated, tmp_path):
    copy = truncated.copy(tmp_path)
    copy.cut_after(3, "rollout")
    copy.resume()
    assert [digests(copy, index) for index in range(4)] == [digests(truncated, index) for index in range(4)]
    (verdict,) = copy.replayed([3])
    assert verdict.outcome == "equal"


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("tiny", {"training.packed": True}, "packed trainer.*matched contract"),
        ("qwen3-aligned", {}, "engine=vllm with the packed trainer.*aligned contract"),
    ],
)
def test_sides_that_may_leave_different_tokens_are_refused(name, settings, reason):
    with pytest.raises(UserError, match=rf"^rollout.top_k=5.*{reason}"):
        pipeline_of(load_config(name, {**settings, "rollout.top_k": 5}))
