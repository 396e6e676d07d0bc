import math

import pytest
import torch

from fp8core.errors import UserError
from fp8core.rl.correction import correct
from fp8core.rl.presets import preset

GOLDEN_D = [0.1, -1.5, 0.8, -10.0, 0.3]
R = [math.exp(d) for d in GOLDEN_D]


def apply(name, values):
    d = torch.tensor([values], dtype=torch.float64)
    result = correct(preset(name).rule, d, torch.zeros_like(d), torch.ones_like(d, dtype=torch.bool))
    return result.weights[0].tolist(), result.mask[0].tolist()


def test_slime_without_a_catastrophic_token():
    weights, mask = apply("slime/mis", [0.1, -1.5, 0.8, -9.0, 0.3])
    mean = (R[0] + R[1] + 2.0 + math.exp(-9.0) + R[4]) / 5
    assert weights == pytest.approx([R[0] / mean, 0.0, 0.0, 0.0, R[4] / mean], rel=1e-12)
    assert mask == [True, False, False, False, True]


def test_trl_zeroes_long_products_but_keeps_their_tokens():
    assert apply("trl/sequence_mask", [0.5, 0.5, 0.5]) == ([0.0, 0.0, 0.0], [True, True, True])
    assert apply("trl/sequence_truncate", [0.5, 0.5, 0.5]) == ([3.0, 3.0, 3.0], [True, True, True])
    assert apply("trl/token_mask", [0.5, 1.2, 0.5])[0] == pytest.approx([math.exp(0.5), 0.0, math.exp(0.5)])


def test_unknown_presets_are_refused_with_the_names():
    with pytest.raises(UserError, match=r"^correction\.preset: no preset 'verl/geo_sr'; did you mean verl/geo_rs\?"):
        preset("verl/geo_sr")
    with pytest.raises(UserError, match="known here: none, verl/token_is, "):
        preset("x")
