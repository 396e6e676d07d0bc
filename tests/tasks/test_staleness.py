"""Staleness and policy lag of a run that generates ahead, and its loss, against loops over the rows of its files."""

import math
from collections import defaultdict
from statistics import fmean, pstdev

import pytest

from fp8core.config.load import load_config
from fp8core.run.refusals import uncorrected_lag
from fp8core.store.ledger import stored_metrics

LOW, HIGH = 0.2, 0.28
SETTINGS = {
    "warm_start.steps": 20,
    "pipeline.mode": "asynchronous",
    "pipeline.ahead_tokens": 3,
    "pipeline.max_staleness": 2,
    "pipeline.max_inflight_prompts": 5,
    "training.learning_rate": 0.01,
    "loss.clip_low": LOW,
    "loss.clip_high": HIGH,
}


@pytest.fixture(scope="module")
def lagging(loop_run):
    """A run whose policy moves far between a token and its update."""
    return loop_run("lagging", **SETTINGS)


def tokens(run, step):
    """A dict of each token that a step learns from: its row's place, age, and log-ratio."""
    artifacts = run.ledger.artifacts(step)
    rollouts, scored = (run.store.get_table(artifacts[name]).to_pylist() for name in ("rollouts", "logprobs"))
    for row, old in zip(rollouts, scored, strict=True):
        for j, version in enumerate(row["versions"]):
            yield {
                "row": (row["group"], row["sample"]),
                "age": step - 1 - version,
                "d": old["logprobs"][j] - row["logprobs"][j],
            }


def test_metrics_by_age_are_those_of_the_files(lagging):
    run = lagging
    seen = set()
    for step in range(1, 5):
        metrics, found = stored_metrics(run.ledger, run.store, step), [*tokens(run, step)]
        ages = [token["age"] for token in found]
        assert (metrics["rollout/staleness_mean"], metrics["rollout/staleness_max"]) == (fmean(ages), max(ages))
        by_age = defaultdict(list)
        for token in found:
            by_age[f"_age_{token['age']}"].append(token["d"])
        expected = {}
        for suffix, ds in {**by_age, "": [token["d"] for token in found]}.items():
            ratios = [math.exp(d) for d in ds]
            capped = [min(ratio, 2.0) for ratio in ratios]
            expected |= {
                f"correction/ess{suffix}": fmean(capped) ** 2 / fmean(v * v for v in capped),
                f"correction/sampling_importance_ratio{suffix}": fmean(ratios),
                f"correction/k3_kl{suffix}": fmean(ratio - 1 - d for ratio, d in zip(ratios, ds, strict=True)),
            }
            if suffix:
                expected[f"rollout/share{suffix}"] = len(ds) / len(found)
                outside = fmean(not 1 - LOW <= ratio <= 1 + HIGH for ratio in ratios)
                expected[f"correction/share_outside_clip{suffix}"] = outside
        suffixed = {name for name in metrics if "_age_" in name}
        assert suffixed == {name for name in expected if "_age_" in name}
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6, abs=1e-9)
        seen |= by_age.keys()
        # The weights of engine and trainer are equal: what differs is the version.
        assert metrics["alignment/tokens_differing"] == 0
    assert seen == {"_age_0", "_age_1", "_age_2"}


def advantages(run, step):
    """GRPO's, by row."""
    rewards = run.store.get_table(run.ledger.artifacts(step)["rewards"]).to_pylist()
    groups = defaultdict(list)
    for row in rewards:
        groups[row["group"]].append(row["reward"])
    found = {}
    for row in rewards:
        values = groups[row["group"]]
        spread = pstdev(values) * math.sqrt(len(values) / (len(values) - 1))
        found[row["group"], row["sample"]] = (row["reward"] - fmean(values)) / (spread + 1e-4)
    return found


def test_the_loss_weighs_a_token_by_the_policy_that_wrote_it(lagging):
    """Decoupled PPO with one update: old is the policy before the update, so the clipped ratio is 1."""
    run = lagging
    learnt = 0
    for step in range(1, 5):
        metrics, advantage = stored_metrics(run.ledger, run.store, step), advantages(run, step)
        kept = [(advantage[token["row"]], min(math.exp(token["d"]), 2.0)) for token in tokens(run, step)]
        assert metrics["train/tokens"] == len(kept)
        assert metrics["train/weight_mean"] == pytest.approx(fmean(weight for _, weight in kept), rel=1e-6)
        assert metrics["train/loss"] == pytest.approx(-sum(a * weight for a, weight in kept) / len(kept), abs=1e-5)
        learnt += any(a and token["age"] for (a, _), token in zip(kept, tokens(run, step), strict=True))
    assert learnt, "a step learns from tokens of an older policy"


# The log-probs of the versions that wrote the tokens are the old ones.
AS_OLD = {"pipeline.verified_share": 1.0, "logprobs.source": "rollout", "correction.method": "none"}


@pytest.fixture(scope="module", params=[1, 2], ids=["one pass", "two passes"])
def sampled(request, loop_run):
    return loop_run("sampled", **SETTINGS | AS_OLD, **{"training.epochs": request.param})


def test_the_clip_sees_the_age_of_a_token(sampled):
    """The ratio of a token is over the version that wrote it, without a weight. Means of one pass are by a loop."""
    moved = 0
    for step in range(1, 5):
        metrics, advantage = stored_metrics(sampled.ledger, sampled.store, step), advantages(sampled, step)
        found = [(advantage[token["row"]], math.exp(token["d"])) for token in tokens(sampled, step)]
        ratios = [ratio for _, ratio in found]
        assert metrics["train/first_ratio_deviation"] == pytest.approx(max(abs(r - 1) for r in ratios), rel=1e-6)
        assert metrics["train/weight_mean"] == 1
        assert metrics["alignment/tokens_differing"] == 0
        moved += metrics["train/first_ratio_deviation"] > 0.01
        if "train/last_ratio_deviation" not in metrics:
            losses = [-min(r * a, min(max(r, 1 - LOW), 1 + HIGH) * a) for a, r in found]
            assert metrics["train/loss"] == pytest.approx(fmean(losses), abs=1e-5)
            assert metrics["train/ratio_mean"] == pytest.approx(fmean(ratios), rel=1e-6)
            assert metrics["correction/sampling_importance_ratio"] == pytest.approx(fmean(ratios), rel=1e-6)
    assert moved, "a step learns from tokens of an older policy"


def test_a_run_that_was_cut_and_a_replay_are_equal(sampled, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = sampled.copy(tmp_path)
    run.cut_after(3, "train")
    run.resume()
    assert run.records == sampled.records
    assert set(sampled.metric("alignment/token_mult_prob_error").values()) == {1}
    assert [verdict.outcome for verdict in run.replayed([3])] == ["equal"]


UNCORRECTED = {"pipeline.mode": "one_step_off", "correction.method": "none"}
UNWEIGHED = {"pipeline.mode": "one_step_off", "correction.method": "custom", "correction.weighting": {"level": "none"}}


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        (UNCORRECTED, True),
        (UNCORRECTED | {"pipeline.max_staleness": 0}, False),
        (UNCORRECTED | {"correction.method": "token_tis"}, False),
        (UNWEIGHED, True),
    ],
)
def test_policy_lag_without_a_correction_is_warned_of(settings, warned):
    said = uncorrected_lag(load_config("tiny", settings))
    assert (said is not None) == warned
    assert said is None or said.startswith("warning: pipeline.mode=one_step_off without a correction")
