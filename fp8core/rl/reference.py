"""The penalty that keeps the policy near a frozen reference policy.

With d = log p_reference - log p_current at tokens sampled from (about) the current policy, the per-token estimates
of KL(current || reference) are k1 = -d, k2 = d^2/2 and k3 = exp(d) - 1 - d (GRPO, arXiv 2402.03300, eq. 4). As losses
they differ from what they estimate, for on-policy tokens:

| estimate | value           | expected gradient                                 |
|----------|-----------------|---------------------------------------------------|
| k1       | unbiased        | zero: it does not pull at all                     |
| k2       | biased          | that of KL(current || reference)                  |
| k3       | unbiased, >= 0  | that of KL(reference || current), bounded pull up |
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fp8core.alignment.divergences import k1, k2, k3
from fp8core.rl.aggregation import Aggregate, Denominator, token_mean

ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def reference_penalty(
    current: Tensor,
    reference: Tensor,
    mask: Tensor,
    denominator: Denominator,
    *,
    estimate: Callable[[Tensor], Tensor] = k3,
    aggregate: Aggregate = token_mean,
    input_bound: float = 20.0,
    output_bound: float = 10.0,
) -> Tensor:
    """Aggregated KL estimate, an FP64 scalar, differentiable in `current`.

    `current`, `reference`: log-probs, float [B, T]; `mask`: bool [B, T]. d is clamped to +-`input_bound` and the
    estimate to +-`output_bound` (the defaults are NeMo RL's); a token beyond a bound has no gradient.
    """
    d = torch.where(mask, reference.detach().double() - current.double(), 0.0).clamp(-input_bound, input_bound)
    return aggregate(estimate(d).clamp(-output_bound, output_bound), mask, denominator)
