"""The decision to stop: which bound, after how many steps."""

import pytest

from fp8core.alignment.bounds import crossed
from fp8core.config.run import StopConfig
from fp8core.errors import UserError


def steps(error: float = 1.0, k3: float = 0.0, ess: float = 1.0, count: int = 1) -> list[dict[str, float]]:
    metrics = {"alignment/token_mult_prob_error": error, "alignment/k3_kl": k3, "alignment/ess": ess}
    return [metrics] * count


def test_equality_is_within_the_tightest_bounds() -> None:
    assert crossed(StopConfig(error=1, k3=0, effective_sample_size=1, patience=1), steps()) is None


@pytest.mark.parametrize(
    ("stop", "metrics", "reason"),
    [
        ({"error": 1.05}, {"error": 1.2}, "alignment.stop.error=1.05: above it for 2 steps in a row (1.2, 1.2)"),
        ({"k3": 0.01}, {"k3": 0.5}, "alignment.stop.k3=0.01: above it for 2 steps in a row (0.5, 0.5)"),
        (
            {"effective_sample_size": 0.9},
            {"ess": 0.25},
            "alignment.stop.effective_sample_size=0.9: below it for 2 steps in a row (0.25, 0.25)",
        ),
    ],
)
def test_a_bound_that_is_crossed_is_named(stop, metrics, reason) -> None:
    found = crossed(StopConfig(**stop, patience=2), steps(**metrics, count=2))
    assert found is not None
    assert found.reason == reason


def test_one_good_step_among_the_last_is_enough() -> None:
    stop = StopConfig(k3=0.01, patience=3)
    bad, good = steps(k3=0.5), steps(k3=0.001)
    assert crossed(stop, bad * 2 + good + bad * 2) is None
    assert crossed(stop, good + bad * 3) is not None


def test_fewer_steps_than_the_patience_decide_nothing() -> None:
    assert crossed(StopConfig(k3=0.01, patience=3), steps(k3=0.5, count=2)) is None


def test_different_bounds_crossed_in_turn_are_not_one_crossed_for_long() -> None:
    history = steps(k3=0.5) + steps(error=9.0)
    assert crossed(StopConfig(k3=0.01, error=2, patience=2), history) is None


def test_a_bound_on_what_nobody_measures_is_refused() -> None:
    with pytest.raises(UserError, match=r"alignment\.stop\.k3: no step of the pipeline measures alignment/k3_kl"):
        crossed(StopConfig(k3=0.01, patience=1), [{"reward/mean": 1.0}])
