"""The verdict on numbers made up for it."""

from dataclasses import replace

import numpy as np
import pytest

from fp8core.config.parity import ParityConfig
from fp8core.parity.measure import LearningCurve, Measured
from fp8core.parity.verdict import judge

SEEDS = (0, 1, 2)
VARIANTS = ("bf16", "fp8-rollout", "fp8-end-to-end", "stress")


def curve(*accuracies, prompts=1000):
    """Evaluations at steps 0, 1, ..., at which the first prompts are right."""
    scores = [np.arange(prompts) < round(accuracy * prompts) for accuracy in accuracies]
    return LearningCurve(tuple(range(len(scores))), tuple(map(str, range(prompts))), np.array(scores, dtype=float))


LEARNS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, *[0.95] * 10)


def training(variant, seed, **changed):
    """A training without fault."""
    mismatched = variant == "fp8-rollout"
    made = Measured(
        variant=variant,
        seed=seed,
        steps=(20, 20),
        accuracy=0.95,
        curve=curve(*LEARNS),
        errors=(1.02, 1.03) if mismatched else (1.0, 1.0),
        k3=(1e-4, 2e-4) if mismatched else (0.0, 0.0),
        ess=(0.999, 0.998) if mismatched else (1.0, 1.0),
        weights=(0.999, 1.001) if mismatched else (1.0, 1.0),
        ratios=(1.001, 0.999, 1.0) if variant == "stress" else (1.0, 1.0),
        speed=100.0 if variant == "bf16" else 150.0,
    )
    return replace(made, **changed)


@pytest.fixture
def trainings():
    return {(variant, seed): training(variant, seed) for variant in VARIANTS for seed in SEEDS}


def verdict(trainings, platform="sm_90", failures=None):
    return judge(
        list(trainings.values()),
        ParityConfig(),
        variants=VARIANTS,
        seeds=SEEDS,
        platform=platform,
        failures=failures or {},
    )


def spoiled(trainings, variant, **changed):
    return {key: replace(one, **changed) if key[0] == variant else one for key, one in trainings.items()}


def test_trainings_without_fault_pass(trainings):
    found = verdict(trainings)
    assert (found.outcome, found.headline) == ("PASS", "PASS")
    assert all(check.reason for check in found.checks)


@pytest.mark.parametrize(
    ("variant", "changed", "name"),
    [
        ("fp8-rollout", {"curve": curve(*[0.4] * 5, *LEARNS[5:])}, "held-out accuracy minus BF16"),
        ("fp8-rollout", {"curve": curve(*LEARNS[:-3], 0.85, 0.85, 0.85)}, "held-out accuracy minus BF16, at the end"),
        ("fp8-rollout", {"curve": curve(*LEARNS[:5], 0.85, 0.899, *LEARNS[7:])}, "steps to reach 0.9 beyond BF16's"),
        ("fp8-rollout", {"errors": (1.02, 1.11)}, "largest probability error"),
        ("fp8-end-to-end", {"errors": (1.0, 1.0000001)}, "largest probability error"),
        ("fp8-rollout", {"k3": (0.002,)}, "largest k3 divergence"),
        ("fp8-rollout", {"ess": (0.99, 0.9)}, "smallest effective sample size"),
        ("fp8-rollout", {"weights": (1.05, 1.06)}, "mean weight of the mismatch"),
        ("stress", {"ratios": (0.95, 0.94)}, "mean weight of the updates"),
        ("stress", {"ratios": (1.0, 60.0, 1.0)}, "largest weight of the updates"),
        ("fp8-end-to-end", {"speed": 90.0}, "generation speed, of BF16's"),
    ],
)
def test_each_bound_fails_the_verdict_by_itself(trainings, variant, changed, name):
    found = verdict(spoiled(trainings, variant, **changed))
    assert found.outcome == "FAIL"
    assert [(check.variant, check.name) for check in found.failed] == [(variant, name)]
    assert f"{variant}: {name}" in found.headline


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
        {"weights": ()},
        {"ratios": ()},
        {"speed": None},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_is_missing_never_passes(trainings, changed):
    assert verdict(spoiled(trainings, "fp8-end-to-end", **changed)).outcome == "NOT ENOUGH DATA"


def test_a_training_that_is_missing_never_passes(trainings):
    del trainings["fp8-rollout", 2]
    found = verdict(trainings)
    assert found.outcome == "NOT ENOUGH DATA"
    assert found.headline == "NOT ENOUGH DATA: fp8-rollout: complete 2 of 3 seeds trained to their last step"
    assert verdict({}).outcome == "NOT ENOUGH DATA"


def test_a_training_that_failed_fails(trainings):
    del trainings["fp8-rollout", 2]
    found = verdict(trainings, failures={("fp8-rollout", 2): "the engine holds other weights"})
    assert found.headline == "FAIL: fp8-rollout: complete seed 2: the engine holds other weights"


def test_an_interval_across_the_bound_asks_for_more_seeds(trainings):
    for seed, last in zip(SEEDS, (0.95, 0.85, 0.9), strict=True):
        trainings["fp8-rollout", seed] = training("fp8-rollout", seed, curve=curve(*LEARNS[:-1], last))
    found = verdict(trainings)
    assert found.outcome == "NOT ENOUGH DATA"
    (check,) = (check for check in found.checks if check.outcome == "NOT ENOUGH DATA")
    assert check.name == "held-out accuracy minus BF16, at the end"
    # Over the last three evaluations: mean and deviation 0.05 / 3, so 4.303 / sqrt(3) of it to each side for the seeds
    # alone, which is -0.0581 to +0.0247; prompts add the rest.
    assert check.found == "-0.0167 (-0.0584 to +0.0251, 3 seeds)"


def test_a_delay_is_judged_at_the_ceiling_alone(trainings):
    below = {key: replace(one, curve=curve(0.4, 0.5, 0.6, 0.7)) for key, one in trainings.items()}
    (check,) = (c for c in verdict(below).checks if c.variant == "fp8-rollout" and "steps to reach" in c.name)
    assert (check.outcome, check.found) == ("not judged", "BF16 ends at 0.6")


def test_speed_is_judged_on_a_gpu_only(trainings):
    found = verdict(spoiled(trainings, "fp8-end-to-end", speed=90.0), platform="cpu")
    assert found.outcome == "PASS"
    speeds = [check for check in found.checks if "speed" in check.name]
    assert {check.outcome for check in speeds} == {"not judged"}
    assert {check.found for check in speeds} == {"1.5 on a CPU", "0.9 on a CPU"}
