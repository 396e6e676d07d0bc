"""The verdict on numbers made up for it."""

from dataclasses import replace

import pytest

from fp8core.config.parity import ParityConfig
from fp8core.parity.golden import Golden
from fp8core.parity.measure import Measured
from fp8core.parity.verdict import judge

SEEDS = (0, 1, 2)
VARIANTS = ("bf16", "fp8-rollout", "fp8-end-to-end", "stress")
GOOD = Golden(19, ())


def training(variant, seed, **changed):
    """A training without fault."""
    mismatched = variant == "fp8-rollout"
    made = Measured(
        variant=variant,
        seed=seed,
        steps=(20, 20),
        accuracy=0.9 + 0.001 * seed,
        errors=(1.02, 1.03) if mismatched else (1.0, 1.0),
        k3=(1e-4, 2e-4) if mismatched else (0.0, 0.0),
        ess=(0.999, 0.998) if mismatched else (1.0, 1.0),
        weights=(0.999, 1.001) if mismatched else (1.0, 1.0),
        ratios=(1.001, 0.999, 1.0) if variant == "stress" else (1.0, 1.0),
        idle=(),
        speed=100.0 if variant == "bf16" else 150.0,
        slope=0.1,
    )
    return replace(made, **changed)


@pytest.fixture
def trainings():
    return {(variant, seed): training(variant, seed) for variant in VARIANTS for seed in SEEDS}


def verdict(trainings, golden=GOOD, platform="sm_90", failures=None):
    return judge(
        list(trainings.values()),
        golden,
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
        ("fp8-rollout", {"accuracy": 0.7}, "held-out accuracy minus BF16"),
        ("fp8-rollout", {"errors": (1.02, 1.11)}, "largest probability error"),
        ("fp8-end-to-end", {"errors": (1.0, 1.0000001)}, "largest probability error"),
        ("fp8-rollout", {"k3": (0.002,)}, "largest k3 divergence"),
        ("fp8-rollout", {"ess": (0.99, 0.9)}, "smallest effective sample size"),
        ("fp8-rollout", {"weights": (1.05, 1.06)}, "mean weight of the mismatch"),
        ("stress", {"ratios": (0.95, 0.94)}, "mean weight of the updates"),
        ("stress", {"ratios": (1.0, 60.0, 1.0)}, "largest weight of the updates"),
        ("stress", {"idle": (4,)}, "skipped updates"),
        ("bf16", {"slope": 3.0}, "memory slope"),
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
        {"accuracy": None},
        {"errors": ()},
        {"k3": ()},
        {"ess": ()},
        {"weights": ()},
        {"ratios": ()},
        {"slope": None},
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
    for seed, accuracy in zip(SEEDS, (0.95, 0.80, 0.88), strict=True):
        trainings["fp8-rollout", seed] = training("fp8-rollout", seed, accuracy=accuracy)
    found = verdict(trainings)
    assert found.outcome == "NOT ENOUGH DATA"
    (check,) = (check for check in found.checks if check.outcome == "NOT ENOUGH DATA")
    assert check.found.startswith("-0.0243 (-0.21")


def test_speed_is_judged_on_a_gpu_only(trainings):
    found = verdict(spoiled(trainings, "fp8-end-to-end", speed=90.0), platform="cpu")
    assert found.outcome == "PASS"
    speeds = [check for check in found.checks if "speed" in check.name]
    assert {check.outcome for check in speeds} == {"not judged"}
    assert {check.found for check in speeds} == {"1.5 on a CPU", "0.9 on a CPU"}


def test_a_wrong_correction_fails_without_any_training():
    found = verdict({}, golden=Golden(19, ("d=(0.1), token 0: weight 0.9, must be 1.1",)))
    assert found.headline.startswith("FAIL: preflight: golden vectors 18 of 19 weights right (d=(0.1)")
