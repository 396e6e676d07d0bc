"""The objective against Python floats in loops over tokens, which share no code with it."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8core.config.run import CorrectionConfig, FilterConfig, LossConfig, WeightingConfig
from fp8core.errors import UserError
from fp8core.rl.aggregation import AGGREGATIONS, Denominator, token_mean
from fp8core.rl.batch import RolloutBatch, TokenBatch
from fp8core.rl.correction import correct
from fp8core.rl.losses import ClipRange, LossInputs
from fp8core.rl.objective import POLICY_LOSSES, Objective
from fp8core.rl.presets import PRESETS

LOW, HIGH, CAP = 0.2, 0.28, 1.5
CASES = [("none", 0.0), ("none", 0.3), ("token_tis", 0.0), ("token_tis", 0.3)]


def objective(method, reference_kl):
    loss = LossConfig(clip_low=LOW, clip_high=HIGH, reference_kl=reference_kl)
    built = Objective(loss, CorrectionConfig(method=method, cap=CAP))
    return lambda current, batch, denominator: built(current, built.corrected(batch)[0], denominator)


def random_batch(seed, rows=5, columns=6, reference=True, spread=0.4):
    g = torch.Generator().manual_seed(seed)
    old = -2 * torch.rand(rows, columns, generator=g) - 0.1
    mask = torch.arange(columns) < torch.randint(1, columns + 1, (rows, 1), generator=g)
    nothing = TokenBatch(*(torch.zeros(rows, 1) for _ in range(3)))

    def near(values):
        return values + spread * torch.randn(rows, columns, generator=g)

    batch = RolloutBatch(
        sequences=nothing,
        mask=mask,
        rollout_logprobs=near(old),
        old_logprobs=old,
        reference_logprobs=near(old) if reference else None,
        advantages=torch.randn(rows, generator=g),
        keep=torch.rand(rows, generator=g) < 0.8,
    )
    return batch, near(old).requires_grad_()


def counts(batch):
    return Denominator.of(batch.mask & batch.keep[:, None])


@dataclass
class Sums:
    loss: float = 0.0
    clip_fraction: float = 0.0
    ratio_mean: float = 0.0
    weight_mean: float = 0.0
    reference_kl: float = 0.0


def slow(method, reference_kl, batch, current):
    """Statistics, and the derivative of the loss by the log-prob of each token."""
    sums, gradient = Sums(), torch.zeros(current.shape, dtype=torch.float64)
    places = [
        (i, j)
        for i, j in torch.cartesian_prod(*map(torch.arange, current.shape)).tolist()
        if batch.mask[i, j] and batch.keep[i]
    ]
    n = max(len(places), 1)
    for i, j in places:
        old, a = batch.old_logprobs[i, j].item(), batch.advantages[i].item()
        c = current[i, j].item()
        weight = min(math.exp(old - batch.rollout_logprobs[i, j].item()), CAP) if method == "token_tis" else 1.0
        ratio = math.exp(c - old)
        bounded = min(max(ratio, 1 - LOW), 1 + HIGH)
        clipped = -a * bounded > -a * ratio
        kl, slope = 0.0, 0.0
        if batch.reference_logprobs is not None:
            d = batch.reference_logprobs[i, j].item() - c
            kl, slope = math.exp(d) - 1 - d, 1 - math.exp(d)
        sums.loss += (weight * (-a * (bounded if clipped else ratio)) + reference_kl * kl) / n
        sums.clip_fraction += clipped / n
        sums.ratio_mean += ratio / n
        sums.weight_mean += weight / n
        sums.reference_kl += kl / n
        gradient[i, j] = ((0.0 if clipped else -weight * a * ratio) + reference_kl * slope) / n
    return sums, gradient


@pytest.mark.parametrize(("method", "reference_kl"), CASES)
@given(seed=st.integers(0, 2**31))
@settings(max_examples=15)
def test_terms_and_gradient(method, reference_kl, seed):
    batch, current = random_batch(seed)
    terms = objective(method, reference_kl)(current, batch, counts(batch))
    sums, gradient = slow(method, reference_kl, batch, current)
    assert terms.statistics() == pytest.approx(vars(sums), rel=1e-5, abs=1e-7)
    terms.loss.backward()
    assert torch.allclose(current.grad.double(), gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("method", "reference_kl"), CASES)
def test_shares_of_micro_batches_add_up(method, reference_kl):
    batch, current = random_batch(seed=1, rows=7)
    whole = objective(method, reference_kl)(current, batch, counts(batch)).statistics()
    parts = [slice(0, 3), slice(3, 4), slice(4, 7)]
    shares = [
        objective(method, reference_kl)(current[rows], batch.rows(rows), counts(batch)).statistics() for rows in parts
    ]
    assert {name: sum(share[name] for share in shares) for name in whole} == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize(("method", "reference_kl"), CASES)
def test_what_is_masked_or_dropped_may_hold_anything(method, reference_kl):
    batch, current = random_batch(seed=2)
    hidden = ~(batch.mask & batch.keep[:, None])
    assert hidden.any()
    assert not batch.keep.all()
    terms = objective(method, reference_kl)(current, batch, counts(batch))
    (gradient,) = torch.autograd.grad(terms.loss, current)
    for garbage in (math.nan, math.inf, -math.inf, 1e30):
        spoilt = replace(
            batch,
            rollout_logprobs=batch.rollout_logprobs.masked_fill(hidden, garbage),
            old_logprobs=batch.old_logprobs.masked_fill(hidden, garbage),
            reference_logprobs=batch.reference_logprobs.masked_fill(hidden, garbage),
            advantages=batch.advantages.masked_fill(~batch.keep, garbage),
        )
        moved = current.detach().masked_fill(hidden, garbage).requires_grad_()
        again = objective(method, reference_kl)(moved, spoilt, counts(spoilt))
        (gradient_again,) = torch.autograd.grad(again.loss, moved)
        assert again.statistics() == terms.statistics()
        assert torch.equal(gradient_again, gradient)
        assert not gradient_again[hidden].any()


def test_nothing_kept_is_a_loss_of_zero():
    batch, current = random_batch(seed=3)
    batch = replace(batch, keep=torch.zeros_like(batch.keep))
    terms = objective("token_tis", 0.3)(current, batch, counts(batch))
    assert set(terms.statistics().values()) == {0.0}
    terms.loss.backward()
    assert not current.grad.any()


def test_equal_policies_have_weight_and_ratio_one():
    batch, _ = random_batch(seed=4)
    batch = replace(batch, rollout_logprobs=batch.old_logprobs, reference_logprobs=batch.old_logprobs)
    found = objective("token_tis", 0.3)(batch.old_logprobs, batch, counts(batch)).statistics()
    assert (found["weight_mean"], found["ratio_mean"], found["clip_fraction"], found["reference_kl"]) == (1, 1, 0, 0)


def test_the_correction_is_capped_and_only_scales():
    batch, current = random_batch(seed=5, spread=0.0)
    for shift, weight in ((0.3, math.exp(0.3)), (3.0, CAP), (-3.0, math.exp(-3))):
        shifted = replace(batch, rollout_logprobs=batch.old_logprobs - shift)
        corrected = objective("token_tis", 0.0)(current, shifted, counts(batch)).statistics()
        plain = objective("none", 0.0)(current, shifted, counts(batch)).statistics()
        assert corrected["weight_mean"] == pytest.approx(weight, rel=1e-5)
        assert corrected["loss"] == pytest.approx(weight * plain["loss"], rel=1e-5)
        assert plain["weight_mean"] == 1.0


def test_the_penalty_needs_a_reference():
    batch, current = random_batch(seed=6, reference=False)
    assert objective("none", 0.0)(current, batch, counts(batch)).statistics()["reference_kl"] == 0.0
    with pytest.raises(AssertionError, match="needs the reference step"):
        objective("none", 0.3)(current, batch, counts(batch))


def test_without_weight_the_penalty_is_reported_and_not_learnt():
    batch, current = random_batch(seed=7)
    terms = objective("none", 0.0)(current, batch, counts(batch))
    assert terms.statistics()["reference_kl"] > 0
    (with_reference,) = torch.autograd.grad(terms.loss, current)
    without = objective("none", 0.0)(current, replace(batch, reference_logprobs=None), counts(batch))
    assert torch.equal(with_reference, torch.autograd.grad(without.loss, current)[0])


PRESET_LOSSES = {"clipped_surrogate": "clipped", "reinforce": "reinforce", "binary_tv": "binary_tv"}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_gives_its_rule_mode_and_loss(name):
    batch, current = random_batch(seed=8, reference=False)
    chosen = PRESETS[name]
    built = Objective(LossConfig(clip_low=LOW, clip_high=HIGH), CorrectionConfig(method="preset", preset=name))
    corrected, metrics = built.corrected(batch)
    kept = batch.mask & batch.keep[:, None]
    verdict = correct(chosen.rule, batch.old_logprobs, batch.rollout_logprobs, kept)
    assert torch.equal(corrected.mask, verdict.mask)
    assert metrics == verdict.metrics
    bypass, weighted = chosen.mode == "bypass", chosen.mode == "decoupled" or chosen.loss == "reinforce"
    inputs = LossInputs(
        current=current,
        old=batch.rollout_logprobs if bypass else batch.old_logprobs,
        advantages=batch.advantages,
        mask=verdict.mask,
        denominator=verdict.denominator,
        weights=verdict.weights if weighted else None,
    )
    expected = POLICY_LOSSES[PRESET_LOSSES[chosen.loss]](inputs, ClipRange(low=LOW, high=HIGH), token_mean)
    assert float(built(current, corrected, verdict.denominator).loss.detach()) == float(expected.loss.detach())


@pytest.mark.parametrize("policy", POLICY_LOSSES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_every_policy_loss_and_aggregation_is_the_library_s(policy, aggregation):
    batch, current = random_batch(seed=9, reference=False)
    loss = LossConfig(policy=policy, aggregation=aggregation, clip_low=LOW, clip_high=HIGH, dual_clip=3.0)
    built = Objective(loss, CorrectionConfig(method="none"))
    corrected, _ = built.corrected(batch)
    inputs = LossInputs(
        current=current,
        old=batch.old_logprobs,
        advantages=batch.advantages,
        mask=corrected.mask,
        denominator=counts(batch),
    )
    clip = ClipRange(low=LOW, high=HIGH, dual=3.0)
    expected = POLICY_LOSSES[policy](inputs, clip, AGGREGATIONS[aggregation])
    assert float(built(current, corrected, counts(batch)).loss.detach()) == float(expected.loss.detach())


def test_dr_grpo_divides_by_its_constant():
    batch, current = random_batch(seed=10, reference=False)
    halves = []
    for length in (4, 8):
        built = Objective(LossConfig(length_normaliser=length), CorrectionConfig(method="none"))
        halves.append(built(current, built.corrected(batch)[0], counts(batch)).loss.item())
    assert halves[0] == pytest.approx(2 * halves[1], rel=1e-12)


def test_a_custom_rule_rejects_rows_and_normalises_what_it_keeps():
    batch, _ = random_batch(seed=11, rows=12)
    config = CorrectionConfig(
        method="custom",
        weighting=WeightingConfig(level="token", action="truncate", high=CAP),
        filters=[FilterConfig(name="seq_mean_k1", low=0.8, high=1.25)],
        veto=1e-3,
        normalise="token",
    )
    corrected, metrics = Objective(LossConfig(), config).corrected(batch)
    assert 0 < metrics["seq_masked_fraction"] < 1
    assert float(corrected.weights[corrected.mask].double().mean()) == pytest.approx(1.0, rel=1e-6)


def test_unknown_names_are_the_user_s_mistake():
    with pytest.raises(UserError, match="verl/nothing"):
        Objective(LossConfig(), CorrectionConfig(method="preset", preset="verl/nothing"))
    unknown = CorrectionConfig(method="custom", filters=[FilterConfig(name="seq_best_k9", high=1.0)])
    with pytest.raises(UserError, match="seq_best_k9"):
        Objective(LossConfig(), unknown)
    with pytest.raises(ValueError, match="go together"):
        CorrectionConfig(method="preset")
