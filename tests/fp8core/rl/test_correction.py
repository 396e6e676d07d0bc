import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8core.errors import UserError
from fp8core.rl.advantages import mean_advantages
from fp8core.rl.aggregation import Denominator
from fp8core.rl.correction import NORMALISATIONS, CorrectionRule, correct, token_tis
from fp8core.rl.importance import Weighting
from fp8core.rl.losses import ClipRange, LossInputs, clipped_surrogate, reinforce
from fp8core.rl.rejection import Filter, Veto

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


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.floats(1, 10))
def test_token_tis_equals_an_independent_loop(seed, cap):
    training, rollout, mask = batch(seed, spread=2.0, dtype=torch.float32)
    weights = token_tis(training, rollout, mask, cap)
    assert weights.dtype == torch.float32
    for p, g, m, w in zip(*(x.flatten().tolist() for x in (training, rollout, mask, weights)), strict=True):
        assert w == pytest.approx(min(math.exp(p - g), cap) if m else 0.0, rel=1e-6)


def test_token_tis_is_the_rule_of_the_same_name_and_detached():
    training, rollout, mask = batch(1, spread=2.0)
    weights = token_tis(training.requires_grad_(), rollout, mask, 2.0)
    assert weights.equal(correct(RULES["tis"], training, rollout, mask).weights)
    assert not weights.requires_grad


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


def test_vanishing_weights_are_left_as_they_are():
    rollout, mask = torch.zeros(1, 2, dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    result = correct(RULES["tis normalised"], rollout - 19.0, rollout, mask)
    assert result.metrics["batch_norm_factor"] == 1.0
    assert result.weights.tolist()[0] == pytest.approx([math.exp(-19)] * 2)


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


def test_one_denominator_rule_for_decoupled_and_bypass():
    """On the first update current equals old; both modes must then give one loss, normalised by what was kept."""
    old, rollout, mask = batch(5, spread=0.1)
    rule = CorrectionRule(weighting=TIS, filters=(Filter(name="seq_mean_k1", low=0.97, high=1.03),))
    correction = correct(rule, old, rollout, mask)
    assert 0 < correction.denominator.tokens < int(mask.sum())
    advantages = torch.linspace(-1, 1, len(mask), dtype=torch.float64)
    shared = {"advantages": advantages, "mask": correction.mask, "denominator": correction.denominator}
    clip = ClipRange(low=0.5, high=1.0)
    decoupled = clipped_surrogate(LossInputs(current=old, old=old, weights=correction.weights, **shared), clip)
    bypass = clipped_surrogate(LossInputs(current=old, old=rollout, **shared), clip)
    terms = (-advantages[:, None] * (old - rollout).exp())[correction.mask]
    assert decoupled.loss.item() == pytest.approx(terms.mean().item(), rel=1e-12)
    assert bypass.loss.item() == pytest.approx(terms.mean().item(), rel=1e-12)


def test_rejection_divides_by_what_is_left_and_zeroing_by_everything():
    """Twice the tokens, half of them catastrophic: rejection gives the loss of the good half, zeroing half of it."""
    rollout = torch.full((2, 4), -1.0, dtype=torch.float64)
    old = rollout + torch.tensor([[0.0], [5.0]], dtype=torch.float64)
    mask = torch.ones(2, 4, dtype=torch.bool)
    losses = {}
    for action in ("mask", "band"):
        rule = CorrectionRule(weighting=Weighting(level="token", action=action, low=0.5, high=2.0))
        correction = correct(rule, old, rollout, mask)
        losses[action] = clipped_surrogate(
            LossInputs(
                current=old,
                old=old,
                advantages=torch.ones(2, dtype=torch.float64),
                mask=correction.mask,
                denominator=correction.denominator,
                weights=correction.weights,
            ),
            ClipRange(low=0.2, high=0.2),
        ).loss.item()
    assert losses == {"mask": -1.0, "band": -0.5}


def test_bypass_reinforce_has_the_importance_weighted_policy_gradient():
    current, rollout, mask = batch(6)
    current.requires_grad_()
    correction = correct(RULES["tis"], current, rollout, mask)
    advantages = torch.linspace(-1, 1, len(mask), dtype=torch.float64)
    reinforce(
        LossInputs(
            current=current,
            old=rollout,
            advantages=advantages,
            mask=correction.mask,
            denominator=correction.denominator,
            weights=correction.weights,
        )
    ).loss.backward()
    expected = -torch.where(mask, (current - rollout).exp().clamp(max=2.0), 0.0) * advantages[:, None] / mask.sum()
    torch.testing.assert_close(current.grad, expected.detach())


def test_rejected_rows_can_leave_the_group_baseline():
    rollout = torch.zeros(3, 2, dtype=torch.float64)
    training = torch.tensor([[5.0, 5.0], [0.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    rule = CorrectionRule(filters=(Filter(name="seq_mean_k1", low=0.999, high=1.001),))
    keep = correct(rule, training, rollout, torch.ones(3, 2, dtype=torch.bool)).keep
    rewards, groups = torch.tensor([100.0, 1.0, 0.0]), torch.zeros(3)
    assert keep.tolist() == [False, True, True]
    assert mean_advantages(rewards, groups, keep=keep).tolist() == [0.0, 0.5, -0.5]


def test_inputs_stay_untouched_and_dtype_follows_training():
    training, rollout, mask = batch(7, dtype=torch.float32)
    copies = training.clone(), rollout.clone(), mask.clone()
    for rule in RULES.values():
        assert correct(rule, training, rollout, mask).weights.dtype == torch.float32
    assert all(a.equal(b) for a, b in zip((training, rollout, mask), copies, strict=True))


def test_unknown_normalisation_is_refused():
    assert set(NORMALISATIONS) == {"none", "token", "sequence"}
    with pytest.raises(UserError, match="'batch' is not one of none, token, sequence"):
        CorrectionRule(normalise="batch")
