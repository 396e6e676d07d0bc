"""Runs that generate ahead, and take the log-probs of the versions that wrote the tokens for the old ones."""

import math
import shutil
from dataclasses import replace
from statistics import fmean, pstdev

import pytest
import torch

from fp8core.alignment.bounds import stop_bounds
from fp8core.config.load import load_config
from fp8core.errors import UserError
from fp8core.rl.objective import Objective
from fp8core.run.checks.settings import pipeline_of, uncorrected_lag
from fp8core.run.commit import stored_metrics
from fp8core.run.execute import carried
from fp8core.run.loop import begin, iterate
from fp8core.training.micro_batch import MicroBatchTrainer
from fp8core.training.trainer import LogprobError

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


@pytest.fixture(scope="module")
def passing(loop_run):
    return loop_run("passing", **AHEAD, **{"correction.method": "none"})


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


def test_tokens_are_those_of_a_run_with_a_pass_until_the_losses_differ(sampled, passing):
    one, other = (run.ledger.artifacts(1) for run in (sampled, passing))
    assert {name for name in other if one[name].digest != other[name].digest} <= {"metrics"}
    assert "logprobs" not in sampled.ledger.tasks(1)
    assert stored_metrics(sampled.ledger, sampled.store, 4) != stored_metrics(passing.ledger, passing.store, 4)


def test_the_one_forward_gives_what_a_pass_gives(passing, loop_run):
    scored = loop_run("scored", **AHEAD, **{"correction.method": "none", "logprobs.source": "training"})
    assert "logprobs" not in scored.ledger.tasks(1)
    for step in STEPS:
        one, other = (run.ledger.artifacts(step) for run in (scored, passing))
        assert {name: ref.digest for name, ref in one.items()} == {name: ref.digest for name, ref in other.items()}


@pytest.mark.parametrize("cut", ["rollout", "train"])
def test_a_run_that_was_cut_and_a_replay_are_equal(sampled, copy_of, tmp_path, monkeypatch, cut):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = copy_of(sampled)
    run.cut_after(3, cut)
    run.resume()
    assert run.records == sampled.records
    assert [verdict.outcome for verdict in run.replayed([3])] == ["equal"]


@pytest.mark.slow
def test_later_updates_start_from_the_same_log_probs_and_are_left_out_of_the_lag(loop_run):
    """All rows are audited: those of the first update beside longer ones of others."""
    run = loop_run("updates", **SAMPLED, **{"training.minibatches": 4, "logprobs.audit_share": 1.0})
    unaged = []
    for step in STEPS:
        metrics = stored_metrics(run.ledger, run.store, step)
        assert metrics["alignment/tokens_differing"] == 0
        unaged.append(metrics.get("correction/sampling_importance_ratio_age_0"))
        rollouts, scored = tables(run, step, "rollouts", "logprobs")
        for row, ours in zip(rollouts, scored, strict=True):
            for version, theirs, mine in zip(row["versions"], row["logprobs"], ours["logprobs"], strict=True):
                assert version < step - 1 or mine == theirs
    assert {*unaged} - {None} == {1}, "a step without tokens of its own policy has no such metric"


def test_a_preset_that_rejects_reports_what_its_loss_weighs(loop_run):
    preset = {"correction.method": "preset", "correction.preset": "verl/bypass_ppo_clip_geo_rs"}
    run = loop_run("rejecting", **SAMPLED | preset)
    rejected = 0
    for step in STEPS:
        metrics = stored_metrics(run.ledger, run.store, step)
        assert metrics["correction/masked_fraction"] == pytest.approx(metrics["train/zero_weight_fraction"])
        rejected += metrics["correction/masked_fraction"] > 0
    assert rejected, "the policy moves far enough"


@pytest.mark.parametrize(("step", "origin"), [(1, "the rollout"), (3, "a pass")])
def test_a_forward_that_learns_from_other_log_probs_fails_the_step(sampled, copy_of, monkeypatch, step, origin):
    """Also where every token is of an older policy: a pass of the audited rows says what it must give."""
    run = copy_of(sampled)
    run.cut_after(step, "reward")
    drawn = MicroBatchTrainer._score_drawn

    def biased(*arguments):
        found = drawn(*arguments)
        return replace(found, logprobs=found.logprobs * 1.01) if found.logprobs.requires_grad else found

    with run.opened() as live:
        begin(live)
        monkeypatch.setattr(MicroBatchTrainer, "_score_drawn", biased)
        with pytest.raises(LogprobError, match=rf"^step {step}, task train: .*: {origin} gave the log-prob"):
            iterate(live, step, carried(live, step))


def test_a_loss_that_selects_does_so_by_the_policy_before_the_update(loop_run, monkeypatch):
    given = []
    selected = Objective.selected

    def watched(self, batch, current, update):
        given.append((batch, current, update))
        return selected(self, batch, current, update)

    monkeypatch.setattr(Objective, "selected", watched)
    run = loop_run("selecting", **SAMPLED, **{"loss.policy": "kl_cov", "steps": 3})
    assert [update for *_, update in given] == [0, 0, 0]
    (*_, (batch, current, _)), (scored,) = given, tables(run, 3, "logprobs")
    for row, ours in enumerate(scored):
        mask = batch.mask[row, : len(ours["logprobs"])]
        assert current[row, : len(mask)][mask].tolist() == torch.tensor(ours["logprobs"])[mask].tolist()
    assert not torch.equal(current[batch.mask], batch.old_logprobs[batch.mask])


class LyingEngine:
    """Gives the last token of whatever it writes another log-prob than it was drawn with."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def generate(self, groups, sampling):
        for finished in self._engine.generate(groups, sampling):
            for done in finished:
                done.logprobs[-1] -= 1e-3
            yield finished


def test_a_verified_token_that_differs_fails_the_step_before_its_update(sampled, copy_of):
    run = copy_of(sampled)
    run.cut_after(3, "train")
    shutil.rmtree(run.folder / "shards")
    with run.opened() as live:
        begin(live)
        iterate(live, 3, carried(live, 3))
        live.engine, before = LyingEngine(live.engine), live.trainer.digest()
        with pytest.raises(LogprobError, match=r"^step 4, task rollout: group \d+, sample \d, token \d+: the rollout"):
            iterate(live, 4, carried(live, 4))
        assert live.trainer.digest() == before
        assert "train" not in live.directory.ledger.tasks(4)
    run.cut_after(3, "train")
    shutil.rmtree(run.folder / "shards")
    run.resume()
    assert run.records == sampled.records


@pytest.mark.parametrize(
    "settings",
    [
        SAMPLED,
        AHEAD | {"correction.method": "preset", "correction.preset": "verl/bypass_ppo_clip"},
        SAMPLED | {"pipeline.mode": "one_step_off", "pipeline.max_staleness": 1, "pipeline.ahead_tokens": None},
    ],
)
def test_no_bound_holds_the_first_ratio_at_one(settings):
    config = load_config("tiny", settings)
    pipeline_of(config)
    assert uncorrected_lag(config) is None
    assert not [name for name in stop_bounds(config).limits if name.startswith("ratio_")]


def test_a_loss_without_a_ratio_does_not_see_age():
    assert "token_tis" in uncorrected_lag(load_config("tiny", SAMPLED | {"loss.policy": "reinforce"}))


@pytest.mark.parametrize("mode", [{"pipeline.mode": "synchronous"}, {"pipeline.max_staleness": 0}])
def test_without_age_the_first_ratio_is_one(mode):
    settings = {name: value for name, value in SAMPLED.items() if not name.startswith("pipeline.")}
    asynchronous = {} if "pipeline.mode" in mode else {"pipeline.mode": "asynchronous"}
    assert stop_bounds(load_config("tiny", settings | asynchronous | mode)).limits["ratio_deviation"] == 0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"correction.method": "token_tis"}, r"correction\.method=token_tis"),
        ({"correction.seq_logprob_error_threshold": 2.0}, r"correction\.seq_logprob_error_threshold=2\.0"),
        ({"correction.method": "preset", "correction.preset": "slime/mis"}, "correction.preset=slime/mis"),
    ],
)
def test_a_correction_that_would_change_nothing_is_refused(settings, named):
    with pytest.raises(UserError, match=rf"^logprobs\.source=rollout with .*, so {named} changes nothing") as refused:
        pipeline_of(load_config("tiny", SAMPLED | settings))
    assert "\n" not in str(refused.value)


def test_a_correction_that_bypasses_old_log_probs_is_not_inert():
    bypass = {"correction.method": "preset", "correction.preset": "verl/bypass_ppo_clip_geo_rs"}
    pipeline_of(load_config("tiny", SAMPLED | bypass))
