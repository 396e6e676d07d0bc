"""The verdict on numbers made up for it, paired differences of learning curves, and the numbers of a run."""

from dataclasses import replace

import numpy as np
import pytest

from fp8core.config.parity import ParityConfig
from fp8core.parity import (
    LearningCurve,
    TrainingMeasurement,
    crossed_interval,
    headline_of,
    judge,
    measure,
    outcome_of,
)
from fp8core.report.run_data import read_run

STEPS, PROMPTS = 20, 64
SEEDS = (0, 1, 2)
VARIANTS = ("bf16", "fp8-rollout", "fp8-end-to-end")


def curve(*accuracies, prompts=1000):
    """Evaluations at steps 0, 1, ..., at which the first prompts are right."""
    scores = [np.arange(prompts) < round(accuracy * prompts) for accuracy in accuracies]
    return LearningCurve(tuple(range(len(scores))), tuple(map(str, range(prompts))), np.array(scores, dtype=float))


LEARNS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, *[0.95] * 10)


def training(variant, seed, **changed):
    mismatched = variant == "fp8-rollout"
    made = TrainingMeasurement(
        variant=variant,
        seed=seed,
        steps=(20, 20),
        accuracy=0.95,
        curve=curve(*LEARNS),
        errors=(1.02, 1.03) if mismatched else (1.0, 1.0),
        k3=(1e-4, 2e-4) if mismatched else (0.0, 0.0),
        ess=(0.999, 0.998) if mismatched else (1.0, 1.0),
    )
    return replace(made, **changed)


@pytest.fixture
def trainings():
    return {(variant, seed): training(variant, seed) for variant in VARIANTS for seed in SEEDS}


def verdict(trainings, failures=None):
    return judge(list(trainings.values()), ParityConfig(), variants=VARIANTS, seeds=SEEDS, failures=failures or {})


def spoiled(trainings, variant, **changed):
    return {key: replace(one, **changed) if key[0] == variant else one for key, one in trainings.items()}


def test_trainings_without_fault_pass(trainings):
    found = verdict(trainings)
    assert (outcome_of(found), headline_of(found)) == ("PASS", "PASS")


@pytest.mark.parametrize(
    ("variant", "changed", "name"),
    [
        ("fp8-rollout", {"curve": curve(*[0.4] * 5, *LEARNS[5:])}, "held-out accuracy minus BF16"),
        ("fp8-rollout", {"curve": curve(*LEARNS[:-3], 0.85, 0.85, 0.85)}, "held-out accuracy minus BF16, at the end"),
        ("fp8-rollout", {"errors": (1.02, 1.11)}, "largest probability error"),
        ("fp8-end-to-end", {"errors": (1.0, 1.0000001)}, "largest probability error"),
        ("fp8-rollout", {"k3": (0.002,)}, "largest k3 divergence"),
        ("fp8-rollout", {"ess": (0.99, 0.9)}, "smallest effective sample size"),
    ],
)
def test_each_bound_fails_the_verdict_by_itself(trainings, variant, changed, name):
    found = verdict(spoiled(trainings, variant, **changed))
    assert outcome_of(found) == "FAIL"
    assert [(check.variant, check.name) for check in found if check.outcome == "FAIL"] == [(variant, name)]
    assert f"{variant}: {name}" in headline_of(found)


@pytest.mark.parametrize(
    "changed",
    [
        {"steps": (19, 20)},
        {"curve": None},
        {"curve": curve(*LEARNS[::2])},
        {"curve": curve(*LEARNS, prompts=999)},
        {"errors": ()},
        {"k3": ()},
        {"ess": ()},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_is_missing_never_passes(trainings, changed):
    assert outcome_of(verdict(spoiled(trainings, "fp8-end-to-end", **changed))) == "NOT ENOUGH DATA"


def test_a_training_that_is_missing_never_passes(trainings):
    del trainings["fp8-rollout", 2]
    found = verdict(trainings)
    assert outcome_of(found) == "NOT ENOUGH DATA"
    assert headline_of(found) == "NOT ENOUGH DATA: fp8-rollout: complete 2 of 3 seeds trained to their last step"
    assert outcome_of(verdict({})) == "NOT ENOUGH DATA"


def test_a_training_that_failed_fails(trainings):
    del trainings["fp8-rollout", 2]
    found = verdict(trainings, failures={("fp8-rollout", 2): "the engine holds other weights"})
    assert headline_of(found) == "FAIL: fp8-rollout: complete seed 2: the engine holds other weights"


def test_an_interval_across_the_bound_asks_for_more_seeds(trainings):
    for seed, last in zip(SEEDS, (0.95, 0.85, 0.9), strict=True):
        trainings["fp8-rollout", seed] = training("fp8-rollout", seed, curve=curve(*LEARNS[:-1], last))
    found = verdict(trainings)
    assert outcome_of(found) == "NOT ENOUGH DATA"
    (check,) = (check for check in found if check.outcome == "NOT ENOUGH DATA")
    assert check.name == "held-out accuracy minus BF16, at the end"
    # Over the last three evaluations: mean and deviation 0.05 / 3, so 4.303 / sqrt(3) of it to each side for the seeds
    # alone, which is -0.0581 to +0.0247; prompts add the rest.
    assert check.found == "-0.0167 (-0.0584 to +0.0251, 3 seeds)"


@pytest.mark.parametrize("correlated", [False, True])
def test_intervals_hold_what_they_promise_whatever_the_autocorrelation(correlated):
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        gaps = random.standard_normal((8, STEPS))
        if correlated:
            for step in range(1, STEPS):
                gaps[:, step] = 0.95 * gaps[:, step - 1] + np.sqrt(1 - 0.95**2) * gaps[:, step]
        table = gaps.mean(axis=1, keepdims=True) + random.standard_normal((8, PROMPTS))
        found = crossed_interval(table)
        covered += found.low <= 0 <= found.high
    assert 0.92 <= covered / 400 <= 0.98


def test_a_run_as_the_verdict_takes_it(whole_run):
    run = read_run(whole_run.folder, "whole")
    measured = measure(run, "fp8-end-to-end-kv", 0, 2)
    assert (measured.steps, measured.whole) == ((4, 4), True)
    assert measured.errors == measured.ess == (1.0,) * 4
    assert measured.k3 == (0.0,) * 4
    held = [row["reward/heldout_accuracy"] for row in run.history if "reward/heldout_accuracy" in row]
    assert measured.accuracy == sum(held[-2:]) / 2


def test_a_run_that_was_cut_is_not_whole(run_copy):
    run_copy.cut_after(3, "train")
    measured = measure(read_run(run_copy.folder, "cut"), "fp8-end-to-end-kv", 0, 2)
    assert (measured.steps, measured.whole) == ((2, 4), False)
