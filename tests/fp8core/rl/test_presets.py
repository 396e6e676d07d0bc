import math

import pytest
import torch

from fp8core.errors import UserError
from fp8core.rl.correction import correct
from fp8core.rl.presets import PRESETS, preset

GOLDEN_D = [0.1, -1.5, 0.8, -10.0, 0.3]
R = [math.exp(d) for d in GOLDEN_D]
PRODUCT = math.exp(-10.3)
ONES, NONE, ALL = [1.0] * 5, [0.0] * 5, [True] * 5
TRUNCATED = [R[0], R[1], 2.0, R[3], R[4]]

# Weights and mask of one row with d = GOLDEN_D, worked out by hand from each system's formulas.
GOLDEN = {
    "none": (ONES, ALL),
    "verl/token_is": (TRUNCATED, ALL),
    "verl/seq_is": ([PRODUCT] * 5, ALL),
    "verl/token_icepop": ([R[0], 0.0, R[2], 0.0, R[4]], ALL),
    "verl/seq_is_rs": (NONE, [False] * 5),
    "verl/geo_rs": (NONE, [False] * 5),
    "verl/geo_rs_seq_tis": (NONE, [False] * 5),
    "verl/geo_rs_token_tis": (NONE, [False] * 5),
    "verl/k3_rs": (NONE, [False] * 5),
    "verl/k3_rs_seq_tis": (NONE, [False] * 5),
    "verl/k3_rs_token_tis": (NONE, [False] * 5),
    "verl/bypass_ppo_clip": (ONES, ALL),
    "verl/bypass_ppo_clip_geo_rs": (NONE, [False] * 5),
    "verl/bypass_ppo_clip_k3_rs": (NONE, [False] * 5),
    "verl/bypass_pg_is": ([PRODUCT] * 5, ALL),
    "verl/bypass_pg_token_icepop": ([R[0], 0.0, R[2], 0.0, R[4]], ALL),
    "verl/bypass_pg_geo_rs": (NONE, [False] * 5),
    "verl/bypass_pg_geo_rs_seq_tis": (NONE, [False] * 5),
    "verl/bypass_pg_geo_rs_token_tis": (NONE, [False] * 5),
    "nemo_rl/tis": (TRUNCATED, ALL),
    "nemo_rl/icepop": ([R[0], 0.0, R[2], 0.0, R[4]], ALL),
    "nemo_rl/seq-mask-tis": (NONE, [False] * 5),
    "trl/sequence_mask": ([PRODUCT] * 5, ALL),
    "trl/sequence_truncate": ([PRODUCT] * 5, ALL),
    "trl/token_mask": (R, ALL),
    "trl/token_truncate": (R, ALL),
    "slime/mis": (NONE, [False] * 5),
    "slime/clip": ([w / ((R[0] + 0.5 + 2.0 + 0.5 + R[4]) / 5) for w in (R[0], 0.5, 2.0, 0.5, R[4])], ALL),
    "slime/mask": ([R[0] / (sum(R) / 5), 0.0, 0.0, 0.0, R[4] / (sum(R) / 5)], [True, False, False, False, True]),
    "prime_rl/default": (ONES, ALL),
    "skyrl/geometric_mask": (NONE, [False] * 5),
    "skyrl/product_mask": (NONE, [False] * 5),
    "skyrl/token_tis": (TRUNCATED, ALL),
    "skyrl/sequence_tis": ([PRODUCT] * 5, ALL),
    "skyrl/token_mask": ([1.0, 0.0, 0.0, 0.0, 1.0], [True, False, False, False, True]),
    "skyrl/outlier_mask": (NONE, [False] * 5),
    "skyrl/recommended": (NONE, [False] * 5),
}


def apply(name, values):
    d = torch.tensor([values], dtype=torch.float64)
    result = correct(preset(name).rule, d, torch.zeros_like(d), torch.ones_like(d, dtype=torch.bool))
    return result.weights[0].tolist(), result.mask[0].tolist()


@pytest.mark.parametrize("name", PRESETS)
def test_golden_row(name):
    weights, mask = GOLDEN[name]
    assert apply(name, GOLDEN_D) == (pytest.approx(weights, rel=1e-12), mask)


def test_slime_without_a_catastrophic_token():
    weights, mask = apply("slime/mis", [0.1, -1.5, 0.8, -9.0, 0.3])
    mean = (R[0] + R[1] + 2.0 + math.exp(-9.0) + R[4]) / 5
    assert weights == pytest.approx([R[0] / mean, 0.0, 0.0, 0.0, R[4] / mean], rel=1e-12)
    assert mask == [True, False, False, False, True]


def test_trl_zeroes_long_products_but_keeps_their_tokens():
    assert apply("trl/sequence_mask", [0.5, 0.5, 0.5]) == ([0.0, 0.0, 0.0], [True, True, True])
    assert apply("trl/sequence_truncate", [0.5, 0.5, 0.5]) == ([3.0, 3.0, 3.0], [True, True, True])
    assert apply("trl/token_mask", [0.5, 1.2, 0.5])[0] == pytest.approx([math.exp(0.5), 0.0, math.exp(0.5)])


def test_every_known_deviation_is_listed():
    for name, entry in PRESETS.items():
        assert entry.source
        assert ("geo_rs" in name) == any("1/rho" in line for line in entry.deviations)
        rejects_in_bypass = name.startswith("verl/bypass") and bool(entry.rule.filters)
        assert rejects_in_bypass == any("issue 4852" in line for line in entry.deviations)
        # In bypass mode the rule sees parts of a batch.
        assert entry.mode == "decoupled" or (entry.rule.normalise, entry.rule.denominator) == ("none", "all")


def test_bypass_clip_carries_no_weight():
    for entry in PRESETS.values():
        if entry.mode == "bypass" and entry.loss == "clipped":
            assert entry.rule.weighting.level == "none"


def test_unknown_presets_are_refused_with_the_names():
    with pytest.raises(UserError, match=r"^correction\.preset: no preset 'verl/geo_sr'; did you mean verl/geo_rs\?"):
        preset("verl/geo_sr")
    with pytest.raises(UserError, match="known here: none, verl/token_is, "):
        preset("x")
