"""Runs without a pass for log-probs store what a run with one stores, and refuse what would not be equal."""

import math
import shutil
from functools import cache

import pytest
import torch

from fp8core.config.load import load_config
from fp8core.errors import UserError
from fp8core.run.checks.settings import pipeline_of
from fp8core.run.execute import carried
from fp8core.run.loop import begin, iterate
from fp8core.run.scoring import compared_rows
from fp8core.run.verify import verify
from fp8core.store.run_directory import read_description
from fp8core.store.run_view import RunView
from fp8core.training.trainer import LogprobError

STEPS = range(1, 5)
WRITTEN = torch.ones(16, 1, dtype=torch.bool)
KINDS = {
    "training": {"logprobs.source": "training"},
    "rollout": {"logprobs.source": "rollout"},
    "several updates": {"logprobs.source": "rollout", "training.minibatches": 2},
}
SAMPLED = load_config("tiny", KINDS["rollout"])


@pytest.fixture(scope="module")
def run_of(loop_run):
    """A run of 4 steps by its kind, for reading only."""
    return cache(lambda kind: loop_run(kind, **KINDS[kind]))


@pytest.fixture(params=["training", "rollout"])
def scored(request, run_of):
    return run_of(request.param)


@pytest.fixture(params=["rollout", "several updates"])
def sampled(request, run_of):
    return run_of(request.param)


@pytest.fixture(params=KINDS)
def any_kind(request, run_of):
    return run_of(request.param)


def source_of(run):
    return read_description(run.folder).config["logprobs"]["source"]


def digests(run, index):
    """Digests of a step's artifacts but its metrics."""
    return {name: ref.digest for name, ref in run.ledger.artifacts(index).items() if name != "metrics"}


def metrics(run, index):
    return run.store.get_json(run.ledger.artifacts(index)["metrics"])


def tokens_of(run, index, rows):
    rollouts = run.store.get_table(run.ledger.artifacts(index)["rollouts"])
    return sum(sum(rollouts["written"][row].as_py()) for row in rows)


def test_every_artifact_is_that_of_a_run_with_a_pass(scored, whole_run):
    for index in STEPS:
        assert "logprobs" not in scored.ledger.tasks(index)
        assert digests(scored, index) == digests(whole_run, index)


def test_metrics_are_those_of_the_tokens_that_were_compared(scored, whole_run):
    drawn = set()
    for index in STEPS:
        found, expected = metrics(scored, index), metrics(whole_run, index)
        if source_of(scored) == "training":
            assert found == expected
            continue
        rows = compared_rows(SAMPLED, index, WRITTEN).nonzero().flatten().tolist()
        drawn.update(rows)
        assert len(rows) == 1
        assert found["alignment/tokens"] == tokens_of(whole_run, index, rows) < expected["alignment/tokens"]
        assert found["alignment/tokens_differing"] == 0
        others = {name for name in expected if not name.startswith("alignment/")}
        assert {name: found[name] for name in others} == {name: expected[name] for name in others}
    assert source_of(scored) == "training" or len(drawn) > 1, "each step draws anew"


@pytest.mark.slow
def test_several_updates_start_from_the_rollouts_log_probs(run_of, loop_run):
    passing, found = loop_run("passing", **{"training.minibatches": 2}), run_of("several updates")
    first, expected = digests(found, 1), digests(passing, 1)
    different = {"logprobs", "kv_statistics", "scales", "sync"}
    assert {name for name in expected if first.get(name) != expected[name]} <= different
    assert first["next_policy"] == expected["next_policy"], "old log-probs are equal, and so are both updates"
    old = [run.store.get_table(run.ledger.artifacts(1)["logprobs"])["logprobs"] for run in (found, passing)]
    assert old[0] == old[1]
    for index in STEPS:
        assert metrics(found, index)["alignment/tokens_differing"] == 0
        assert metrics(found, index)["train/first_ratio_deviation"] == 0


def test_a_scored_run_is_replayed_and_verified(any_kind, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    scored = any_kind
    verdicts = scored.replayed([3])
    assert [(verdict.step, verdict.outcome) for verdict in verdicts] == [(3, "equal")]
    assert not [finding for finding in verify(RunView.read(scored.folder)) if finding.severity == "error"]


@pytest.mark.parametrize("cut", ["reward", "train"])
def test_a_run_that_was_killed_around_its_update_ends_equal(any_kind, copy_of, cut):
    run = copy_of(any_kind)
    run.cut_after(3, cut)
    if cut == "train":
        run.file(3, "logprobs").write_bytes(b"damaged")
        run.file(3, "kv_statistics").unlink()
    run.resume()
    assert run.records == any_kind.records


class LyingEngine:
    """Gives one token of step 3 another log-prob than it was drawn with."""

    def __init__(self, engine, group, sample):
        self._engine, self._liar = engine, (group, sample)

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def generate(self, groups, sampling):
        for finished in self._engine.generate(groups, sampling):
            for done in finished:
                if (done.group, done.sample) == self._liar:
                    done.logprobs[1] = math.nextafter(done.logprobs[1], -math.inf) - 1e-6
            yield finished


@pytest.mark.parametrize("audited", [True, False])
def test_an_audited_token_that_differs_fails_the_step_before_the_update(sampled, copy_of, audited):
    run, rows = copy_of(sampled), compared_rows(SAMPLED, 3, WRITTEN).tolist()
    group, sample = divmod(rows.index(audited), 4)
    run.cut_after(3, "prompts")
    with run.opened() as live:
        begin(live)
        live.engine, before = LyingEngine(live.engine, group, sample), live.trainer.digest()
        if audited:
            began = rf"^step 3, task train: update {2 * live.config.training.minibatches} of policy 2"
            named = rf"{began}: group {group}, sample {sample}, token 1: .* log-prob -\d.*, this"
            with pytest.raises(LogprobError, match=named):
                iterate(live, 3, carried(live, 3))
            assert (live.trainer.version, live.trainer.digest()) == (2, before)
            assert "train" not in live.directory.ledger.tasks(3)
        else:
            iterate(live, 3, carried(live, 3))
            assert metrics(run, 3)["alignment/tokens_differing"] == 0
            assert metrics(run, 3)["train/first_ratio_deviation"] > 0
    # What the engine said is stored: without that it is asked again.
    run.cut_after(3, "prompts")
    shutil.rmtree(run.folder / "shards")
    run.resume()
    assert run.records == sampled.records


def test_the_share_is_a_function_of_seed_and_step():
    def drawn(index, **settings):
        config = load_config("tiny", {"logprobs.source": "rollout", **settings})
        return compared_rows(config, index, WRITTEN[:1].expand(100, -1)).nonzero().flatten().tolist()

    assert len(drawn(1)) == 7, "a sixteenth, rounded up"
    assert drawn(1) == drawn(1, steps=3) != drawn(2)
    assert drawn(1, seed=1) != drawn(1)
    assert len(drawn(1, **{"logprobs.audit_share": 1.0})) == 100
    assert len(drawn(1, **{"logprobs.audit_share": 1e-9})) == 1
    assert compared_rows(load_config("tiny"), 1, WRITTEN[:3]).tolist() == [True] * 3


FILTER = {"name": "token_k1", "low": 0.5, "high": 2.0}
CUSTOM = {"correction.method": "custom", "correction.filters": [FILTER]}
VETO = {"correction.method": "custom", "correction.veto": 0.1}
PRESET = {"correction.method": "preset", "correction.preset": "slime/mis"}
REFERENCE = {
    "pipeline.insert": [
        {
            "after": "rollout",
            "step": {"name": "reference", "uses": "tasks.reference:reference", "needs": ["rollouts", "scales"]},
        }
    ],
    "pipeline.rewire": {"train": {"reference": "reference"}},
}


@pytest.mark.parametrize(
    ("source", "settings", "reason"),
    [
        ("training", {"training.minibatches": 2}, "of training.minibatches=2 updates only the first"),
        ("training", {"loss.policy": "clip_cov"}, "loss.policy=clip_cov selects among all tokens"),
        ("training", {"loss.policy": "kl_cov"}, "loss.policy=kl_cov selects among all tokens"),
        ("training", {**REFERENCE, "loss.reward_kl": 0.1}, "loss.reward_kl=0.1"),
        ("training", {"correction.seq_logprob_error_threshold": 2.0}, "correction.seq_logprob_error_threshold"),
        ("training", PRESET, "correction.normalise=token"),
        ("training", CUSTOM, "correction.denominator=kept with filters"),
        (
            "training",
            {"correction.method": "custom", "correction.veto": 0.1},
            "correction.denominator=kept with filters",
        ),
        (
            "training",
            {**CUSTOM, "correction.denominator": "all", "correction.baseline": "kept"},
            "correction.baseline=kept with filters",
        ),
        ("training", {"training.trainer": "megatron"}, "the megatron trainer does not give"),
        ("rollout", {"precision.training.linear": "bf16"}, "not promised to be equal bit for bit"),
        ("rollout", {"training.packed": True}, "not promised to be equal bit for bit"),
        ("training", {"pipeline.steps.logprobs.uses": "mine:score"}, "has 0, 1 and 0 of these"),
        ("rollout", {"pipeline.steps.train.uses": "mine:train"}, "has 1, 0 and 0 of these"),
        ("training", {"pipeline.rewire": {"train": {"scales": "others"}}}, "step train has others for scales"),
    ],
)
def test_what_would_not_be_equal_is_refused_in_one_line(source, settings, reason):
    with pytest.raises(UserError, match=rf"^logprobs\.source={source}: .*{reason}") as refused:
        pipeline_of(load_config("tiny", {"logprobs.source": source, **settings}))
    assert "\n" not in str(refused.value)


def test_a_step_that_scores_needs_its_source():
    with pytest.raises(UserError, match=r"^logprobs\.source=pass: step train is tasks\.train:train_scoring"):
        load_config("tiny", {"pipeline.steps.train.uses": "tasks.train:train_scoring"})


@pytest.mark.parametrize("settings", [{}, {**CUSTOM, "correction.denominator": "all"}, {"correction.method": "none"}])
def test_what_is_equal_is_let_through(settings):
    for source in ("training", "rollout"):
        plan = pipeline_of(load_config("careful", {"logprobs.source": source, **settings}))
        step = next(step for step in plan.steps if step.uses == "tasks.train:train_scoring")
        assert step.inputs == {name: name for name in ("rollouts", "policy", "scales", "reference")} | {
            "rewards": "filtered"
        }
        assert "logprobs" not in {step.name for step in plan.steps}
