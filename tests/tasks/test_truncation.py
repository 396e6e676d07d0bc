"""Runs that sample with top-k, top-p and min-p: both sides are equal, and so are a resumed run and a replay."""

import math
import shutil
from dataclasses import replace

import pytest

from fp8core.config.load import load_config
from fp8core.errors import UserError
from fp8core.rollout import embedded
from fp8core.run.refusals import graph_on, pipeline_of
from fp8core.run.verify import verify
from fp8core.store.run_view import RunView

CUT = {"rollout.top_k": 5, "rollout.top_p": 0.95, "rollout.min_p": 0.05}
PACKED = {"training.packed": True, "precision.rounding_points": "kernels"}
AHEAD = {"pipeline.ahead_tokens": 3, "pipeline.verified_share": 1.0, "checkpoint.every": 2}
KINDS = {
    "synchronous": {"pipeline.mode": "synchronous"},
    "asynchronous": {"pipeline.mode": "asynchronous", **AHEAD},
    "one step off": {"pipeline.mode": "one_step_off", "pipeline.verified_share": 1.0},
    "packed": PACKED,
    "two epochs": {"training.epochs": 2, "training.learning_rate": 0.01},
    "environment": {
        "environment": {"name": "calculator", "max_turns": 2, "options": {"modulus": 10, "left_to_right": True}}
    },
    "two updates": {"training.minibatches": 2, "logprobs.source": "rollout", "training.learning_rate": 0.01},
}


@pytest.fixture(scope="module", params=KINDS)
def truncated(request, loop_run):
    """A run of 3 steps, for reading only."""
    return loop_run(request.param.replace(" ", "-"), **{**CUT, **KINDS[request.param]}, steps=3)


def metrics(run, index):
    return run.store.get_json(run.ledger.artifacts(index)["metrics"])


def digests(run, index):
    return {name: ref.digest for name, ref in run.ledger.artifacts(index).items()}


def test_both_sides_are_equal(truncated, whole_run):
    """An untrained policy is nearly flat over its 17 tokens, and 5 are left at most."""
    for index in range(1, 4):
        found = metrics(truncated, index)
        assert found["alignment/token_mult_prob_error"] == 1
        assert found["alignment/tokens_differing"] == 0
        assert 0 < found["rollout/entropy"] <= math.log(5) < metrics(whole_run, index)["rollout/entropy"]
        assert math.isfinite(found["train/ratio_mean"])
    assert [*verify(RunView.read(truncated.folder))] == []


def test_a_run_that_is_cut_and_a_replay_are_equal(truncated, tmp_path):
    shutil.copytree(truncated.folder.parent, tmp_path / "loop")
    copy = type(truncated)(tmp_path / "loop" / truncated.folder.name)
    copy.cut_after(3, "rollout")
    copy.resume()
    assert [digests(copy, index) for index in range(4)] == [digests(truncated, index) for index in range(4)]
    assert [verdict.outcome for verdict in copy.replayed(range(2, 4))] == ["equal", "equal"]


@pytest.mark.parametrize("cut", [{key: value} for key, value in CUT.items()])
def test_what_has_whole_distributions_alone_is_refused(cut, monkeypatch):
    ((key, value),) = cut.items()
    with pytest.raises(UserError, match=rf"^{key}={value}: training\.trainer=megatron has whole distributions"):
        pipeline_of(load_config("tiny", {**cut, "training.trainer": "megatron"}))
    monkeypatch.setattr(embedded, "ENGINE", replace(embedded.ENGINE, truncates=False))
    with pytest.raises(UserError, match=r"rollout\.engine=embedded has whole distributions alone"):
        pipeline_of(load_config("tiny", cut))
    monkeypatch.undo()
    for name in ("tiny", "qwen3-aligned", "llama-nightly"):
        assert graph_on(load_config(name, cut), "sm_90").steps
