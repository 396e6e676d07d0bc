"""A run whose filters drop rows: its updates share out what is left, and its metrics are of that."""

import math
import shutil
from statistics import fmean

import pytest

from fp8core.config.load import load_config
from fp8core.run.context import RunContext
from fp8core.run.verify import verify
from fp8core.store.run_view import RunView


@pytest.fixture(scope="module")
def filtered(loop_run, small):
    """For reading only. Of its steps one has no row left, and others a part of them."""
    ahead = {"pipeline.mode": "asynchronous", "pipeline.ahead_tokens": 12, "pipeline.chunk_tokens": 4}
    return loop_run("filtered", shipped="dapo", **small, **ahead, **{"steps": 4, "training.minibatches": 2})


def test_every_update_has_tokens(filtered):
    kept, ratios, rates = (filtered.metric(f"train/{name}") for name in ("rows", "ratio_mean", "learning_rate"))
    digests = {step: record["weights_digest"] for step, record in enumerate(filtered.records)}
    tables = [filtered.store.get_table(filtered.ledger.artifacts(step)["filtered"]) for step in kept]
    rows = [sum(table["keep"].to_pylist()) for table in tables]
    assert [*kept.values()] == rows
    assert 0 in rows
    assert len({0, 16}.union(rows)) > 2
    updates = 0
    for step, left in kept.items():
        updates += 2 if left else 0
        assert ratios[step] == pytest.approx(1 if left else 0, abs=0.05)
        assert (digests[step] == digests[step - 1]) == (left == 0)
        assert rates[step] == pytest.approx(1e-4 * min(1, updates / 5))


GRADED = """
from pathlib import Path

def score(prompt, completion, reference, finish):
    return 0.0 if Path(__file__).with_name("strict").exists() else sum(completion.encode()) % 2
"""


def test_a_batch_without_a_right_answer_makes_no_update(loop_run, small, tmp_path):
    """Answers of other lengths have other rewards; neither these nor weight decay or moments move the policy."""
    (tmp_path / "graded.py").write_text(GRADED)
    run = loop_run(
        "wrong",
        shipped="dapo",
        **small,
        **{"reward.verifier": f"{tmp_path / 'graded.py'}:score", "checkpoint.every": 1, "checkpoint.keep": 3},
        **{"training.weight_decay": 0.5, "training.warmup_steps": 0, "steps": 1},
        **{"reward.length": {"longest": 16, "buffer": 16}},
    )
    (tmp_path / "strict").touch()
    run.resume(steps=2)
    artifacts = run.ledger.artifacts(2)
    assert len({*run.store.get_table(artifacts["shaped"])["reward"].to_pylist()}) > 1
    assert not any(run.store.get_table(artifacts["filtered"])["keep"].to_pylist())
    assert {*run.store.get_table(artifacts["advantages"])["advantage"].to_pylist()} == {0.0}
    assert run.metric("reward/groups_with_signal") == {1: pytest.approx(0.5, abs=0.5), 2: 0.0}
    assert (run.metric("train/rows")[1] > 0, run.metric("train/rows")[2]) == (True, 0)
    digests = [record["weights_digest"] for record in run.records]
    assert digests[0] != digests[1] == digests[2]
    for name in ("masters.safetensors", "optimiser.safetensors"):
        before, after = ((run.folder / "checkpoints" / f"0000{step}" / name).read_bytes() for step in (1, 2))
        assert before == after


def test_steps_of_an_earlier_version_are_made_again_as_they_were(loop_run, small, copy_of, monkeypatch):
    """They have neither scores nor advantages; those that come after them have both."""
    with monkeypatch.context() as earlier:
        earlier.setattr(RunContext, "records_scores", lambda run, index: False)
        old = loop_run("old", shipped="dapo", **small, **{"steps": 2, "checkpoint.every": 2})
    artifacts = old.ledger.artifacts(2)
    assert "advantages" not in artifacts
    assert all("score" not in old.store.get_table(artifacts[name]).column_names for name in ("rewards", "shaped"))
    assert [verdict.outcome for verdict in old.replayed(range(1, 3))] == ["equal"] * 2
    run = copy_of(old)
    shutil.rmtree(run.folder / "checkpoints" / "00002")
    for name in ("rewards", "shaped", "filtered"):
        run.file(2, name).unlink(missing_ok=True)
    run.resume(steps=3)
    assert [each["weights_digest"] for each in run.records[:3]] == [each["weights_digest"] for each in old.records]
    artifacts = run.ledger.artifacts(3)
    assert {"advantages"} <= artifacts.keys()
    assert "score" in run.store.get_table(artifacts["shaped"]).column_names
    assert not [finding for finding in verify(RunView.read(run.folder)) if finding.severity == "error"]
    assert run.replayed(range(3, 4))[0].outcome == "equal"


def test_the_run_is_replayed_and_goes_on_equal(filtered, copy_of):
    assert [verdict.outcome for verdict in filtered.replayed(range(2, 5))] == ["equal"] * 3
    run = copy_of(filtered)
    run.cut_after(3, "train")
    run.resume()
    assert run.records == filtered.records


def test_metrics_by_age_are_of_what_the_update_looks_at(filtered):
    for step in range(1, 5):
        artifacts = filtered.ledger.artifacts(step)
        rollouts, scored, rewards = (
            filtered.store.get_table(artifacts[name]).to_pylist() for name in ("rollouts", "logprobs", "filtered")
        )
        ratios = [
            math.exp(new - old)
            for row, other, kept in zip(rollouts, scored, rewards, strict=True)
            for new, old in zip(other["logprobs"], row["logprobs"], strict=True)
            if kept["keep"]
        ]
        found = filtered.store.get_json(artifacts["metrics"])
        name = "correction/sampling_importance_ratio"
        assert (name in found) == bool(ratios)
        assert not ratios or found[name] == pytest.approx(fmean(ratios), rel=1e-5)


@pytest.mark.parametrize(("shipped", "learnt"), [("tiny", None), ("dapo", "filtered"), ("careful", "filtered")])
@pytest.mark.parametrize("source", ["pass", "training"])
def test_a_record_reads_other_rewards_only_where_the_update_does(shipped, learnt, source):
    config = load_config(shipped, {"pipeline.mode": "asynchronous", "logprobs.source": source})
    (step,) = (step for step in config.pipeline.steps if step.name == "record")
    assert (step.inputs()["rewards"], step.inputs().get("learnt")) == ("rewards", learnt)
