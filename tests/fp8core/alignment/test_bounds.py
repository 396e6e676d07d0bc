"""What a configuration promises, the bounds that follow, and the decision to stop."""

from typing import Any

import pytest

from fp8core.alignment.bounds import BOUND_METRICS, StopBounds, first_crossing, stop_bounds, unverifiable
from fp8core.config.load import load_config
from fp8core.errors import UserError

STOCK = {"rollout.engine": "vllm", "rollout.vllm.model": "stock"}
PACKED_ON_CPU = {"training.packed": True}
EQUAL = {"error": 1, "tokens_differing": 0, "probe_differing": 0}
FIRST_UPDATE = {"ratio_bias": 0, "ratio_deviation": 0, "ratio_clipped": 0}
NEAR = {"error": 1.1, "k3": 0.01}


def of(config: str = "tiny", **overrides: Any) -> StopBounds:
    return stop_bounds(load_config(config, overrides))


def steps(count: int = 1, **changed: float) -> list[dict[str, float]]:
    healthy = {"error": 1.0, "effective_sample_size": 1.0, "probe_error": 1.0}
    return [{BOUND_METRICS[name].name: (healthy | changed).get(name, 0.0) for name in BOUND_METRICS}] * count


@pytest.mark.parametrize(
    ("config", "overrides", "contract", "limits", "decision"),
    [
        ("tiny", {}, "exact", EQUAL | FIRST_UPDATE, ("fail", 1)),
        ("tiny-moe", {}, "exact", EQUAL | FIRST_UPDATE, ("fail", 1)),
        ("tiny", PACKED_ON_CPU | {"precision.rounding_points": "kernels"}, "exact", EQUAL | FIRST_UPDATE, ("fail", 1)),
        ("tiny", PACKED_ON_CPU, "matched", NEAR, ("fail", 3)),
        ("h200-small", {}, "aligned", EQUAL | FIRST_UPDATE, ("fail", 1)),
        ("h200-small", {"training.deterministic": False}, "matched", NEAR, ("fail", 3)),
        ("h200-small", STOCK, "matched", NEAR, ("fail", 3)),
        ("tiny", {"precision.training.linear": "bf16"}, "mismatched", NEAR | FIRST_UPDATE, ("fail", 3)),
        (
            "tiny",
            {"precision.training.kv_cache": "bf16", "correction.method": "none", "precision.accept_mismatch": True},
            "accepted",
            NEAR | FIRST_UPDATE,
            ("warn", 3),
        ),
    ],
)
def test_every_contract_has_defaults(config, overrides, contract, limits, decision) -> None:
    found = of(config, **overrides)
    assert found.contract == contract
    assert {name: found.limits[name] for name in limits} == limits
    assert found.limits["mask_differing"] == 0
    assert (found.action, found.patience) == decision


BF16 = {"precision.training.linear": "bf16"}


def test_every_reason_why_a_run_is_unverifiable_is_told() -> None:
    formats = "the sides compute linear fp8_block and bf16"
    ahead = {"pipeline.mode": "asynchronous"}
    assert unverifiable(load_config("tiny", BF16)) is None
    assert unverifiable(load_config("tiny", ahead)) is None
    assert unverifiable(load_config("tiny", ahead | BF16)) == formats


def test_a_setting_replaces_its_default_and_says_so() -> None:
    found = of(**{"alignment.stop.error": 1.05, "alignment.stop.k3": "none", "alignment.stop.patience": 4})
    assert found.limits["error"] == 1.05
    assert "k3" not in found.limits
    described = found.description()
    assert described["alignment.stop.error"] == "1.05 (configuration)"
    assert described["alignment.stop.k3"] == "none (configuration)"
    assert described["alignment.stop.tokens_differing"] == "0 (exact contract)"
    assert described["alignment.stop.patience"] == "4 (configuration)"


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("error", 1.2, "alignment.stop.error=1: above it for 2 steps in a row (1.2, 1.2)"),
        ("tokens_differing", 3, "alignment.stop.tokens_differing=0: above it for 2 steps in a row (3, 3)"),
        ("ratio_bias", -1e-9, "alignment.stop.ratio_bias=0: above it for 2 steps in a row (-1e-09, -1e-09)"),
        ("ratio_deviation", 1e-9, "alignment.stop.ratio_deviation=0: above it for 2 steps in a row (1e-09, 1e-09)"),
        ("reward_slope", -0.5, "alignment.stop.reward_slope=0: below it for 2 steps in a row (-0.5, -0.5)"),
        ("mask_differing", 4, "alignment.stop.mask_differing=0: above it for 2 steps in a row (4, 4)"),
        ("probe_differing", 1, "alignment.stop.probe_differing=0: above it for 2 steps in a row (1, 1)"),
        ("error", float("nan"), "alignment.stop.error=1: above it for 2 steps in a row (nan, nan)"),
    ],
)
def test_a_bound_that_is_crossed_is_named(name, value, reason) -> None:
    found = first_crossing(of(), steps(2, **{name: value}))
    assert found is not None
    assert found.reason == reason


def test_a_lower_bound_is_crossed_from_above() -> None:
    bounds = of(**{"alignment.stop.effective_sample_size": 0.9})
    assert first_crossing(bounds, steps(effective_sample_size=0.95)) is None
    found = first_crossing(bounds, steps(effective_sample_size=0.25))
    assert found is not None
    assert found.reason == "alignment.stop.effective_sample_size=0.9: below it for 1 step (0.25)"


def test_different_bounds_crossed_in_turn_are_not_one_crossed_for_long() -> None:
    assert first_crossing(of(**{"alignment.stop.k3": 0.01}), steps(k3=0.5) + steps(error=9.0)) is None


def test_a_bound_on_what_nobody_measures_is_refused() -> None:
    expected = (
        r"alignment\.stop\.k3: no step of the pipeline measures alignment/k3_kl; add tasks\.record:record, or set "
        r"alignment\.stop\.k3 to none"
    )
    metrics = steps()[0]
    del metrics["alignment/k3_kl"]
    with pytest.raises(UserError, match=expected):
        first_crossing(of(**{"alignment.stop.k3": 0.01}), [metrics])
