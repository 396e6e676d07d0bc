"""Step 0 measures how far FP8 is from BF16, once, and never again for the same run."""

import pytest

from fp8core.config.load import load_config
from fp8core.evaluation.measure import compared_prompts
from fp8core.run.measurement import gap_line
from fp8core.store.ledger import START

BF16 = {"linear": "bf16", "kv_cache": "bf16"}


def gap_of(run):
    return run.store.get_json(run.ledger.artifacts(START)["precision_gap"])


def scores_of(run):
    return list(run.store.get_json(run.ledger.artifacts(START)["evaluation"])["scores"].values())


def mean(values):
    return sum(values) / len(values)


def test_accuracies_are_those_of_runs_in_both_precisions(loop_run):
    """The warm start does not depend on the precision, so a run in BF16 begins with the same weights."""
    learnt = {"warm_start.steps": 40, "warm_start.batch_size": 32, "evaluation.prompts": 24, "steps": 1}
    measured = loop_run("fp8", **learnt, **{"evaluation.precision_gap": 16})
    other = loop_run("bf16", **learnt, **{"precision.rollout": BF16, "precision.training": BF16})
    gap = gap_of(measured)
    assert "precision_gap" not in other.ledger.tasks(START)
    assert gap["prompts"] == 16
    assert gap["tokens"] >= 16
    for found, run in ((gap["accuracy"], measured), (gap["bf16_accuracy"], other)):
        assert found["value"] == mean(scores_of(run)[:16])
        assert 0 <= found["low"] <= found["value"] <= found["high"] <= 1
    assert gap["difference"]["value"] == pytest.approx(gap["accuracy"]["value"] - gap["bf16_accuracy"]["value"])
    line, both = gap_line(gap), [gap[name]["value"] for name in ("accuracy", "bf16_accuracy")]
    assert "held-out {:.3f} and {:.3f} (16 prompts)".format(*both) in line
    assert len(line) <= 100
    # Formats with 3 and 7 bits of mantissa are apart, and not far.
    assert 1e-4 < gap["nats"] < 0.3
    assert 1 + gap["nats"] <= gap["error"] < 1.5
    assert 0 < gap["k3"] < 0.1
    # Of the first 8 of these prompts, and their right answers.
    assert 1e-5 < gap["kl"] < 0.1
    assert 0.5 < gap["same_choice"] <= 1
    assert 0 < abs(gap["answer_shift"]) < 3
    assert f"KL {gap['kl']:.3g} nats" in line


@pytest.mark.parametrize(
    ("name", "settings", "prompts"),
    [
        ("tiny", {"evaluation.prompts": 8}, 8),
        ("tiny", {"evaluation.precision_gap": 0}, 0),
        ("tiny", {"precision.rollout": BF16}, 0),
        ("tiny", {"warm_start": None}, 0),
        ("qwen3-aligned", {}, 0),
    ],
)
def test_when_it_is_measured(name, settings, prompts):
    assert compared_prompts(load_config(name, settings)) == prompts
