"""Runs that generate beside the update: what they learn from, and that a kill or a replay changes none of it."""

import pytest

from fp8core.run.behaviour import verified_rows

ASYNCHRONOUS = {"pipeline.mode": "asynchronous", "pipeline.ahead_tokens": 3, "pipeline.verified_share": 1.0}


def digests(run, kind):
    return [ref.digest for step in range(1, 5) for ref in run.ledger.artifacts(step).values() if ref.kind == kind]


@pytest.mark.parametrize("mode", ["one_step_off", "asynchronous"])
def test_without_staleness_it_is_the_synchronous_run(loop_run, whole_run, mode):
    run = loop_run("fresh", **{"pipeline.mode": mode, "pipeline.max_staleness": 0, "pipeline.ahead_tokens": 3})
    for kind in ("prompts", "rollouts", "rewards", "policy", "scales"):
        assert digests(run, kind) == digests(whole_run, kind), kind


def test_every_token_has_the_log_prob_of_the_version_that_wrote_it(loop_run):
    run = loop_run("async", **ASYNCHRONOUS)
    ages = set()
    for step in range(1, 5):
        artifacts = run.ledger.artifacts(step)
        rollouts = run.store.get_table(artifacts["rollouts"])
        behaviour = run.store.get_table(artifacts["behaviour"])
        assert behaviour["logprobs"].equals(rollouts["logprobs"])
        ages |= {step - 1 - version for versions in rollouts["versions"].to_pylist() for version in versions}
        metrics = run.store.get_json(artifacts["metrics"])
        assert metrics["alignment/tokens_differing"] == 0
        assert metrics["rollout/staleness_max"] <= 1
    assert ages == {0, 1}
