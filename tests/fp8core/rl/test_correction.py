import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fp8core.config.training import CorrectionConfig, FilterConfig, FilterName, WeightingConfig
from fp8core.errors import UserError
from fp8core.rl.correction import correct, correction_rule, passes

GOLDEN_D = [0.1, -1.5, 0.8, -10.0, 0.3]
ROWS = st.lists(st.lists(st.tuples(st.floats(-25, 25), st.booleans()), min_size=3, max_size=3), min_size=1, max_size=5)


def tensors(rows):
    d = torch.tensor([[x for x, _ in row] for row in rows], dtype=torch.float64)
    return d, torch.tensor([[m for _, m in row] for row in rows])


def everywhere(rows):
    d = torch.tensor(rows, dtype=torch.float64)
    return d, torch.ones_like(d, dtype=torch.bool)


def rule_of(level="none", action="keep", filters=(), low=0.0, high=2.0, **others):
    weighting = WeightingConfig(level=level, action=action, low=low, high=high)
    return CorrectionConfig(method="custom", weighting=weighting, filters=list(filters), **others)


def correct_d(rule, d, mask):
    """`correct` for log-ratios d."""
    return correct(rule, d, torch.zeros_like(d), mask)


def slow_raw(level, row):
    """Independent: one row of (d, unmasked) pairs."""
    total = [d for d, m in row if m]

    def bounded(x):
        return math.exp(max(-20.0, min(20.0, x)))

    value = {"none": lambda d: 1.0, "token": bounded, "sequence": lambda d: bounded(math.fsum(total))}[level]
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


@pytest.mark.parametrize("level", ["none", "token", "sequence"])
@pytest.mark.parametrize("action", ["keep", "truncate", "clip", "band", "mask"])
@settings(max_examples=25)
@given(rows=ROWS)
def test_every_level_and_action_equals_an_independent_loop(level, action, rows):
    found = correct_d(rule_of(level, action, low=0.5, high=2.0), *tensors(rows))
    for i, row in enumerate(rows):
        expected = [slow_action(action, w, m, 0.5, 2.0) for w, (_, m) in zip(slow_raw(level, row), row, strict=True)]
        assert found.weights[i].tolist() == pytest.approx([w for w, _ in expected], rel=1e-12, abs=1e-300)
        assert found.accepted_mask[i].tolist() == [m for _, m in expected]


def build(name, low=0.5, high=2.0):
    return FilterConfig(name=name, low=low if name.endswith("_k1") else 0.0, high=high)


def slow_passes(name, row, low, high):
    """Independent: one row of (d, unmasked) pairs, the band on the ratio itself."""
    level, kind = name.rsplit("_", 1)
    dc = [max(-20.0, min(20.0, d)) for d, _ in row]
    unmasked = [x for x, (_, m) in zip(dc, row, strict=True) if m]

    def divergence(x):
        return {"k1": x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[kind]

    def within(x):
        return low <= math.exp(x) <= high if kind == "k1" else x <= high

    if level == "token":
        return [m and within(divergence(x)) for x, (_, m) in zip(dc, row, strict=True)]
    if not unmasked:
        return [False] * len(row)
    values = [divergence(x) for x in unmasked]
    total = {"seq_sum": math.fsum(values), "seq_mean": math.fsum(values) / len(values)}[level]
    return [m and within(total) for _, m in row]


@pytest.mark.parametrize("name", get_args(FilterName))
@settings(max_examples=40)
@given(rows=ROWS)
def test_every_filter_equals_an_independent_loop(name, rows):
    kept = passes(build(name), *tensors(rows)).tolist()
    assert kept == [slow_passes(name, row, 0.5, 2.0) for row in rows]


def test_veto_looks_at_every_unmasked_token_unclamped():
    d, mask = everywhere([GOLDEN_D, [-9.2, 0.0, 5.0, 50.0, 0.0], [-30.0, 0.0, 0.0, 0.0, 0.0]])
    assert correct_d(rule_of(veto=1e-4), d, mask).row_mask.tolist() == [False, True, False]
    assert correct_d(rule_of(veto=1e-12), d, mask).row_mask.tolist() == [True, True, False]
    mask[0, 3] = False
    assert correct_d(rule_of(veto=1e-4), d, mask).row_mask[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WeightingConfig(action="clip", low=3.0), "low=3.0 is above high=2.0"),
        (lambda: FilterConfig(name="token_k1", low=2.0, high=0.5), "low=2.0, high=0.5"),
        (lambda: FilterConfig(name="token_k1", high=2.0), "set low above 0"),
        (lambda: FilterConfig(name="token_k2", low=0.5, high=2.0), "an upper bound alone"),
        (
            lambda: correction_rule(CorrectionConfig(method="preset", preset="verl/geo_sr")),
            "no preset 'verl/geo_sr'; did you mean verl/geo_rs?",
        ),
    ],
)
def test_mistakes_are_refused(make, message):
    with pytest.raises((UserError, ValidationError), match=message.replace("?", "[?]")):
        make()


RULES = {
    "measure": rule_of(),
    "tis": rule_of("token", "truncate"),
    "tis normalised": rule_of("token", "truncate", normalise="token"),
    "everything": rule_of(
        *("token", "mask", [FilterConfig(name="seq_mean_k3", high=0.5), FilterConfig(name="token_k2", high=0.3)]),
        low=0.5,
        veto=0.3,
        normalise="token",
    ),
}


def batch(seed, rows=6, tokens=5, spread=0.4, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(rows, tokens, generator=g, dtype=dtype)
    training = rollout + spread * torch.randn(rows, tokens, generator=g, dtype=dtype)
    return training, rollout, torch.rand(rows, tokens, generator=g) < 0.8


@pytest.mark.parametrize("name", RULES)
def test_agreement_corrects_nothing(name):
    _, rollout, mask = batch(2)
    result = correct(RULES[name], rollout, rollout, mask)
    assert result.weights.tolist() == mask.double().tolist()
    assert result.accepted_mask.equal(mask)
    assert {name: value for name, value in result.metrics.items() if value} == {"batch_norm_factor": 1.0}


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), junk=st.sampled_from([math.nan, math.inf]), random=st.randoms())
def test_masked_junk_padding_and_row_order_change_nothing(name, seed, junk, random):
    training, rollout, mask = batch(seed)
    mask[0] = False
    plain = correct(RULES[name], training, rollout, mask)
    assert plain.weights.isfinite().all()
    order = list(range(len(mask)))
    random.shuffle(order)
    pad = torch.full((len(mask), 2), junk, dtype=torch.float64)
    moved = correct(
        RULES[name],
        torch.cat([pad, training.where(mask, junk)[order]], 1),
        torch.cat([-pad, rollout.where(mask, junk)[order]], 1),
        torch.cat([torch.zeros_like(pad, dtype=torch.bool), mask[order]], 1),
    )
    torch.testing.assert_close(moved.weights[:, 2:], plain.weights[order], rtol=1e-12, atol=0)
    assert moved.accepted_mask[:, 2:].equal(plain.accepted_mask[order])
    assert moved.metrics == pytest.approx(plain.metrics, rel=1e-12)


@pytest.mark.parametrize("name", ["tis normalised", "everything"])
@settings(max_examples=30)
@given(seed=st.integers(0, 10_000))
def test_normalised_token_weights_average_one_over_what_was_kept(name, seed):
    training, rollout, mask = batch(seed)
    rule = RULES[name]
    result = correct(rule, training, rollout, mask)
    bare = correct(rule.model_copy(update={"normalise": "none"}), training, rollout, mask)
    torch.testing.assert_close(result.weights * result.metrics["batch_norm_factor"], bare.weights, rtol=1e-12, atol=0)
    assert result.accepted_mask.equal(bare.accepted_mask)
    if result.accepted_mask.any():
        assert result.weights[result.accepted_mask].mean().item() == pytest.approx(1.0)


def test_metrics_count_what_happened():
    d = torch.tensor(
        [[0.0, math.log(3.0), 0.0, 0.0], [-10.0, 0.0, 0.0, 9.0], [0.0, 0.0, 9.0, 9.0]], dtype=torch.float64
    )
    mask = torch.tensor([[True] * 4, [True, True, True, False], [True, True, False, False]])
    result = correct_d(rule_of("token", "mask", low=0.5, veto=1e-4), d, mask)
    assert result.accepted_mask.sum(dim=1).tolist() == [3, 0, 2]
    assert result.metrics == pytest.approx(
        {
            "masked_fraction": 4 / 9,
            "seq_masked_fraction": 2 / 3,
            "oob_ratio": 2 / 9,
            "batch_norm_factor": 1.0,
            "veto_fraction": 1 / 3,
            "catastrophic_token_fraction": 1 / 9,
        }
    )
