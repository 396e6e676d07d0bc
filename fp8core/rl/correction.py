"""Correction of the mismatch between the policy that sampled and the policy that trains.

Per token d = log p_training - log p_rollout. Importance weights say how much each token's loss counts. Filters and a
veto reject tokens and rows that are too far from the rollout policy. docs/reference/numerics.md has their names.
Exponents are clamped to +-20; masked tokens weigh 0. Tensors are FP64 [B, T], masks bool [B, T], without gradient.

- Decoupled (three policies): training = old log-probs; the loss is clipped on current - old and multiplied by weights.
  The rule is applied once to the whole optimiser batch, before that is split into micro-batches.
- Bypass (two policies): training = current log-probs; either the clipped surrogate with old := rollout and no weights
  (they would count twice), or `reinforce` with weights. The rule is applied anew at every update, to the rows of a
  micro-batch. So it can neither normalise nor count the tokens that will be left.

Order: veto, filters, clamp exponents, raw weights, action, zero rejected tokens, divide by the mean weight of what was
kept or (`normalise_over`, slime) of all. With `order="joint"` each of these looks at all unmasked tokens; with
`in_turn` (SkyRL) at what those before it left.

Sources: F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025); verl
`docs/algo/rollout_corr_math.md`; slime `examples/train_infer_mismatch_helper/mis.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fp8core.config.section import suggestion
from fp8core.errors import UserError
from fp8core.rl.alignment_metrics import clamp_exponent, k1, k2, k3


def log_ratio(training: Tensor, rollout: Tensor, mask: Tensor) -> Tensor:
    """d = training - rollout in FP64, detached, 0 where masked."""
    assert mask.dtype == torch.bool, f"mask is {mask.dtype}, not bool"
    assert training.shape == rollout.shape == mask.shape, "training, rollout and mask differ in shape"
    return torch.where(mask, training.detach().double() - rollout.detach().double(), 0.0)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """[B, 1]; 0 for a row without unmasked tokens."""
    return torch.where(mask, values, 0.0).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp_min(1)


def _row_sum(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum(dim=1, keepdim=True)


LEVELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda d, mask: torch.zeros_like(d),
    "token": lambda d, mask: d,
    "sequence": _row_sum,
    "geometric": row_mean,
}
"""The logarithm of a token's raw weight, [B, T] or one a row [B, 1]."""


def _inside(w: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    return mask & (w >= low) & (w <= high)


ACTIONS: dict[str, Callable[[Tensor, Tensor, float, float], tuple[Tensor, Tensor]]] = {
    "keep": lambda w, mask, low, high: (w, mask),
    "truncate": lambda w, mask, low, high: (w.clamp(max=high), mask),
    "clip": lambda w, mask, low, high: (torch.where(mask, w.clamp(low, high), 0.0), mask),
    "band": lambda w, mask, low, high: (torch.where(_inside(w, mask, low, high), w, 0.0), mask),
    "mask": lambda w, mask, low, high: (w, _inside(w, mask, low, high)),
}


@dataclass(frozen=True, kw_only=True)
class Weighting:
    """The level of the ratio, one of `LEVELS`, and what is done outside [low, high], one of `ACTIONS`."""

    level: str
    action: str
    low: float = 0.0
    high: float = math.inf

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise UserError(f"correction.weighting: low={self.low} is above high={self.high}")

    def raw(self, d: Tensor, mask: Tensor, seen: Tensor | None = None) -> Tensor:
        """Weights of log-ratios before the action; a row's is that of its tokens in `seen`, or None: in `mask`."""
        logarithms = LEVELS[self.level](d, mask if seen is None else seen)
        return torch.where(mask, clamp_exponent(logarithms).exp(), 0.0)

    def apply(self, raw: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Weights after the action, and the mask of the tokens that still count."""
        return ACTIONS[self.action](raw, mask, self.low, self.high)

    def out_of_bounds(self, raw: Tensor, mask: Tensor) -> Tensor:
        return mask & ~_inside(raw, mask, self.low, self.high)


_STATISTICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda values, mask: values,
    "seq_sum": _row_sum,
    "seq_mean": row_mean,
    # Only for divergences that are never negative: an empty row has 0.
    "seq_max": lambda values, mask: torch.where(mask, values, 0.0).amax(dim=1, keepdim=True),
}
_DIVERGENCES: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}

FILTERS: tuple[str, ...] = tuple(
    f"{statistic}_{divergence}"
    for statistic in _STATISTICS
    for divergence in _DIVERGENCES
    if (statistic, divergence) != ("seq_max", "k1")
)


@dataclass(frozen=True, kw_only=True)
class Filter:
    """A statistic of the divergence k1 = -d, k2 = d^2/2 or k3 = exp(d) - 1 - d, of a token or of a row's tokens.

    For k1 `low` and `high` bound rho = p_training / p_rollout, as papers state it. rho is exp(-k1) of a token, or its
    product or geometric mean over the row. verl tests 1/rho instead (pull request 6377). For k2 and k3 `high` bounds
    the statistic. `clamp="row"` (SkyRL, slime) clamps the sum or mean of k1 to +-20, and not each d.
    """

    name: str
    low: float = 0.0
    high: float
    clamp: str = "token"

    def __post_init__(self) -> None:
        if self.name not in FILTERS:
            raise UserError(f"correction.filters: no filter {self.name!r}; {suggestion(self.name, FILTERS)}")
        place = f"correction.filters: {self.name}"
        if self.clamp == "row" and not self.bounds_ratio:
            raise UserError(f"{place}: clamp=row is for k1")
        if self.bounds_ratio and not 0 < self.low <= self.high:
            raise UserError(f"{place}: low={self.low}, high={self.high}: set low above 0, and not above high")
        if not self.bounds_ratio and self.low != 0:
            raise UserError(f"{place}: low={self.low}: it takes an upper bound alone")

    @property
    def bounds_ratio(self) -> bool:
        return self.name.endswith("_k1")

    def passes(self, d: Tensor, mask: Tensor) -> Tensor:
        """Unmasked tokens that pass; a row's test decides for all of its tokens."""
        level, divergence = self.name.rsplit("_", 1)
        clamped = clamp_exponent(d) if self.clamp == "token" else d
        statistic = _STATISTICS[level](_DIVERGENCES[divergence](clamped), mask)
        if self.bounds_ratio:
            log_rho = clamp_exponent(-statistic) if self.clamp == "row" else -statistic
            return mask & (log_rho >= math.log(self.low)) & (log_rho <= math.log(self.high))
        return mask & (statistic <= self.high)


@dataclass(frozen=True, kw_only=True)
class Veto:
    """Rejects a row for one catastrophic token: rho below `low` or above `high`. d is not clamped here.

    One-sided (`high` infinite) it is slime's `rs_veto_threshold`; two-sided, SkyRL's outlier-token mask.
    """

    low: float
    high: float = math.inf

    def catastrophic(self, d: Tensor, mask: Tensor) -> Tensor:
        return mask & ((d < math.log(self.low)) | (d > math.log(self.high)))


def row_errors(d: Tensor, mask: Tensor) -> Tensor:
    """FP64 [B]: mean of exp(|d|) over the unmasked tokens of each row, 0 for a row without any.

    NeMo RL's `seq_mult_prob_error` (`compute_and_apply_seq_logprob_error_masking`); exponents are clamped to +-20.
    """
    return row_mean(clamp_exponent(d).abs().exp(), mask).squeeze(1)


def row_error_metrics(errors: Tensor, rows: Tensor, kept: Tensor, rewards: Tensor) -> dict[str, float]:
    """The effect of a bound on `row_errors`, by NeMo RL's names; extremes and the mean are 0 when no row was kept.

    `rows`: bool [B], rows with a token that were in the loss before; `kept`: those that still are; `rewards`: [B].
    """
    left, masked = errors[kept], rows & ~kept
    correct = rewards[masked] == 1
    return {
        "max_seq_mult_prob_error_after_mask": float(left.max()) if len(left) else 0.0,
        "mean_seq_mult_prob_error_after_mask": float(left.mean()) if len(left) else 0.0,
        "min_seq_mult_prob_error_after_mask": float(left.min()) if len(left) else 0.0,
        "num_masked_seqs_by_logprob_error": float(masked.sum()),
        "masked_correct_pct": float(correct.double().mean()) if len(correct) else 0.0,
    }


def off_policy_rows(current: Tensor, rollout: Tensor, advantages: Tensor, mask: Tensor, delta: float) -> Tensor:
    """Bool [B, T]: tokens of negative advantage in rows whose mean of log p_rollout - log p_current exceeds `delta`.

    DeepSeek-V3.2 (arXiv 2512.02556); slime `slime/utils/ppo_utils.py`, `compute_opsm_mask`; TRL
    `off_policy_mask_threshold`. `advantages`: float [B] or [B, T].
    """
    a = advantages if advantages.ndim == 2 else advantages[:, None]
    distance = row_mean(-log_ratio(current, rollout, mask), mask)
    return mask & (a < 0) & (distance > delta)


NORMALISATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda weights, mask: torch.ones(()),
    "token": lambda weights, mask: torch.where(mask, weights, 0.0).sum() / mask.sum().clamp_min(1),
    "sequence": lambda weights, mask: row_mean(weights, mask).sum() / mask.any(dim=1).sum().clamp_min(1),
}
"""The mean that weights are divided by."""


@dataclass(frozen=True, kw_only=True)
class CorrectionRule:
    """The default only measures.

    Rejected tokens leave the `denominator` of the loss (`kept`, as in verl). Or they stay in it with weight 0 (`all`,
    as in NeMo RL, slime, SkyRL and verl's bypass mode).
    """

    weighting: Weighting = field(default_factory=lambda: Weighting(level="none", action="keep"))
    filters: tuple[Filter, ...] = ()
    veto: Veto | None = None
    normalise: str = "none"
    normalise_over: Literal["kept", "all"] = "kept"
    denominator: Literal["kept", "all"] = "kept"
    order: Literal["joint", "in_turn"] = "joint"

    @property
    def cap(self) -> float:
        """The bound of truncated token weights, for metrics of them; 2 where the rule has none."""
        truncates = self.weighting.level == "token" and self.weighting.action in ("truncate", "clip")
        return self.weighting.high if truncates and 1 <= self.weighting.high < math.inf else 2.0

    @property
    def rejects(self) -> bool:
        return bool(self.filters) or self.veto is not None or self.weighting.action == "mask"


@dataclass(frozen=True, kw_only=True)
class Correction:
    """The effect of a rule on a batch.

    Attributes:
        weights: [B, T] in the dtype of the training log-probs; 0 where `mask` is false.
        mask: unmasked tokens that were not rejected.
        counted: tokens that a loss divides by.
        metrics: shares of the unmasked tokens, or of their rows.
    """

    weights: Tensor
    mask: Tensor
    counted: Tensor
    metrics: dict[str, float]

    @property
    def keep(self) -> Tensor:
        """Bool [B]: rows with a remaining token."""
        return self.mask.any(dim=1)


def correct(rule: CorrectionRule, training: Tensor, rollout: Tensor, mask: Tensor) -> Correction:
    """Apply a rule to a whole optimiser batch, or, if it does not normalise, to any rows of it.

    `training`, `rollout`: log-probs of the sampled tokens, float [B, T]; any values where masked.
    """
    d = log_ratio(training, rollout, mask)
    catastrophic = rule.veto.catastrophic(d, mask) if rule.veto else torch.zeros_like(mask)
    vetoed = catastrophic.any(dim=1)
    kept = mask & ~vetoed[:, None]
    for test in rule.filters:
        kept = kept & test.passes(d, kept if rule.order == "in_turn" else mask)
    seen = kept if rule.order == "in_turn" else mask
    # Rejected tokens have the weight here that they would have if they were kept: a mean over all takes it.
    raw = rule.weighting.raw(d, mask, torch.where(seen.any(dim=1, keepdim=True), seen, mask))
    weights, inside = rule.weighting.apply(raw, mask)
    kept = kept & inside
    factor = float(NORMALISATIONS[rule.normalise](weights, kept if rule.normalise_over == "kept" else mask))
    # Weights whose mean is practically 0 are left as they are (verl's bound).
    factor = factor if factor > 1e-8 else 1.0
    weights = torch.where(kept, weights, 0.0)
    metrics = {
        "masked_fraction": _share(mask & ~kept, mask),
        "seq_masked_fraction": _share((mask & ~kept).any(dim=1), mask.any(dim=1)),
        "oob_ratio": _share(rule.weighting.out_of_bounds(raw, seen), mask),
        "batch_norm_factor": factor,
        "veto_fraction": _share(vetoed, mask.any(dim=1)),
        "catastrophic_token_fraction": _share(catastrophic, mask),
    }
    counted = kept if rule.denominator == "kept" else mask
    return Correction(weights=(weights / factor).to(training.dtype), mask=kept, counted=counted, metrics=metrics)


def _share(part: Tensor, whole: Tensor) -> float:
    return int(part.sum()) / max(int(whole.sum()), 1)
