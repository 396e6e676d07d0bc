"""Importance weights for training on what another policy sampled: how much each token's loss counts.

With d = log p_training - log p_rollout per token and the mask m:

| level     | raw weight of a token            | also called                                    |
|-----------|----------------------------------|------------------------------------------------|
| none      | 1                                | no correction                                  |
| token     | exp(d)                           | TIS                                            |
| sequence  | exp(sum of d over its row)       | sequence TIS; unbiased, explodes with length   |
| geometric | exp(mean of d over its row)      | length-invariant                               |

| action    | weight                           | mask                        | also called          |
|-----------|----------------------------------|-----------------------------|----------------------|
| keep      | w                                | m                           | -                    |
| truncate  | min(w, high)                     | m                           | TIS                  |
| clip      | min(max(w, low), high)           | m                           | CIS (slime)          |
| band      | w if low <= w <= high, else 0    | m: zeroed tokens stay in it | IcePop               |
| mask      | w                                | m and low <= w <= high      | MIS (slime)          |

Exponents are clamped to +-20; masked tokens weigh 0. Tensors are FP64 [B, T], masks bool [B, T]; nothing carries a
gradient. Sources: F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025);
verl `docs/algo/rollout_corr_math.md`; slime `examples/train_infer_mismatch_helper/mis.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8core.alignment.divergences import clamp_exponent
from fp8core.errors import UserError


def log_ratio(training: Tensor, rollout: Tensor, mask: Tensor) -> Tensor:
    """d = training - rollout in FP64, detached, 0 where masked; float [B, T] log-probs, bool [B, T] mask."""
    assert mask.dtype == torch.bool, f"mask is {mask.dtype}, not bool"
    assert training.shape == rollout.shape == mask.shape, "training, rollout and mask differ in shape"
    return torch.where(mask, training.detach().double() - rollout.detach().double(), 0.0)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the unmasked tokens of each row, [B, 1]; 0 for a row without any."""
    return torch.where(mask, values, 0.0).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp_min(1)


def unit_weights(d: Tensor, mask: Tensor) -> Tensor:
    """1, whatever d."""
    return mask.double()


def token_weights(d: Tensor, mask: Tensor) -> Tensor:
    """exp(d)."""
    return torch.where(mask, clamp_exponent(d).exp(), 0.0)


def sequence_weights(d: Tensor, mask: Tensor) -> Tensor:
    """exp(sum of d over the row) at each of its tokens."""
    total = torch.where(mask, d, 0.0).sum(dim=1, keepdim=True)
    return torch.where(mask, clamp_exponent(total).exp(), 0.0)


def geometric_weights(d: Tensor, mask: Tensor) -> Tensor:
    """exp(mean of d over the row) at each of its tokens."""
    return torch.where(mask, clamp_exponent(row_mean(d, mask)).exp(), 0.0)


LEVELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": unit_weights,
    "token": token_weights,
    "sequence": sequence_weights,
    "geometric": geometric_weights,
}


def _inside(w: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    return mask & (w >= low) & (w <= high)


def _truncate(w: Tensor, mask: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    return w.clamp(max=high), mask


def _clip(w: Tensor, mask: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    return torch.where(mask, w.clamp(low, high), 0.0), mask


def _band(w: Tensor, mask: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    return torch.where(_inside(w, mask, low, high), w, 0.0), mask


def _mask(w: Tensor, mask: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    inside = _inside(w, mask, low, high)
    return torch.where(inside, w, 0.0), inside


def _keep(w: Tensor, mask: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    return w, mask


ACTIONS: dict[str, Callable[[Tensor, Tensor, float, float], tuple[Tensor, Tensor]]] = {
    "keep": _keep,
    "truncate": _truncate,
    "clip": _clip,
    "band": _band,
    "mask": _mask,
}


@dataclass(frozen=True, kw_only=True)
class Weighting:
    """One line of each table: the level of the ratio, and what is done outside [low, high]."""

    level: str
    action: str
    low: float = 0.0
    high: float = math.inf

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise UserError(f"importance weight level {self.level!r} is not one of {', '.join(LEVELS)}")
        if self.action not in ACTIONS:
            raise UserError(f"importance weight action {self.action!r} is not one of {', '.join(ACTIONS)}")
        if not 0 <= self.low <= self.high or self.high == 0:
            raise UserError(f"importance weight bounds low={self.low}, high={self.high}: 0 <= low <= high, high > 0")

    def raw(self, d: Tensor, mask: Tensor) -> Tensor:
        """Weights of log-ratios `d` before the action."""
        return LEVELS[self.level](d, mask)

    def apply(self, raw: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Weights after the action, and the mask of the tokens that still count."""
        return ACTIONS[self.action](raw, mask, self.low, self.high)

    def out_of_bounds(self, raw: Tensor, mask: Tensor) -> Tensor:
        """Bool [B, T]: unmasked tokens whose raw weight lies outside [low, high]."""
        return mask & ~_inside(raw, mask, self.low, self.high)
