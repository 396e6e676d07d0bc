"""The verdict has its power: nights of the stored model, fewer than the benchmark draws, with a fixed seed."""

import json

import numpy as np
import pytest

from benchmarks.studies.parity_power import (
    BELOW,
    CEILING,
    EIGHT,
    FIVE,
    LATE,
    NONE,
    SCENARIOS,
    SLOWER,
    STORED,
    Model,
    draw_night,
    fit,
    old_verdict,
    power_table,
    verdict,
)
from fp8core.config.load import load_config
from fp8core.parity.measure import BASELINE

NIGHTS = 12
NOISY = f"{BELOW}, noisy"


@pytest.fixture(scope="module")
def stored():
    return json.loads(STORED.read_text())


@pytest.fixture(scope="module")
def judged(stored):
    """Outcomes of some nights: judged(task, loss)."""
    config, model = load_config("tiny-nightly").parity, Model(**stored[0]["model"])

    def outcomes(task, loss, rule=verdict):
        (scenario,) = (one for one in SCENARIOS if (one.task, one.loss) == (task, loss))
        random = np.random.default_rng(7)
        return [rule(draw_night(model, scenario, config.seeds, 256, random), config) for _ in range(NIGHTS)]

    return outcomes


@pytest.mark.parametrize("task", [CEILING, BELOW, NOISY])
def test_equal_policies_pass_and_never_fail(judged, task):
    outcomes = judged(task, NONE)
    assert outcomes.count("PASS") >= NIGHTS - 2
    assert "FAIL" not in outcomes


@pytest.mark.parametrize(
    ("task", "loss"),
    [(CEILING, FIVE), (CEILING, LATE), (CEILING, SLOWER), (BELOW, FIVE), (BELOW, LATE), (NOISY, EIGHT)],
)
def test_a_loss_is_found_and_never_passes(judged, task, loss):
    outcomes = judged(task, loss)
    assert outcomes.count("FAIL") >= NIGHTS - 3
    assert "PASS" not in outcomes


def test_the_rule_before_saw_no_delay_and_no_loss_in_noise(judged):
    assert "FAIL" not in judged(CEILING, "50 % more steps", old_verdict)
    assert judged(NOISY, EIGHT, old_verdict).count("FAIL") < NIGHTS / 2


def test_what_is_drawn_is_what_is_fitted(stored):
    """Parameters of many drawn trainings are near those of the model, and their spread is not fitted too small."""
    model = Model(**{**stored[0]["model"], "training": (0.5, 0.8), "prompt": 1.0, "prompt_of_seed": 1.0})
    night = draw_night(model, SCENARIOS[0], 40, 256, np.random.default_rng(0))
    pairs = [one for one in night if one.variant in (BASELINE, "fp8-end-to-end")]
    found = fit({(one.variant, one.seed): one.curve for one in pairs})
    assert 0.45 < found.training[0] < 0.75
    assert found.training[1] == pytest.approx(0.8, abs=0.1)
    assert (found.prompt, found.prompt_of_seed) == pytest.approx((1.0, 1.0), rel=0.4)
    assert found.answer == pytest.approx(model.answer, abs=0.15)


def test_the_table_is_that_of_the_documentation(stored):
    page = (STORED.parents[2] / "docs" / "results" / "parity.md").read_text()
    assert power_table(stored[1:]) in page
