import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8core.errors import UserError
from fp8core.rl.correction import (
    ACTIONS,
    FILTERS,
    LEVELS,
    CorrectionRule,
    Filter,
    Veto,
    Weighting,
    correct,
    log_ratio,
)
from fp8core.rl.losses import Denominator

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
        "mask": w,
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
    assert (masked, [i for i, k in enumerate(kept) if k]) == (raw, [0, 4])


def test_golden_vector_row_levels():
    sequence, _ = weigh(Weighting(level="sequence", action="keep"), GOLDEN_D)
    geometric, _ = weigh(Weighting(level="geometric", action="keep"), GOLDEN_D)
    assert sequence == pytest.approx([3.36e-5] * 5, rel=2e-3)
    assert geometric == pytest.approx([0.1275] * 5, rel=1e-3)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("action", ACTIONS)
def test_agreement_weighs_exactly_one(level, action):
    weighting = Weighting(level=level, action=action, low=0.5, high=2.0)
    assert weigh(weighting, [0.0, 0.0, 0.0], [True, False, True]) == ([1.0, 0.0, 1.0], [True, False, True])


@pytest.mark.parametrize(
    ("action", "weights", "kept"), [("mask", None, [0, 1, 1, 1, 0]), ("band", [0, 1, 1, 1, 0], None)]
)
def test_bounds_lie_within_the_band(action, weights, kept):
    """A weight of 1 is agreement, also where 1 is a bound."""
    w, mask = torch.tensor([[0.4999, 0.5, 1.0, 2.0, 2.0001]]), torch.ones(1, 5, dtype=torch.bool)
    found, left = ACTIONS[action](w, mask, 0.5, 2.0)
    assert torch.equal(found, w if weights is None else w * torch.tensor(weights))
    assert torch.equal(left, mask if kept is None else torch.tensor([kept], dtype=torch.bool))
    found, left = ACTIONS[action](w, mask, 1.0, 1.0)
    assert (found[0, 2], left[0, 2]) == (1.0, True)


def test_log_ratio_hides_masked_junk_and_carries_no_gradient():
    training = torch.tensor([[1.0, math.nan, -1.0]], requires_grad=True)
    d = log_ratio(training, torch.tensor([[0.5, math.inf, -1.0]]), torch.tensor([[True, False, True]]))
    assert d.tolist() == [[0.5, 0.0, 0.0]]
    assert d.dtype == torch.float64
    assert not d.requires_grad


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"level": "word", "action": "keep"}, "correction.weighting.level: no level 'word'; known here: none, token"),
        ({"level": "token", "action": "drop"}, "correction.weighting.action: no action 'drop'; known here: keep"),
        ({"level": "token", "action": "clip", "low": 3.0, "high": 2.0}, "low=3.0, high=2.0"),
        ({"level": "token", "action": "truncate", "high": math.nan}, "high=nan"),
    ],
)
def test_bad_weightings_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        Weighting(**fields)


def build(name, low=0.5, high=2.0):
    return Filter(name=name, low=low, high=high) if name.endswith("_k1") else Filter(name=name, high=high)


def passing(test, values, mask=None):
    d = torch.tensor([values], dtype=torch.float64)
    mask = torch.ones_like(d, dtype=torch.bool) if mask is None else torch.tensor([mask])
    return test.passes(d, mask)[0].tolist()


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
    total = {"seq_sum": math.fsum(values), "seq_mean": math.fsum(values) / len(values), "seq_max": max(values)}[level]
    return [m and within(total) for _, m in row]


@pytest.mark.parametrize("name", FILTERS)
@settings(max_examples=40)
@given(rows=ROWS)
def test_every_filter_equals_an_independent_loop(name, rows):
    d = torch.tensor([[x for x, _ in row] for row in rows], dtype=torch.float64)
    mask = torch.tensor([[m for _, m in row] for row in rows])
    kept = build(name).passes(d, mask).tolist()
    assert kept == [slow_passes(name, row, 0.5, 2.0) for row in rows]


@pytest.mark.parametrize("name", FILTERS)
def test_agreement_passes_and_empty_rows_stay_empty(name):
    test = build(name, low=0.999, high=1.001)
    assert passing(test, [0.0, 0.0], [True, False]) == [True, False]
    assert passing(test, [math.inf, -5.0], [False, False]) == [False, False]


def test_the_band_is_on_rho_and_not_on_its_inverse():
    """Band 0.6_1.4: rho = 1.5 is out and rho = 0.7 is in; on 1/rho, as verl's code has it, the reverse."""
    for name in ("token_k1", "seq_sum_k1", "seq_mean_k1"):
        band = Filter(name=name, low=0.6, high=1.4)
        assert passing(band, [math.log(1.5)]) == [False]
        assert passing(band, [math.log(0.7)]) == [True]
    inverse = -math.log(1.5)
    assert math.log(0.6) <= inverse <= math.log(1.4), "the vector tells the two readings apart"


def test_veto_looks_at_every_unmasked_token_unclamped():
    veto = Veto(low=1e-4)
    d = torch.tensor([GOLDEN_D, [-9.2, 0.0, 5.0, 50.0, 0.0]], dtype=torch.float64)
    mask = torch.ones_like(d, dtype=torch.bool)
    assert veto.catastrophic(d, mask).any(dim=1).tolist() == [True, False]
    mask[0, 3] = False
    assert not veto.catastrophic(d, mask).any()
    assert Veto(low=1e-12).catastrophic(torch.tensor([[-30.0]]), torch.tensor([[True]])).item()
    assert Veto(low=1e-4, high=100.0).catastrophic(d, mask).any(dim=1).tolist() == [False, True]


@settings(max_examples=60)
@given(st.lists(st.floats(-19, 19), min_size=1, max_size=6))
def test_two_sided_veto_is_seq_max_k2(values):
    tau = 1e-4
    bound = math.log(tau) ** 2 / 2
    assert bound == pytest.approx(42.4, abs=0.02)
    if any(abs(abs(x) - math.log(1 / tau)) < 1e-9 for x in values):
        return
    d = torch.tensor([values], dtype=torch.float64)
    mask = torch.ones_like(d, dtype=torch.bool)
    vetoed = bool(Veto(low=tau, high=1 / tau).catastrophic(d, mask).any())
    assert vetoed == (not all(passing(Filter(name="seq_max_k2", high=bound), values)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"name": "seq_max_k1", "low": 0.5, "high": 2},
            "correction.filters: no filter 'seq_max_k1'; did you mean seq_max_k",
        ),
        ({"name": "token_k1", "low": 2.0, "high": 0.5}, "low=2.0, high=0.5"),
        ({"name": "token_k1", "high": 2.0}, "needs a band"),
        ({"name": "token_k2", "high": -1.0}, "high=-1.0"),
        ({"name": "token_k2", "low": 0.5, "high": 2.0}, "takes one upper bound"),
        ({"name": "token_k3", "high": math.nan}, "high=nan"),
    ],
)
def test_bad_filters_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        Filter(**arguments)


TIS = Weighting(level="token", action="truncate", high=2.0)
SEQUENCE_TIS = Weighting(level="sequence", action="truncate", high=2.0)
RULES = {
    "measure": CorrectionRule(),
    "tis": CorrectionRule(weighting=TIS),
    "tis normalised": CorrectionRule(weighting=TIS, normalise="token"),
    "sequence normalised": CorrectionRule(
        weighting=SEQUENCE_TIS, filters=(Filter(name="seq_sum_k1", low=0.5, high=2.0),), normalise="sequence"
    ),
    "everything": CorrectionRule(
        weighting=Weighting(level="token", action="mask", low=0.5, high=2.0),
        filters=(Filter(name="seq_mean_k3", high=0.5), Filter(name="token_k2", high=0.3)),
        veto=Veto(low=0.3),
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
    assert result.mask.equal(mask)
    assert result.metrics == {
        "masked_fraction": 0.0,
        "seq_masked_fraction": 0.0,
        "oob_ratio": 0.0,
        "batch_norm_factor": 1.0,
        "veto_fraction": 0.0,
        "catastrophic_token_fraction": 0.0,
    }


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
    assert moved.mask[:, 2:].equal(plain.mask[order])
    assert moved.metrics == pytest.approx(plain.metrics, rel=1e-12)


@pytest.mark.parametrize("name", ["tis normalised", "everything"])
@settings(max_examples=30)
@given(seed=st.integers(0, 10_000))
def test_normalised_token_weights_average_one_over_what_was_kept(name, seed):
    training, rollout, mask = batch(seed)
    rule = RULES[name]
    result = correct(rule, training, rollout, mask)
    bare = correct(
        CorrectionRule(weighting=rule.weighting, filters=rule.filters, veto=rule.veto), training, rollout, mask
    )
    torch.testing.assert_close(result.weights * result.metrics["batch_norm_factor"], bare.weights, rtol=1e-12, atol=0)
    assert result.mask.equal(bare.mask)
    if result.mask.any():
        assert result.weights[result.mask].mean().item() == pytest.approx(1.0)


def test_normalised_sequence_weights_average_one_over_kept_rows():
    training, rollout, mask = batch(3)
    result = correct(RULES["sequence normalised"], training, rollout, mask)
    kept = result.keep
    assert 0 < int(kept.sum()) < len(mask)
    assert result.weights.amax(dim=1)[kept].mean().item() == pytest.approx(1.0)


def test_tests_are_joined_by_and():
    training, rollout, mask = batch(4)
    narrow, flat = Filter(name="seq_mean_k1", low=0.9, high=1.1), Filter(name="token_k3", high=0.05)
    apart = [correct(CorrectionRule(filters=(test,)), training, rollout, mask).mask for test in (narrow, flat)]
    both = correct(CorrectionRule(filters=(narrow, flat)), training, rollout, mask)
    assert both.mask.equal(apart[0] & apart[1])
    assert both.weights.equal(both.mask.double())


def test_metrics_count_what_happened():
    d = torch.tensor(
        [[0.0, math.log(3.0), 0.0, 0.0], [-10.0, 0.0, 0.0, 9.0], [0.0, 0.0, 9.0, 9.0]], dtype=torch.float64
    )
    mask = torch.tensor([[True] * 4, [True, True, True, False], [True, True, False, False]])
    rule = CorrectionRule(weighting=Weighting(level="token", action="mask", low=0.5, high=2.0), veto=Veto(low=1e-4))
    result = correct(rule, d, torch.zeros_like(d), mask)
    assert result.mask.sum(dim=1).tolist() == [3, 0, 2]
    assert result.denominator == Denominator(tokens=5, sequences=2)
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


def test_the_denominator_counts_what_was_kept_or_everything():
    old, rollout, mask = batch(5, spread=0.1)
    filters = (Filter(name="seq_mean_k1", low=0.97, high=1.03),)
    kept, everything = (
        correct(CorrectionRule(weighting=TIS, filters=filters, denominator=denominator), old, rollout, mask)
        for denominator in ("kept", "all")
    )
    assert kept.weights.equal(everything.weights)
    assert kept.mask.equal(everything.mask)
    assert kept.counted.equal(kept.mask)
    assert everything.counted.equal(mask)
    assert 0 < kept.denominator.tokens < everything.denominator.tokens == int(mask.sum())


def test_a_rule_in_turn_looks_at_what_is_left():
    """One bad token of three: with it the row's mean is outside; in turn it is gone when the mean is taken."""
    d, mask = torch.tensor([[0.0, 3.0, 0.01]], dtype=torch.float64), torch.ones(1, 3, dtype=torch.bool)
    filters = (Filter(name="token_k1", low=0.5, high=2.0), Filter(name="seq_mean_k1", low=0.9, high=1.1))
    for order, expected in (("joint", [False] * 3), ("in_turn", [True, False, True])):
        rule = CorrectionRule(
            weighting=Weighting(level="sequence", action="truncate", high=5.0), filters=filters, order=order
        )
        result = correct(rule, d, torch.zeros_like(d), mask)
        assert result.mask.tolist() == [expected]
        if order == "in_turn":
            assert result.weights.tolist() == [pytest.approx([math.exp(0.01), 0.0, math.exp(0.01)])]


def test_weights_can_average_one_before_rejection():
    training, rollout, mask = batch(8)
    veto = Veto(low=0.8)
    for over, order in itertools.product(("kept", "all"), ("joint", "in_turn")):
        rule = CorrectionRule(weighting=TIS, veto=veto, normalise="token", normalise_over=over, order=order)
        result = correct(rule, training, rollout, mask)
        truncated = torch.where(mask, (training - rollout).exp().clamp(max=2.0), 0.0)
        chosen = result.mask if over == "kept" else mask
        assert result.metrics["batch_norm_factor"] == pytest.approx(truncated[chosen].mean().item(), rel=1e-12)
    assert 0 < int(result.mask.sum()) < int(mask.sum())


def test_a_rejected_row_weighs_in_the_mean_what_it_would_weigh_if_it_were_kept():
    d, mask = torch.tensor([[0.0, 3.0], [0.1, 0.1]], dtype=torch.float64), torch.ones(2, 2, dtype=torch.bool)
    rule = CorrectionRule(
        weighting=Weighting(level="sequence", action="truncate", high=100.0),
        filters=(Filter(name="seq_mean_k1", low=0.9, high=1.3),),
        normalise="token",
        normalise_over="all",
        order="in_turn",
    )
    result = correct(rule, d, torch.zeros_like(d), mask)
    assert result.keep.tolist() == [False, True]
    assert result.metrics["batch_norm_factor"] == pytest.approx((math.exp(3.0) + math.exp(0.2)) / 2)


@pytest.mark.parametrize(
    ("weighting", "cap"),
    [
        (Weighting(level="token", action="truncate", high=10.0), 10.0),
        (Weighting(level="token", action="clip", low=0.5, high=1.5), 1.5),
        # Of a row, or no bound of weights at all.
        (Weighting(level="sequence", action="truncate", high=10.0), 2.0),
        (Weighting(level="token", action="band", low=0.5, high=5.0), 2.0),
        (Weighting(level="token", action="truncate", high=0.5), 2.0),
        (Weighting(level="none", action="keep"), 2.0),
    ],
)
def test_metrics_of_truncated_weights_have_the_cap_of_the_rule(weighting, cap):
    assert CorrectionRule(weighting=weighting).cap == cap
