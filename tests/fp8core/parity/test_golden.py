"""Golden vectors: every shipped correction agrees with the answers; one with a wrong sign does not."""

from dataclasses import replace

import pytest

from fp8core.config.load import load_config
from fp8core.parity.golden import VECTORS, answers_of, compare_golden, preflight
from fp8core.rl.objective import Objective
from fp8core.rl.presets import PRESETS

CUSTOM = {
    "correction.method": "custom",
    "correction.weighting": {"level": "geometric", "action": "clip", "low": 0.5, "high": 1.5},
    "correction.filters": [{"name": "seq_max_k2", "high": 20.0}, {"name": "token_k1", "low": 0.3, "high": 3.0}],
    "correction.veto": 0.3,
    "correction.normalise": "sequence",
}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_agrees_with_the_answers(name):
    golden = preflight(load_config("tiny", {"correction.method": "preset", "correction.preset": name}))
    assert golden.tokens == sum(len(row) for row in VECTORS)
    assert golden.wrong == ()


IN_TURN = CUSTOM | {"correction.order": "in_turn", "correction.normalise_over": "all"}
CORRECTIONS = {"token_tis": {}, "none": {"correction.method": "none"}, "custom": CUSTOM, "in_turn": IN_TURN}


@pytest.mark.parametrize("settings", CORRECTIONS.values(), ids=CORRECTIONS.keys())
def test_configured_corrections_agree_with_the_answers(settings):
    assert preflight(load_config("tiny", settings)).wrong == ()


def test_the_answers_are_numbers_that_one_can_check():
    tis = answers_of(load_config("tiny"))[0]
    assert tis == pytest.approx([1.10517, 0.22313, 2.0, 0.0000454, 1.34986], rel=1e-4)
    assert sum(weight == 0 for row in answers_of(load_config("tiny", CUSTOM)) for weight in row) > 5


def test_a_wrong_sign_is_found():
    config = load_config("tiny")
    objective = Objective(config.loss, config.correction)

    def turned(batch):
        swapped = replace(batch, old_logprobs=batch.rollout_logprobs, rollout_logprobs=batch.old_logprobs)
        return objective.corrected(swapped)[0]

    golden = compare_golden(turned, config)
    assert len(golden.wrong) > 10
    assert golden.wrong[0] == "d=(0.1, -1.5, 0.8, -10.0, 0.3), token 0: weight 0.904837, must be 1.10517"
