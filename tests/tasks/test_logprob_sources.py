"""Runs without a pass for log-probs store what a run with one stores, and refuse what would not be equal."""

import math
from functools import cache

import pytest
import torch

from fp8core.config.load import load_config
from fp8core.errors import UserError
from fp8core.run.batches import compared_rows
from fp8core.run.loop import IN_PROCESS, begin
from fp8core.run.refusals import pipeline_of
from fp8core.run.verify import verify
from fp8core.store.run_directory import read_description
from fp8core.store.run_view import RunView
from fp8core.training.trainer import LogprobError

STEPS = range(1, 5)
WRITTEN = torch.ones(16, 1, dtype=torch.bool)
KINDS = {
    "training": {"logprobs.source": "training"},
    "rollout": {"logprobs.source": "rollout"},
    "several updates": {"logprobs.source": "rollout", "training.minibatches": 2, "training.epochs": 2},
    "two passes": {"logprobs.source": "training", "training.epochs": 2},
    "two passes after one for log-probs": {"training.epochs": 2},
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


@pytest.fixture(params=[kind for kind in KINDS if kind != "two passes after one for log-probs"])
def any_kind(request, run_of):
    return run_of(request.param)


def source_of(run):
    return read_description(run.folder).config["logprobs"]["source"]


def digests(run, index):
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


def test_later_passes_leave_the_rollout_policy_behind_and_no_bound_minds(run_of):
    scored, passed = run_of("two passes"), run_of("two passes after one for log-probs")
    for index in STEPS:
        assert digests(scored, index) == digests(passed, index)
        found = metrics(scored, index)
        assert found == metrics(passed, index)
        assert found["alignment/token_mult_prob_error"] == 1
        assert found["train/first_ratio_deviation"] == 0
    assert max(scored.metric("train/last_ratio_deviation").values()) > 0
    one_pass = run_of("training")
    assert "last_ratio_deviation" not in one_pass.store.get_json(one_pass.ledger.artifacts(1)["train_report"])


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


def test_a_scored_run_is_replayed_and_verified(any_kind, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    scored = any_kind
    verdicts = scored.replayed([3])
    assert [(verdict.step, verdict.outcome) for verdict in verdicts] == [(3, "equal")]
    assert not [finding for finding in verify(RunView.read(scored.folder)) if finding.severity == "error"]


def test_a_run_that_was_killed_after_its_update_ends_equal(sampled, tmp_path):
    run = sampled.copy(tmp_path)
    run.cut_after(3, "train")
    run.resume()
    assert run.records == sampled.records


class LyingEngine:
    """Gives one token of step 3 another log-prob than it was drawn with."""

    def __init__(self, engine, group, sample):
        self._engine, self._liar = engine, (group, sample)

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def generate(self, groups, sampling):
        numbers = [group.group for group in groups]
        for finished in self._engine.generate(groups, sampling):
            for done in finished:
                if (numbers.index(done.group), done.sample) == self._liar:
                    done.logprobs[1] = math.nextafter(done.logprobs[1], -math.inf) - 1e-6
            yield finished


def test_an_audited_token_that_differs_fails_the_step_before_the_update(sampled, tmp_path):
    run, rows = sampled.copy(tmp_path), compared_rows(SAMPLED, 3, WRITTEN).tolist()
    group, sample = divmod(rows.index(True), 4)
    run.cut_after(3, "prompts")
    with run.opened() as live:
        begin(live)
        live.workers.engine, before = LyingEngine(live.engine, group, sample), live.trainer.digest()
        began = rf"^step 3, task train: update {2 * live.config.training.updates} of policy 2"
        named = rf"{began}: group {group}, sample {sample}, token 1: .* log-prob -\d.*, this"
        with pytest.raises(LogprobError, match=named):
            IN_PROCESS.iterate(live, 3)
        assert (live.trainer.version, live.trainer.digest()) == (2, before)
        assert "train" not in live.directory.ledger.tasks(3)


FILTER = {"name": "token_k1", "low": 0.5, "high": 2.0}
CUSTOM = {"correction.method": "custom", "correction.filters": [FILTER]}


@pytest.mark.parametrize(
    ("source", "settings", "reason"),
    [
        ("training", {"training.minibatches": 2}, "of training.minibatches=2 updates only the first"),
        ("training", CUSTOM, "correction.denominator=kept with filters"),
        ("training", {"training.trainer": "megatron"}, "the megatron trainer does not give"),
        ("rollout", {"precision.training.linear": "bf16"}, "not promised to be equal bit for bit"),
    ],
)
def test_what_would_not_be_equal_is_refused_in_one_line(source, settings, reason):
    with pytest.raises(UserError, match=rf"^logprobs\.source={source}: .*{reason}") as refused:
        pipeline_of(load_config("tiny", {"logprobs.source": source, **settings}))
    assert "\n" not in str(refused.value)
