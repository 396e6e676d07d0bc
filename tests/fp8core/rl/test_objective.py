"""The objective against Python floats in loops over tokens, which share no code with it."""

import math
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8core.config.loss import SHIPPED_LOSSES, LossConfig
from fp8core.config.training import CorrectionConfig, FilterConfig
from fp8core.rl import losses
from fp8core.rl.batch import RolloutBatch, TokenBatch
from fp8core.rl.correction import PRESETS
from fp8core.rl.losses import AGGREGATIONS, ClipRange, Denominator, LossInputs
from fp8core.rl.objective import Objective, merge_totals, whole_batch_setting

LOW, HIGH, CAP = 0.2, 0.28, 1.5
MEANS = {"aggregation": "seq-mean-token-mean"}
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
        policy_mask=mask,
        rollout_logprobs=near(old),
        old_logprobs=old,
        reference_logprobs=near(old) if reference else None,
        advantages=torch.randn(rows, generator=g),
        row_mask=torch.rand(rows, generator=g) < 0.8,
        centred_rewards=torch.randn(rows, generator=g),
    )
    return batch, near(old).requires_grad_()


def counts(batch):
    return Denominator.of(batch.policy_mask & batch.row_mask[:, None])


@dataclass
class Sums:
    loss: float = 0.0
    clip_fraction: float = 0.0
    ratio_mean: float = 0.0
    ratio_bias: float = 0.0
    ratio_deviation: float = 0.0
    reward_slope: float = 0.0
    weight_mean: float = 0.0
    zero_weight_fraction: float = 0.0
    reference_kl: float = 0.0
    teacher_kl: float = 0.0


def slow(method, reference_kl, batch, current):
    """Statistics, and the derivative of the loss by the log-prob of each token."""
    sums, gradient = Sums(), torch.zeros(current.shape, dtype=torch.float64)
    places = [
        (i, j)
        for i, j in torch.cartesian_prod(*map(torch.arange, current.shape)).tolist()
        if batch.policy_mask[i, j] and batch.row_mask[i]
    ]
    n = max(len(places), 1)
    places_in_row = Counter(i for i, _ in places)
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
        sums.ratio_bias += (ratio - 1) / n
        sums.ratio_deviation = max(sums.ratio_deviation, abs(ratio - 1))
        row, rows = places_in_row[i], len(places_in_row)
        sums.reward_slope += (0.0 if clipped else weight * a * ratio) * batch.centred_rewards[i].item() / row / rows
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


@pytest.mark.parametrize("policy", SHIPPED_LOSSES)
def test_what_is_masked_or_dropped_may_hold_anything(policy):
    how = "seq-mean-token-mean" if SHIPPED_LOSSES[policy].by_rows else "token-mean"
    loss = LossConfig(policy=policy, aggregation=how, reference_kl=0.3)
    rule = Objective(loss, CorrectionConfig(method="token_tis", cap=CAP))

    def built(current, batch, denominator):
        return rule(current, rule.corrected(batch)[0], denominator)

    batch, current = random_batch(seed=2)
    hidden = ~(batch.policy_mask & batch.row_mask[:, None])
    assert hidden.any()
    assert not batch.row_mask.all()
    terms = built(current, batch, counts(batch))
    (gradient,) = torch.autograd.grad(terms.loss, current)
    for garbage in (math.nan, math.inf):
        spoilt = replace(
            batch,
            rollout_logprobs=batch.rollout_logprobs.masked_fill(hidden, garbage),
            old_logprobs=batch.old_logprobs.masked_fill(hidden, garbage),
            reference_logprobs=batch.reference_logprobs.masked_fill(hidden, garbage),
            advantages=batch.advantages.masked_fill(~batch.row_mask, garbage),
        )
        moved = current.detach().masked_fill(hidden, garbage).requires_grad_()
        again = built(moved, spoilt, counts(spoilt))
        (gradient_again,) = torch.autograd.grad(again.loss, moved)
        assert again.statistics() == terms.statistics()
        assert torch.equal(gradient_again, gradient)
        assert not gradient_again[hidden].any()


@pytest.mark.parametrize("settings", [*({"aggregation": name} for name in AGGREGATIONS), {"length_normaliser": 64}])
def test_the_reported_divergence_is_a_token_mean_whatever_the_aggregation(settings):
    """The loss has the penalty by its aggregation."""
    batch, current = random_batch(seed=15)
    plain, weighed = (
        Objective(LossConfig(reference_kl=weight, **settings), CorrectionConfig(method="none")) for weight in (0.0, 0.5)
    )
    found = [built(current, built.corrected(batch)[0], counts(batch)) for built in (plain, weighed)]
    kept = (batch.policy_mask & batch.row_mask[:, None]).nonzero().tolist()
    d = {(i, j): (batch.reference_logprobs[i, j].double() - current[i, j].double()).item() for i, j in kept}
    mean = sum(math.expm1(value) - value for value in d.values()) / len(d)
    assert [terms.reference_kl.item() for terms in found] == pytest.approx([mean, mean], rel=1e-9)
    rows = Counter(i for i, _ in kept)
    total = sum((math.expm1(v) - v) / (rows[i] if settings == MEANS else 1) for (i, _), v in d.items())
    share = {"token-mean": len(d), "seq-mean-token-sum": len(rows), "seq-mean-token-mean": len(rows)}
    divisor = share[settings["aggregation"]] if "aggregation" in settings else 64 * len(rows)
    assert (found[1].loss - found[0].loss).item() == pytest.approx(0.5 * total / divisor, rel=1e-6)


@pytest.mark.parametrize("policy", SHIPPED_LOSSES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_every_policy_loss_and_aggregation_is_the_library_s(policy, aggregation):
    if SHIPPED_LOSSES[policy].by_rows and aggregation != "seq-mean-token-mean":
        return
    loss = LossConfig(
        policy=policy,
        aggregation=aggregation,
        clip_low=LOW,
        clip_high=HIGH,
        dual_clip=3.0 if SHIPPED_LOSSES[policy].dual_clip else None,
    )
    batch, current = random_batch(seed=9, reference=False)
    built = Objective(loss, CorrectionConfig(method="none"))
    corrected, _ = built.corrected(batch)
    inputs = LossInputs(
        current=current,
        old=batch.old_logprobs,
        advantages=batch.advantages,
        loss_mask=corrected.loss_mask,
        denominator=counts(batch),
    )
    found = float(built(current, corrected, counts(batch)).loss.detach())
    expected = getattr(losses, {"clipped": "clipped_surrogate"}.get(policy, policy))
    clip = ClipRange(low=LOW, high=HIGH, dual=loss.dual_clip)
    assert found == float(expected(inputs, clip, AGGREGATIONS[aggregation]).loss.detach())


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"policy": "gspo"}, "mean over rows"),
        ({"policy": "cispo", "dual_clip": 3.0}, "dual_clip: policy=cispo has none"),
        ({"policy": "gspo", "aggregation": "seq-mean-token-mean", "length_normaliser": 4}, "mean over rows"),
        ({"policy": "mine.py:loss", "dual_clip": 3.0}, "dual_clip: policy=mine.py:loss has none"),
        ({"policy": "clipped", "options": {"x": 1}}, "policy=clipped takes none"),
        ({"policy": "clippped"}, "clippped is none of clipped, gspo"),
    ],
)
def test_settings_that_a_loss_does_not_take_are_refused(settings, reason):
    with pytest.raises(ValueError, match=reason):
        LossConfig(**settings)


def test_the_entropy_bonus_is_aggregated_like_the_loss():
    batch, current = random_batch(seed=12, reference=False)
    g = torch.Generator().manual_seed(0)
    entropy = (
        torch.rand(batch.policy_mask.shape, generator=g).masked_fill(~batch.policy_mask, math.nan).requires_grad_()
    )
    for name, aggregate in AGGREGATIONS.items():
        settings = {"aggregation": name}
        plain = Objective(LossConfig(**settings), CorrectionConfig(method="none"))
        rewarded = Objective(LossConfig(**settings, entropy=0.3), CorrectionConfig(method="none"))
        corrected, _ = plain.corrected(batch)
        (gradient,) = torch.autograd.grad(rewarded(current, corrected, counts(batch), entropy).loss, entropy)
        without = plain(current, corrected, counts(batch), entropy).loss
        bonus = (without - rewarded(current, corrected, counts(batch), entropy).loss).item()
        kept = corrected.loss_mask
        expected = aggregate(entropy.detach().double(), kept, counts(batch)).item()
        assert bonus == pytest.approx(0.3 * expected, rel=1e-9)
        assert not gradient[~kept].any()
        assert (gradient[kept] < 0).all()


def slow_distilled(batch, current, weight, rewards, kept):
    """-A r over tokens, A by slime's `apply_opd_kl_to_advantages`; no ratio leaves the clip range."""
    total = torch.zeros((), dtype=torch.float64)
    for i, j in kept.nonzero().tolist():
        old = batch.old_logprobs[i, j].double()
        reverse_kl = old - batch.teacher_logprobs[i, j].double()
        advantage = rewards * batch.advantages[i].double() - weight * reverse_kl
        total = total - advantage * torch.exp(current[i, j] - old)
    return total / int(kept.sum())


@pytest.mark.parametrize(("weight", "rewards"), [(1.0, 0.0), (0.4, 1.0)])
def test_distillation_adds_the_reverse_kl_to_each_token_s_advantage(weight, rewards):
    batch, _ = random_batch(seed=13, reference=False)
    current = (batch.old_logprobs.double() + 0.01 * batch.rollout_logprobs.double().sin()).requires_grad_()
    batch = replace(batch, teacher_logprobs=batch.rollout_logprobs - 0.7)
    config = LossConfig(distillation={"teacher": "t", "weight": weight, "rewards": rewards})
    built = Objective(config, CorrectionConfig(method="none"))
    corrected, _ = built.corrected(batch)
    terms = built(current, corrected, counts(batch))
    expected = slow_distilled(batch, current, weight, rewards, corrected.loss_mask)
    assert terms.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    gradients = [torch.autograd.grad(loss, current)[0] for loss in (terms.loss, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-15)
    gap = (batch.old_logprobs.double() - batch.teacher_logprobs.double())[corrected.loss_mask]
    assert terms.statistics()["teacher_kl"] == pytest.approx(gap.mean().item(), rel=1e-12)


def test_a_custom_rule_divides_by_what_it_says():
    batch, _ = random_batch(seed=12, rows=12)
    tokens = {}
    for mode, denominator in (("decoupled", None), ("decoupled", "all"), ("bypass", None)):
        config = CorrectionConfig(
            method="custom",
            filters=[FilterConfig(name="seq_mean_k1", low=0.8, high=1.25)],
            mode=mode,
            denominator=denominator,
        )
        corrected, _ = Objective(LossConfig(), config).corrected(batch)
        tokens[mode, denominator] = int(corrected.loss_mask.sum())
        assert int((corrected.weights > 0).sum()) == tokens["decoupled", None]
    everything = int((batch.policy_mask & batch.row_mask[:, None]).sum())
    assert 0 < tokens["decoupled", None] < everything
    assert tokens["decoupled", "all"] == tokens["bypass", None] == everything


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"normalise": "token"}, "needs the weights of a whole batch"), ({"denominator": "kept"}, "not known in time")],
)
def test_bypass_refuses_what_needs_the_whole_batch(settings, message):
    with pytest.raises(ValueError, match=message):
        CorrectionConfig(method="custom", mode="bypass", **settings)


@pytest.mark.parametrize("name", PRESETS)
def test_without_old_log_probs_each_part_is_corrected_as_in_the_batch_or_refused(name) -> None:
    """`current` has the values of the old log-probs, and the gradients of the parts add up."""
    loss, correction = LossConfig(), CorrectionConfig(method="preset", preset=name)
    built = Objective(loss, correction)
    batch, _ = random_batch(5, rows=6)
    batch = replace(batch, teacher_logprobs=batch.reference_logprobs)

    def learnt(given):
        corrected, _ = built.corrected(given)
        denominator, totals = Denominator.of(corrected.loss_mask), {}
        current = batch.old_logprobs.clone().requires_grad_()
        for rows in (slice(0, 2), slice(2, 6)):
            terms = built(current[rows], corrected.rows(rows), denominator)
            terms.loss.backward()
            totals = merge_totals(totals, terms.statistics())
        return totals, current.grad

    rule = PRESETS[name]
    refused = rule.normalise != "none" or (rule.rejects and rule.divides_by == "kept")
    assert (whole_batch_setting(correction) is not None) == refused
    if not refused:
        (expected, gradient), (found, by_parts) = learnt(batch), learnt(replace(batch, old_logprobs=None))
        assert found == expected
        assert torch.equal(by_parts, gradient)
