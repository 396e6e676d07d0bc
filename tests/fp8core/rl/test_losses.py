"""Each loss against an independent implementation: Python floats, loops over tokens, no shared code.

The slow losses take the log-probs twice: `current` moves, `frozen` is what a stop-gradient sees. Finite differences of
the slow loss in `current` alone are therefore the gradient that the real loss must have.
"""

import math
from dataclasses import replace

import pytest
import torch

from fp8core.rl.losses import (
    AGGREGATIONS,
    ClipRange,
    Denominator,
    LossInputs,
    binary_tv,
    cispo,
    clipped_surrogate,
    constant_length,
    gspo,
    reference_penalty,
    reinforce,
    sequence_mean_token_mean,
    token_mean,
)

CLIP = ClipRange(low=0.2, high=0.28)
DUAL = ClipRange(low=0.2, high=0.28, dual=3.0)


def make_inputs(seed, rows=4, tokens=6, spread=0.5, kept=None):
    g = torch.Generator().manual_seed(seed)
    old = -2 * torch.rand(rows, tokens, generator=g, dtype=torch.float64) - 0.1
    current = (old + spread * torch.randn(rows, tokens, generator=g, dtype=torch.float64)).requires_grad_()
    mask = torch.rand(rows, tokens, generator=g) < 0.7
    return LossInputs(
        current=current,
        old=old,
        advantages=torch.randn(rows, generator=g, dtype=torch.float64),
        loss_mask=mask,
        denominator=Denominator.of(mask),
        weights=0.5 + torch.rand(rows, tokens, generator=g, dtype=torch.float64),
        accepted_mask=None if kept is None else torch.rand(rows, tokens, generator=g) < kept,
    )


def clip(r):
    return min(max(r, 0.8), 1.28)


def by_token(term):
    """A slow loss of a row from terms (current, frozen, old, advantage, weight); a row is tuples of the same but A."""
    return lambda row, a: [term(c, f, o, a, w) for c, f, o, w in row]


def slow_dual(c, f, o, a, w):
    r = math.exp(c - o)
    loss = max(-a * r, -a * clip(r))
    return w * (min(loss, -3 * a) if a < 0 else loss)


def slow_gspo(row, a):
    mean = math.exp(sum(f - o for _, f, o, _ in row) / max(len(row), 1))
    ratios = [mean * math.exp(c - f) for c, f, _, _ in row]
    return [w * max(-a * s, -a * clip(s)) for s, (_, _, _, w) in zip(ratios, row, strict=True)]


def slow_binary_tv(c, f, o, a, w):
    moved = math.exp(f) - math.exp(o)
    drop = moved > 0.2 if a > 0 else moved < -0.2
    return (0 if drop else -w * a * math.exp(c - o)) + 1e-3 * (c - o) ** 2


def slow_aggregate(rows, how):
    rows = [row for row in rows if row]
    tokens = [term for row in rows for term in row]
    return {
        "token-mean": sum(tokens) / max(len(tokens), 1),
        "seq-mean-token-sum": sum(tokens) / max(len(rows), 1),
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in rows) / max(len(rows), 1),
        "constant": sum(tokens) / max(len(rows), 1) / 7,
    }[how]


def slow_loss(slow, inputs, current, how):
    """A rejected token is a term of 0: it is counted, and has a part in nothing else."""
    frozen, old, weights = inputs.current.tolist(), inputs.old.tolist(), inputs.weights.tolist()
    rows = []
    for i, advantage in enumerate(inputs.advantages.tolist()):
        counted = [j for j, m in enumerate(inputs.loss_mask[i].tolist()) if m]
        kept = [j for j in counted if inputs.accepted_mask is None or inputs.accepted_mask[i, j].item()]
        terms = slow([(current[i][j], frozen[i][j], old[i][j], weights[i][j]) for j in kept], advantage)
        rows.append([dict(zip(kept, terms, strict=True)).get(j, 0.0) for j in counted])
    return slow_aggregate(rows, how)


def finite_differences(slow, inputs, how, step=1e-6):
    base = inputs.current.tolist()
    gradient = torch.zeros_like(inputs.current)
    for i in range(gradient.shape[0]):
        for j in range(gradient.shape[1]):
            values = []
            for sign in (1, -1):
                moved = [list(row) for row in base]
                moved[i][j] += sign * step
                values.append(slow_loss(slow, inputs, moved, how))
            gradient[i, j] = (values[0] - values[1]) / (2 * step)
    return gradient


LOSSES = {
    "clipped surrogate": (
        lambda x, agg: clipped_surrogate(x, CLIP, agg),
        by_token(lambda c, f, o, a, w: w * max(-a * math.exp(c - o), -a * clip(math.exp(c - o)))),
    ),
    "dual clip": (lambda x, agg: clipped_surrogate(x, DUAL, agg), by_token(slow_dual)),
    "gspo": (lambda x, agg: gspo(x, CLIP, agg), slow_gspo),
    "cispo": (lambda x, agg: cispo(x, CLIP, agg), by_token(lambda c, f, o, a, w: -w * clip(math.exp(f - o)) * a * c)),
    "reinforce": (lambda x, agg: reinforce(x, CLIP, agg), by_token(lambda c, f, o, a, w: -w * a * c)),
    "binary tv": (lambda x, agg: binary_tv(x, CLIP, agg), by_token(slow_binary_tv)),
}
AGGREGATES = {**AGGREGATIONS, "constant": constant_length(7)}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("how", AGGREGATES)
def test_value_and_gradient_equal_the_slow_loss(name, how):
    loss, slow = LOSSES[name]
    for seed, spread, kept in ((0, 0.3, None), (1, 1.5, None), (2, 0.5, 0.7), (3, 1.5, 0.4)):
        inputs = make_inputs(seed, spread=spread, kept=kept)
        result = loss(inputs, AGGREGATES[how]).loss
        assert result.item() == pytest.approx(slow_loss(slow, inputs, inputs.current.tolist(), how), rel=1e-12)
        result.backward()
        torch.testing.assert_close(inputs.current.grad, finite_differences(slow, inputs, how), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("how", AGGREGATES)
def test_padded_micro_batches_in_any_order_add_up_to_the_batch(name, how):
    loss, _ = LOSSES[name]
    inputs = make_inputs(3, rows=7)
    whole = loss(inputs, AGGREGATES[how])
    parts = []
    for rows in ([4, 0], [2], [1, 6, 3, 5]):
        fields = {name: getattr(inputs, name)[rows] for name in ("current", "old", "loss_mask", "weights")}
        padded = {name: torch.nn.functional.pad(value, (2, 3)) for name, value in fields.items()}
        part = LossInputs(**padded, advantages=inputs.advantages[rows], denominator=inputs.denominator)
        parts.append(loss(part, AGGREGATES[how]))
    for field in ("loss", "clip_fraction", "ratio_mean"):
        total = sum(getattr(part, field) for part in parts)
        torch.testing.assert_close(total, getattr(whole, field), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", LOSSES)
def test_a_batch_without_tokens_has_zero_loss_and_gradient(name):
    loss, _ = LOSSES[name]
    filled = make_inputs(5)
    nothing = torch.zeros_like(filled.loss_mask)
    inputs = replace(filled, loss_mask=nothing, denominator=Denominator.of(nothing), weights=None)
    for how in AGGREGATES.values():
        result = loss(inputs, how).loss
        result.backward()
        assert result.item() == 0
    assert filled.current.grad.count_nonzero() == 0


def single(advantage, log_ratio, old=-1.0):
    mask = torch.ones(1, 1, dtype=torch.bool)
    return LossInputs(
        current=torch.tensor([[log_ratio + old]], dtype=torch.float64, requires_grad=True),
        old=torch.tensor([[old]], dtype=torch.float64),
        advantages=torch.tensor([advantage], dtype=torch.float64),
        loss_mask=mask,
        denominator=Denominator(tokens=1, sequences=1),
    )


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("log_ratio", [1000.0, -1000.0])
def test_extreme_ratios_stay_finite(name, log_ratio):
    for advantage in (1.0, -1.0):
        inputs = single(advantage, log_ratio)
        loss = LOSSES[name][0](inputs, token_mean).loss
        loss.backward()
        assert loss.isfinite()
        assert inputs.current.grad.isfinite().all()


def test_ratios_are_clamped_and_gspo_s_as_in_verl():
    assert clipped_surrogate(single(-1.0, 1000.0), CLIP, token_mean).loss.item() == pytest.approx(math.exp(20))
    assert gspo(single(-1.0, 1000.0), CLIP, sequence_mean_token_mean).loss.item() == pytest.approx(math.exp(10))


def tensors(spread):
    g = torch.Generator().manual_seed(0)
    current = (-torch.rand(3, 5, generator=g, dtype=torch.float64)).requires_grad_()
    reference = current.detach() + spread * torch.randn(3, 5, generator=g, dtype=torch.float64)
    return current, reference, torch.rand(3, 5, generator=g) < 0.7


def slow_penalty(current, reference, mask):
    """A token at a time, from `calculate_kl` of NeMo RL."""
    total = torch.zeros((), dtype=torch.float64)
    for i, j in mask.nonzero().tolist():
        logr = reference[i, j].item() - current[i, j]
        if abs(logr.item()) > 20:
            logr = torch.tensor(math.copysign(20.0, logr.item()))
        kl = torch.exp(logr) - 1 - logr
        total = total + (kl if abs(kl.item()) <= 10 else math.copysign(10.0, kl.item()))
    return total / int(mask.sum())


@pytest.mark.parametrize("spread", [0.3, 3.0, 15.0])
def test_the_penalty_is_nemo_rl_s(spread):
    current, reference, mask = tensors(spread)
    ours = reference_penalty(current, reference, mask, Denominator.of(mask))
    theirs = slow_penalty(current, reference, mask)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    found, expected = (torch.autograd.grad(value, current)[0] for value in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)
