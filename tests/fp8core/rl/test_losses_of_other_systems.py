"""clip_cov, kl_cov, geo_mean and sapo against verl's formulas, a token at a time, without any code of ours.

Gradients are FP64 autograd's of the slow versions. Source: verl, verl/trainer/ppo/core_algos.py.
"""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from fp8core.rl.losses import (
    AGGREGATIONS,
    ClipRange,
    Denominator,
    LossInputs,
    clip_cov,
    clip_cov_selection,
    geo_mean,
    kl_cov,
    kl_cov_selection,
    sapo,
    sequence_mean_token_mean,
    token_mean,
)

CLIP = ClipRange(low=0.2, high=0.28)
COV = {"share": 0.1, "low": 0.05, "high": 2.0}
TAUS = {"tau_positive": 1.0, "tau_negative": 1.05}


def make_inputs(seed, rows=6, tokens=9, spread=0.5, kept=None):
    g = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(rows, tokens, generator=g, dtype=torch.float64) - 0.1
    current = (old + spread * torch.randn(rows, tokens, generator=g, dtype=torch.float64)).requires_grad_()
    mask = torch.arange(tokens) < torch.randint(0, tokens + 1, (rows, 1), generator=g)
    return LossInputs(
        current=current,
        old=old.masked_fill(~mask, math.nan),
        advantages=torch.randn(rows, generator=g, dtype=torch.float64),
        mask=mask,
        denominator=Denominator.of(mask),
        weights=0.5 + torch.rand(rows, tokens, generator=g, dtype=torch.float64),
        kept=None if kept is None else torch.rand(rows, tokens, generator=g) < kept,
    )


def by_tokens(loss, inputs, **options):
    return loss(inputs, CLIP, token_mean, **options).loss


def by_rows(loss, inputs, **options):
    return loss(inputs, CLIP, sequence_mean_token_mean, **options).loss


def places(inputs):
    """The tokens that were not rejected; terms are divided by those of the denominator."""
    return [[i, j] for i, j in inputs.mask.nonzero().tolist() if inputs.kept is None or inputs.kept[i, j].item()]


def slow_covariance(inputs):
    found = places(inputs)
    mean_a = sum(inputs.advantages[i].item() for i, _ in found) / len(found)
    mean_c = sum(inputs.current[i, j].item() for i, j in found) / len(found)
    return {(i, j): (inputs.advantages[i].item() - mean_a) * (inputs.current[i, j].item() - mean_c) for i, j in found}


def clipped_already(inputs, i, j):
    ratio, a = math.exp(inputs.current[i, j].item() - inputs.old[i, j].item()), inputs.advantages[i].item()
    return -a * min(max(ratio, 0.8), 1.28) > -a * ratio


def slow_candidates(inputs):
    return {
        place
        for place, value in slow_covariance(inputs).items()
        if COV["low"] < value < COV["high"] and not clipped_already(inputs, *place)
    }


def slow_surrogate(inputs, dropped):
    total = torch.zeros((), dtype=torch.float64)
    for i, j in places(inputs):
        if (i, j) not in dropped:
            ratio, a = torch.exp(inputs.current[i, j] - inputs.old[i, j]), inputs.advantages[i]
            total = total + inputs.weights[i, j] * torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.28))
    return total / int(inputs.mask.sum())


def slow_kl_cov(inputs, weight, held):
    total = torch.zeros((), dtype=torch.float64)
    for i, j in places(inputs):
        d = inputs.current[i, j] - inputs.old[i, j]
        term = -inputs.advantages[i] * torch.exp(d)
        total = total + inputs.weights[i, j] * (term + weight * d.abs() if (i, j) in held else term)
    return total / int(inputs.mask.sum())


def slow_geo_mean(inputs):
    losses, found = [], places(inputs)
    for i, advantage in enumerate(inputs.advantages.tolist()):
        kept, counted = [j for row, j in found if row == i], int(inputs.mask[i].sum())
        if not kept:
            # A row whose tokens were all rejected is counted.
            losses += [torch.zeros(())] if counted else []
            continue
        sign = (advantage > 0) - (advantage < 0)
        logs = [inputs.current[i, j] - inputs.old[i, j] for j in kept]
        limited = [sign * min(sign * d, sign * d.clamp(-0.2, 0.28), key=torch.Tensor.item) for d in logs]
        weight = math.exp(sum(math.log(inputs.weights[i, j].item() + 1e-10) for j in kept) / len(kept))
        losses.append(-advantage * torch.exp(sum(limited) / len(kept)) * weight * len(kept) / counted)
    return sum(losses) / len(losses)


def slow_sapo(inputs, positive, negative):
    rows, kept = [], places(inputs)
    for i, advantage in enumerate(inputs.advantages.tolist()):
        tau, terms = positive if advantage > 0 else negative, []
        for j, there in enumerate(inputs.mask[i].tolist()):
            if there and [i, j] not in kept:
                terms.append(torch.zeros(()))
            elif there:
                ratio = torch.exp(inputs.current[i, j] - inputs.old[i, j])
                gate = 1 / (1 + torch.exp(-tau * (ratio - 1))) * (4 / tau)
                terms.append(-gate * advantage * inputs.weights[i, j])
        if terms:
            rows.append(sum(terms) / len(terms))
    return sum(rows) / len(rows)


def assert_same(inputs, ours, theirs, within=1e-12):
    assert ours.item() == pytest.approx(theirs.item(), rel=within)
    found, expected = (torch.autograd.grad(value, inputs.current)[0] for value in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=10 * within, atol=1e-15)
    assert not found[~inputs.mask].any()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("spread", [0.1, 1.0])
@pytest.mark.parametrize("kept", [None, 0.5])
def test_losses_without_a_choice(seed, spread, kept):
    inputs = make_inputs(seed, spread=spread, kept=kept)
    # verl adds 1e-10 to each weight.
    assert_same(inputs, by_rows(geo_mean, inputs), slow_geo_mean(inputs), within=1e-9)
    assert_same(inputs, by_rows(sapo, inputs, tau_positive=1.0, tau_negative=1.05), slow_sapo(inputs, 1.0, 1.05))
    assert_same(inputs, by_rows(sapo, inputs, tau_positive=3.0, tau_negative=0.5), slow_sapo(inputs, 3.0, 0.5))


def test_a_weight_of_zero_leaves_a_row_a_part():
    """As in verl: the geometric mean has 1e-10 in its place."""
    inputs = make_inputs(1)
    weights = inputs.weights.clone()
    weights[:, 0] = 0.0
    inputs = replace(inputs, weights=weights)
    assert slow_geo_mean(inputs).item() != 0
    assert_same(inputs, by_rows(geo_mean, inputs), slow_geo_mean(inputs), within=1e-9)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kept", [None, 0.6])
def test_kl_cov_holds_the_tokens_of_the_largest_covariance(seed, kept):
    """Of those that were not rejected."""
    inputs = make_inputs(seed, kept=kept)
    covariance = slow_covariance(inputs)
    for share in (1e-6, 0.1, 0.5, 1.0):
        count = max(int(share * len(covariance)), 1)
        held = set(sorted(covariance, key=covariance.__getitem__, reverse=True)[:count])
        selected = kl_cov_selection(inputs, share)
        assert {tuple(place) for place in selected.nonzero().tolist()} == held
        assert_same(
            inputs, by_tokens(kl_cov, replace(inputs, selected=selected), weight=0.3), slow_kl_cov(inputs, 0.3, held)
        )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kept", [None, 0.6])
def test_clip_cov_drops_some_of_its_candidates(seed, kept):
    inputs, drawn = make_inputs(seed, kept=kept), set()
    candidates = slow_candidates(inputs)
    count = min(max(int(COV["share"] * len(places(inputs))), 1), len(candidates))
    for draw in range(100):
        selected = clip_cov_selection(inputs, CLIP, torch.Generator().manual_seed(draw), **COV)
        dropped = {tuple(place) for place in selected.nonzero().tolist()}
        assert len(dropped) == count
        drawn |= dropped
        if draw < 3:
            assert_same(
                inputs, by_tokens(clip_cov, replace(inputs, selected=selected)), slow_surrogate(inputs, dropped)
            )
    assert drawn == candidates


def test_golden_vectors():
    """Two rows, A = 1 and -1, log r = [0.1, 0.4] and [-0.1, -0.5], old = -1, by hand."""
    old = torch.full((2, 2), -1.0, dtype=torch.float64)
    moved = torch.tensor([[0.1, 0.4], [-0.1, -0.5]], dtype=torch.float64)
    mask = torch.ones(2, 2, dtype=torch.bool)
    inputs = LossInputs(
        current=old + moved,
        old=old,
        advantages=torch.tensor([1.0, -1.0]),
        mask=mask,
        denominator=Denominator.of(mask),
    )
    # GMPO: 0.4 is limited to 0.28, -0.5 to -0.2; rows -e^0.19 and e^-0.15.
    assert by_rows(geo_mean, inputs).item() == pytest.approx((-math.exp(0.19) + math.exp(-0.15)) / 2, rel=1e-12)
    # SAPO at r = e^0.1, e^0.4 with tau 1, at e^-0.1, e^-0.5 with tau 1.05.
    assert by_rows(sapo, inputs, **TAUS).item() == pytest.approx(-0.315186273, abs=1e-8)
    # Covariances: mean A = 0, mean log p = -1.025, so 0.125, 0.425, 0.075, 0.475.
    assert kl_cov_selection(inputs, 0.25).tolist() == [[False, False], [False, True]]
    assert kl_cov_selection(inputs, 0.5).tolist() == [[False, True], [False, True]]
    ratios = -math.exp(0.1) - math.exp(0.4) + math.exp(-0.1) + math.exp(-0.5)
    held = replace(inputs, selected=kl_cov_selection(inputs, 0.5))
    assert by_tokens(kl_cov, held, weight=2.0).item() == pytest.approx((ratios + 2 * 0.9) / 4, rel=1e-12)
    # r = e^0.4 and e^-0.5 are clipped already: 0.425 and 0.475 are no candidates.
    generator = torch.Generator().manual_seed(0)
    selected = clip_cov_selection(inputs, CLIP, generator, share=0.5, low=0.1, high=1.0)
    assert selected.tolist() == [[True, False], [False, False]]
    found = clip_cov(replace(inputs, selected=selected), CLIP, token_mean)
    assert found.loss.item() == pytest.approx((-1.28 + math.exp(-0.1) + 0.8) / 4, rel=1e-12)
    assert (found.clip_fraction.item(), found.ratio_clipped.item()) == (3 / 4, 2 / 4)
    # GMPO with advantages by token: A = 0 leaves no ratio, so the first row is -e^0.05 / 2.
    by_token = replace(inputs, advantages=torch.tensor([[1.0, 0.0], [-1.0, -1.0]], dtype=torch.float64))
    assert by_rows(geo_mean, by_token).item() == pytest.approx((-math.exp(0.05) / 2 + math.exp(-0.15)) / 2, rel=1e-12)


def test_nothing_to_choose_from():
    inputs = make_inputs(0)
    selected = clip_cov_selection(inputs, CLIP, torch.Generator(), share=0.5, low=1e3, high=2e3)
    assert not selected.any()
    assert_same(inputs, by_tokens(clip_cov, replace(inputs, selected=selected)), slow_surrogate(inputs, set()))
    empty = replace(inputs, mask=torch.zeros_like(inputs.mask), denominator=Denominator(0, 0))
    for selected in (clip_cov_selection(empty, CLIP, torch.Generator(), **COV), kl_cov_selection(empty, 0.1)):
        assert not selected.any()
    assert by_rows(geo_mean, empty).item() == by_rows(sapo, empty, **TAUS).item() == 0


@pytest.mark.parametrize(
    "loss", [geo_mean, clip_cov, partial(kl_cov, weight=0.3), partial(sapo, tau_positive=1, tau_negative=2)]
)
@pytest.mark.parametrize("aggregate", AGGREGATIONS.values())
def test_parts_add_up(loss, aggregate):
    inputs = make_inputs(3)
    whole = replace(inputs, selected=kl_cov_selection(inputs, 0.3))
    parts = [
        replace(
            whole,
            current=whole.current[rows],
            old=whole.old[rows],
            advantages=whole.advantages[rows],
            mask=whole.mask[rows],
            weights=whole.weights[rows],
            selected=whole.selected[rows],
        )
        for rows in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    total = sum(loss(part, CLIP, aggregate).loss.item() for part in parts)
    assert total == pytest.approx(loss(whole, CLIP, aggregate).loss.item(), rel=1e-12)


def test_extremes_stay_finite():
    for distance in (1e3, -1e3):
        inputs = make_inputs(4)
        inputs = replace(inputs, current=(inputs.old.nan_to_num(0.0) + distance).requires_grad_())
        inputs = replace(inputs, selected=kl_cov_selection(inputs, 0.3))
        for loss in (
            by_rows(geo_mean, inputs),
            by_rows(sapo, inputs, **TAUS),
            by_tokens(clip_cov, inputs),
            by_tokens(kl_cov, inputs, weight=0.1),
        ):
            (gradient,) = torch.autograd.grad(loss, inputs.current, retain_graph=True)
            assert loss.isfinite()
            assert gradient.isfinite().all()
