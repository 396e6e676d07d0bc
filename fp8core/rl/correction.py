"""Correction of the mismatch between the policy that sampled and the policy that trains, as one rule.

A rule is data: a weighting (`importance`), rejection filters and a veto (`rejection`), and batch normalisation. It is
applied to the whole optimiser batch before that is split into micro-batches, and yields weights, the mask of what
remains, and from that mask the denominator. Every loss takes all three, so decoupled and bypass mode share one
denominator rule: rejected tokens leave it, zeroed ones (action `band`) stay.

- Decoupled (three policies): training = old log-probs; the loss is clipped on current - old and multiplied by weights.
- Bypass (two policies): training = current log-probs; either the clipped surrogate with old := rollout and no weights
  (they would count twice), or `reinforce` with weights. Rejection applies to both.

Order: clamp exponents, raw weights, action, filters and veto, zero what was rejected, normalise over what was kept.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fp8core.errors import UserError
from fp8core.rl.aggregation import Denominator
from fp8core.rl.importance import Weighting, log_ratio, row_mean, token_weights
from fp8core.rl.rejection import Filter, Veto


def _no_factor(weights: Tensor, mask: Tensor) -> float:
    return 1.0


def _token_mean(weights: Tensor, mask: Tensor) -> float:
    return float(torch.where(mask, weights, 0.0).sum() / mask.sum().clamp_min(1))


def _mean_of_rows(weights: Tensor, mask: Tensor) -> float:
    return float(row_mean(weights, mask).sum() / mask.any(dim=1).sum().clamp_min(1))


NORMALISATIONS: dict[str, Callable[[Tensor, Tensor], float]] = {
    "none": _no_factor,
    "token": _token_mean,
    "sequence": _mean_of_rows,
}
"""The mean that weights are divided by: none, over kept tokens, or over kept rows of their means."""


@dataclass(frozen=True, kw_only=True)
class CorrectionRule:
    """What to do about d = log p_training - log p_rollout; the default only measures."""

    weighting: Weighting = field(default_factory=lambda: Weighting(level="none", action="keep"))
    filters: tuple[Filter, ...] = ()
    veto: Veto | None = None
    normalise: str = "none"

    def __post_init__(self) -> None:
        if self.normalise not in NORMALISATIONS:
            raise UserError(f"batch normalisation {self.normalise!r} is not one of {', '.join(NORMALISATIONS)}")


@dataclass(frozen=True, kw_only=True)
class Correction:
    """A rule's verdict on a batch."""

    weights: Tensor
    """[B, T] in the dtype of the training log-probs, without gradient; 0 where `mask` is false."""
    mask: Tensor
    """Bool [B, T]: unmasked tokens that were not rejected."""
    metrics: dict[str, float]
    """masked_fraction, seq_masked_fraction, oob_ratio, batch_norm_factor, veto_fraction, catastrophic_token_fraction.

    Shares are of the unmasked tokens; of their rows for seq_masked_fraction (rows that lost a token) and veto_fraction.
    """

    @property
    def denominator(self) -> Denominator:
        """Counts of what remains."""
        return Denominator.of(self.mask)

    @property
    def keep(self) -> Tensor:
        """Bool [B]: rows with a remaining token, for `keep` of the group advantages."""
        return self.mask.any(dim=1)


def correct(rule: CorrectionRule, training: Tensor, rollout: Tensor, mask: Tensor) -> Correction:
    """Apply `rule` to a whole optimiser batch.

    `training`, `rollout`: log-probs of the sampled tokens, float [B, T]; `mask`: bool [B, T], tokens that the policy
    wrote; elsewhere any value is allowed.
    """
    d = log_ratio(training, rollout, mask)
    raw = rule.weighting.raw(d, mask)
    weights, kept = rule.weighting.apply(raw, mask)
    for test in rule.filters:
        kept = kept & test.passes(d, mask)
    catastrophic = rule.veto.catastrophic(d, mask) if rule.veto else torch.zeros_like(mask)
    vetoed = catastrophic.any(dim=1)
    kept = kept & ~vetoed[:, None]
    weights = torch.where(kept, weights, 0.0)
    factor = _positive(NORMALISATIONS[rule.normalise](weights, kept))
    metrics = {
        "masked_fraction": _share(mask & ~kept, mask),
        "seq_masked_fraction": _share((mask & ~kept).any(dim=1), mask.any(dim=1)),
        "oob_ratio": _share(rule.weighting.out_of_bounds(raw, mask), mask),
        "batch_norm_factor": factor,
        "veto_fraction": _share(vetoed, mask.any(dim=1)),
        "catastrophic_token_fraction": _share(catastrophic, mask),
    }
    return Correction(weights=(weights / factor).to(training.dtype), mask=kept, metrics=metrics)


def token_tis(training: Tensor, rollout: Tensor, mask: Tensor, cap: float) -> Tensor:
    """Token-level truncated importance sampling: min(exp(training - rollout), cap), 0 where masked.

    `training`, `rollout`: log-probs of the sampled tokens, float [B, T]; `mask`: bool [B, T].
    The result has no gradient and the dtype of `training`.
    Source: F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025).
    """
    return token_weights(log_ratio(training, rollout, mask), mask).clamp(max=cap).to(training.dtype)


def _share(part: Tensor, whole: Tensor) -> float:
    return int(part.sum()) / max(int(whole.sum()), 1)


def _positive(factor: float) -> float:
    """Weights whose mean is practically 0 are left as they are (verl's bound)."""
    return factor if factor > 1e-8 else 1.0
