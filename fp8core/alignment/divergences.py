"""Per-token divergence estimates as functions of one log-ratio, for metrics, rejection filters and penalties.

`d` is log p(token) - log q(token) for tokens sampled from q, of any shape. Every function is elementwise,
differentiable and unclamped: callers pass `clamp_exponent(d)` where an exponential could overflow.

Source: J. Schulman, "Approximating KL Divergence" (2020) for k1, k2 and k3.
"""

import torch
from torch import Tensor

EXPONENT_BOUND = 20.0


def clamp_exponent(d: Tensor) -> Tensor:
    """`d` limited to +-20, so that exp(d) lies between 2e-9 and 5e8."""
    return d.clamp(-EXPONENT_BOUND, EXPONENT_BOUND)


def k1(d: Tensor) -> Tensor:
    """-d: unbiased for KL(q || p), any sign."""
    return -d


def k2(d: Tensor) -> Tensor:
    """d^2 / 2: never negative; biased for KL(q || p), by the third order of d."""
    return d.square() / 2


def k3(d: Tensor) -> Tensor:
    """exp(d) - 1 - d: unbiased for KL(q || p), never negative."""
    # exp(d) - 1 would lose the digits of small d.
    return torch.expm1(d) - d


def jensen_shannon(d: Tensor) -> Tensor:
    """Unbiased for JS(p, q) = KL(p||m)/2 + KL(q||m)/2, m = (p+q)/2, by weighting the p half with exp(d); >= 0."""
    p_over_m, q_over_m = _against_mixture(d)
    # For d below 1e-11 the two halves cancel to rounding errors of either sign.
    return ((torch.exp(d) * p_over_m + q_over_m) / 2).clamp_min(0)


def jensen_shannon_k3(d: Tensor) -> Tensor:
    """NeMo RL's form: the mean of k3(log p/m) and k3(log q/m). Not JS: it estimates neither half under q."""
    p_over_m, q_over_m = _against_mixture(d)
    return (k3(p_over_m) + k3(q_over_m)) / 2


def _against_mixture(d: Tensor) -> tuple[Tensor, Tensor]:
    """log p/m and log q/m for the mixture m = (p+q)/2; exactly 0 at d = 0."""
    return -torch.log1p(torch.expm1(-d) / 2), -torch.log1p(torch.expm1(d) / 2)
