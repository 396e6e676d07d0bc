"""Runs that generate ahead, and take the log-probs of the versions that wrote the tokens for the old ones."""

import math
from statistics import fmean, pstdev

import pytest

from fp8core.store.ledger import stored_metrics

STEPS = range(1, 5)
LOW, HIGH = 0.2, 0.28
AHEAD = {
    "warm_start.steps": 20,
    "pipeline.mode": "asynchronous",
    "pipeline.ahead_tokens": 2,
    "pipeline.max_staleness": 2,
    "pipeline.verified_share": 1.0,
    "training.learning_rate": 0.01,
    "loss.clip_low": LOW,
    "loss.clip_high": HIGH,
}
SAMPLED = AHEAD | {"logprobs.source": "rollout", "correction.method": "none"}


@pytest.fixture(scope="module")
def sampled(loop_run):
    return loop_run("sampled", **SAMPLED)


def tables(run, step, *names):
    artifacts = run.ledger.artifacts(step)
    return [run.store.get_table(artifacts[name]).to_pylist() for name in names]


def test_the_clip_sees_the_age_of_a_token(sampled):
    """The loss, by a loop: the ratio of a token is over the version that wrote it, without a weight."""
    moved = 0
    for step in STEPS:
        rewards, rollouts, scored = tables(sampled, step, "rewards", "rollouts", "logprobs")
        groups = {}
        for row in rewards:
            groups.setdefault(row["group"], []).append(row["reward"])
        losses, ratios = [], []
        for verdict, row, ours in zip(rewards, rollouts, scored, strict=True):
            values = groups[verdict["group"]]
            spread = pstdev(values) * math.sqrt(len(values) / (len(values) - 1))
            advantage = (verdict["reward"] - fmean(values)) / (spread + 1e-4)
            for theirs, mine in zip(row["logprobs"], ours["logprobs"], strict=True):
                ratio = math.exp(mine - theirs)
                losses.append(-min(ratio * advantage, min(max(ratio, 1 - LOW), 1 + HIGH) * advantage))
                ratios.append(ratio)
        metrics = stored_metrics(sampled.ledger, sampled.store, step)
        assert metrics["train/loss"] == pytest.approx(fmean(losses), abs=1e-5)
        assert metrics["train/ratio_mean"] == pytest.approx(fmean(ratios), rel=1e-6)
        assert metrics["correction/sampling_importance_ratio"] == pytest.approx(fmean(ratios), rel=1e-6)
        assert metrics["train/first_ratio_deviation"] == pytest.approx(max(abs(r - 1) for r in ratios), rel=1e-6)
        assert metrics["train/weight_mean"] == 1
        assert metrics["alignment/tokens_differing"] == 0
        moved += metrics["train/first_ratio_deviation"] > 0.01
    assert moved, "a step learns from tokens of an older policy"


@pytest.fixture(scope="module", params=["one pass", "two passes"])
def ahead(request, sampled, loop_run):
    return sampled if request.param == "one pass" else loop_run("passes", **SAMPLED, **{"training.epochs": 2})


def test_a_run_that_was_cut_and_a_replay_are_equal(ahead, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = ahead.copy(tmp_path)
    run.cut_after(3, "train")
    run.resume()
    assert run.records == ahead.records
    assert set(ahead.metric("alignment/token_mult_prob_error").values()) == {1}
    assert [verdict.outcome for verdict in run.replayed([3])] == ["equal"]
