import math

import pytest
import torch

from fp8core.rl.aggregation import AGGREGATIONS, Denominator
from fp8core.rl.reference import ESTIMATES, reference_penalty

SLOW = {
    "k1": lambda d: -d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(d) - d - 1,
}


def tensors(spread):
    g = torch.Generator().manual_seed(0)
    current = (-torch.rand(3, 5, generator=g, dtype=torch.float64)).requires_grad_()
    reference = current.detach() + spread * torch.randn(3, 5, generator=g, dtype=torch.float64)
    return current, reference, torch.rand(3, 5, generator=g) < 0.7


def slow(current, reference, mask, estimate):
    total = 0.0
    for c, r, m in zip(current, reference.flatten().tolist(), mask.flatten().tolist(), strict=True):
        if m:
            total += min(max(SLOW[estimate](min(max(r - c, -20.0), 20.0)), -10.0), 10.0)
    return total / int(mask.sum())


@pytest.mark.parametrize("estimate", ESTIMATES)
@pytest.mark.parametrize("spread", [0.3, 8.0, 40.0])
def test_value_and_gradient_equal_an_independent_loop(estimate, spread):
    current, reference, mask = tensors(spread)
    result = reference_penalty(current, reference, mask, Denominator.of(mask), estimate=ESTIMATES[estimate])
    flat = current.flatten().tolist()
    assert result.item() == pytest.approx(slow(flat, reference, mask, estimate), rel=1e-12)
    result.backward()
    for i, gradient in enumerate(current.grad.flatten().tolist()):
        up, down = (slow([*flat[:i], flat[i] + h, *flat[i + 1 :]], reference, mask, estimate) for h in (1e-6, -1e-6))
        assert gradient == pytest.approx((up - down) / 2e-6, rel=1e-5, abs=1e-8)


def test_the_same_policy_costs_exactly_nothing_and_junk_does_not_leak():
    current, _, mask = tensors(1.0)
    for estimate in ESTIMATES.values():
        for aggregate in AGGREGATIONS.values():
            dirty = current.detach().where(mask, math.nan).requires_grad_()
            penalty = reference_penalty(
                dirty, current.where(mask, math.inf), mask, Denominator.of(mask), estimate=estimate, aggregate=aggregate
            )
            penalty.backward()
            assert penalty.item() == 0
            assert dirty.grad.isfinite().all()


def test_expected_gradients_are_those_of_the_table():
    """Exact expectations over a vocabulary of four, tokens drawn from the current policy."""
    reference = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()
    start = torch.tensor([0.3, -0.2, 0.5, 0.1], dtype=torch.float64)

    def gradient(objective):
        logits = start.clone().requires_grad_()
        objective(torch.log_softmax(logits, 0)).backward()
        return logits.grad

    def expected(estimate):
        def objective(logp):
            mask = torch.ones(4, 1, dtype=torch.bool)
            probability = logp.detach().exp()
            terms = [
                reference_penalty(logp[i].view(1, 1), reference[i].view(1, 1), mask[:1], Denominator(1, 1), estimate=k)
                for k in [ESTIMATES[estimate]]
                for i in range(4)
            ]
            return (probability * torch.stack(terms)).sum()

        return gradient(objective)

    forward = gradient(lambda logp: (logp.exp() * (logp - reference)).sum())
    backward = gradient(lambda logp: (reference.exp() * (reference - logp)).sum())
    torch.testing.assert_close(expected("k1"), torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-15)
    torch.testing.assert_close(expected("k2"), forward)
    torch.testing.assert_close(expected("k3"), backward)
