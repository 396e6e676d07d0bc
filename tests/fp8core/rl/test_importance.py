import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8core.errors import UserError
from fp8core.rl.importance import ACTIONS, LEVELS, Weighting, log_ratio

GOLDEN_D = [0.1, -1.5, 0.8, -10.0, 0.3]
GOLDEN_R = [1.1052, 0.2231, 2.2255, 4.54e-5, 1.3499]
ROWS = st.lists(st.lists(st.tuples(st.floats(-25, 25), st.booleans()), min_size=3, max_size=3), min_size=1, max_size=5)


def tensors(rows):
    d = torch.tensor([[x for x, _ in row] for row in rows], dtype=torch.float64)
    return d, torch.tensor([[m for _, m in row] for row in rows])


def weigh(weighting, values, mask=None):
    d = torch.tensor([values], dtype=torch.float64)
    mask = torch.ones_like(d, dtype=torch.bool) if mask is None else torch.tensor([mask])
    weights, kept = weighting.apply(weighting.raw(d, mask), mask)
    return weights[0].tolist(), kept[0].tolist()


def slow_raw(level, row):
    """Independent: one row of (d, unmasked) pairs."""
    total = [d for d, m in row if m]

    def bounded(x):
        return math.exp(max(-20.0, min(20.0, x)))

    value = {
        "none": lambda d: 1.0,
        "token": bounded,
        "sequence": lambda d: bounded(math.fsum(total)),
        "geometric": lambda d: bounded(math.fsum(total) / len(total)),
    }[level]
    return [value(d) if m else 0.0 for d, m in row]


def slow_action(action, w, m, low, high):
    inside = low <= w <= high
    weight = {
        "keep": w,
        "truncate": min(w, high),
        "clip": min(max(w, low), high),
        "band": w if inside else 0.0,
        "mask": w if inside else 0.0,
    }[action]
    return (weight if m else 0.0), m and (inside or action != "mask")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("action", ACTIONS)
@settings(max_examples=25)
@given(rows=ROWS)
def test_every_level_and_action_equals_an_independent_loop(level, action, rows):
    weighting = Weighting(level=level, action=action, low=0.5, high=2.0)
    d, mask = tensors(rows)
    weights, kept = weighting.apply(weighting.raw(d, mask), mask)
    for i, row in enumerate(rows):
        expected = [slow_action(action, w, m, 0.5, 2.0) for w, (_, m) in zip(slow_raw(level, row), row, strict=True)]
        assert weights[i].tolist() == pytest.approx([w for w, _ in expected], rel=1e-12, abs=1e-300)
        assert kept[i].tolist() == [m for _, m in expected]


def test_golden_vector_token_level():
    raw, _ = weigh(Weighting(level="token", action="keep"), GOLDEN_D)
    assert raw == pytest.approx(GOLDEN_R, rel=2e-4)
    truncated, kept = weigh(Weighting(level="token", action="truncate", high=2.0), GOLDEN_D)
    assert truncated == pytest.approx([1.1052, 0.2231, 2.0, 4.54e-5, 1.3499], rel=2e-4)
    assert all(kept)
    banded, kept = weigh(Weighting(level="token", action="band", low=0.5, high=2.0), GOLDEN_D)
    assert [i for i, w in enumerate(banded) if w] == [0, 4]
    assert all(kept), "IcePop leaves the zeroed tokens in the denominator"
    masked, kept = weigh(Weighting(level="token", action="mask", low=0.5, high=2.0), GOLDEN_D)
    assert (masked, [i for i, k in enumerate(kept) if k]) == (banded, [0, 4])


def test_golden_vector_row_levels():
    sequence, _ = weigh(Weighting(level="sequence", action="keep"), GOLDEN_D)
    geometric, _ = weigh(Weighting(level="geometric", action="keep"), GOLDEN_D)
    assert sequence == pytest.approx([3.36e-5] * 5, rel=2e-3)
    assert geometric == pytest.approx([0.1275] * 5, rel=1e-3)


def test_sequence_products_grow_with_length_and_geometric_means_do_not():
    d = [math.log(1.1)] * 100
    assert weigh(Weighting(level="sequence", action="keep"), d)[0][0] == pytest.approx(13_780, rel=1e-3)
    assert weigh(Weighting(level="geometric", action="keep"), d)[0][0] == pytest.approx(1.1)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("action", ACTIONS)
def test_agreement_weighs_exactly_one(level, action):
    weighting = Weighting(level=level, action=action, low=0.5, high=2.0)
    assert weigh(weighting, [0.0, 0.0, 0.0], [True, False, True]) == ([1.0, 0.0, 1.0], [True, False, True])


def test_log_ratio_hides_masked_junk_and_carries_no_gradient():
    training = torch.tensor([[1.0, math.nan, -1.0]], requires_grad=True)
    d = log_ratio(training, torch.tensor([[0.5, math.inf, -1.0]]), torch.tensor([[True, False, True]]))
    assert d.tolist() == [[0.5, 0.0, 0.0]]
    assert d.dtype == torch.float64
    assert not d.requires_grad


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"level": "word", "action": "keep"}, "level 'word' is not one of none, token"),
        ({"level": "token", "action": "drop"}, "action 'drop' is not one of keep"),
        ({"level": "token", "action": "clip", "low": 3.0, "high": 2.0}, "low=3.0, high=2.0"),
        ({"level": "token", "action": "truncate", "high": math.nan}, "high=nan"),
    ],
)
def test_bad_weightings_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        Weighting(**fields)
