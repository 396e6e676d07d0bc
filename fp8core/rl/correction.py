"""Correction of the mismatch between the policy that sampled and the policy that trains.

Per token d = log p_training - log p_rollout. Importance weights say how much each token's loss counts. Filters and a
veto reject tokens and rows that are too far from the rollout policy. docs/reference/numerics.md has their names.
Exponents are clamped to +-20; masked tokens weigh 0. Tensors are FP64 [B, T], masks bool [B, T], without gradient.

- Decoupled (three policies): training = old log-probs; the loss is clipped on current - old and multiplied by weights.
  The rule is applied once to the whole optimiser batch, before that is split into micro-batches.
- Bypass (two policies): training = current log-probs; either the clipped surrogate with old := rollout and no weights
  (they would count twice), or `reinforce` with weights. The rule is applied anew at every update, to the rows of a
  micro-batch. So it can neither normalise nor count the tokens that will be left.

Veto, filters and weights each look at all unmasked tokens. Then rejected tokens weigh 0, and weights are divided by the
mean of what was kept.

Sources: F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025); verl
`docs/algo/rollout_corr_math.md`; slime `examples/train_infer_mismatch_helper/mis.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from torch import Tensor

from fp8core.config.section import suggestion
from fp8core.config.training import CorrectionConfig, FilterConfig, WeightingConfig
from fp8core.errors import UserError
from fp8core.metric import Metric
from fp8core.rl.alignment_metrics import clamp_exponent, k1, k2, k3

METRICS = (
    Metric("correction/masked_fraction", "tokens that the correction rejected"),
    Metric("correction/seq_masked_fraction", "rows with a token that the correction rejected"),
    Metric("correction/oob_ratio", "tokens with a raw weight outside the bounds. *Rises: the mismatch rises.*"),
    Metric("correction/veto_fraction", "rows that a veto rejected"),
    Metric("correction/catastrophic_token_fraction", "tokens that caused a veto"),
    Metric("correction/batch_norm_factor", "divisor of the weights (`correction.normalise`); 1 without"),
)
"""Of `correct`, there without `correction/`."""


def log_ratio(training: Tensor, rollout: Tensor, mask: Tensor) -> Tensor:
    """d = training - rollout in FP64, detached, 0 where masked."""
    assert mask.dtype == torch.bool, f"mask is {mask.dtype}, not bool"
    assert training.shape == rollout.shape == mask.shape, "training, rollout and mask differ in shape"
    return torch.where(mask, training.detach().double() - rollout.detach().double(), 0.0)


def _row_sum(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum(dim=1, keepdim=True)


def _row_mean(values: Tensor, mask: Tensor) -> Tensor:
    return _row_sum(values, mask) / mask.sum(dim=1, keepdim=True).clamp_min(1)


_LEVELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda d, mask: torch.zeros_like(d),
    "token": lambda d, mask: d,
    "sequence": _row_sum,
}
"""The logarithm of a token's raw weight, [B, T] or one a row [B, 1]."""


_STATISTICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda values, mask: values,
    "seq_sum": _row_sum,
    "seq_mean": _row_mean,
}
_DIVERGENCES: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def passes(test: FilterConfig, d: Tensor, mask: Tensor) -> Tensor:
    """Unmasked tokens that pass a filter; a row's test decides for all of its tokens.

    A filter bounds a statistic of a divergence, of a token or of a row's tokens. For k1 its bounds are on
    rho = p_training / p_rollout, as in papers. That is exp(-k1) of a token, or its product or geometric mean over the
    row. verl tests 1/rho instead (pull request 6377). For k2 and k3 `high` bounds the statistic.
    """
    level, divergence = test.name.rsplit("_", 1)
    statistic = _STATISTICS[level](_DIVERGENCES[divergence](clamp_exponent(d)), mask)
    if test.bounds_ratio:
        return mask & (-statistic >= math.log(test.low)) & (-statistic <= math.log(test.high))
    return mask & (statistic <= test.high)


@dataclass(frozen=True, kw_only=True)
class Correction:
    """The effect of a rule on a batch.

    Attributes:
        weights: [B, T] in the dtype of the training log-probs; 0 where `mask` is false.
        accepted_mask: bool [B, T], unmasked tokens that were not rejected.
        loss_mask: bool [B, T], tokens that a loss divides by.
        metrics: shares of the unmasked tokens, or of their rows.
    """

    weights: Tensor
    accepted_mask: Tensor
    loss_mask: Tensor
    metrics: dict[str, float]

    @property
    def row_mask(self) -> Tensor:
        """Bool [B]: rows with an accepted token."""
        return self.accepted_mask.any(dim=1)


def correct(rule: CorrectionConfig, training: Tensor, rollout: Tensor, mask: Tensor) -> Correction:
    """Apply a rule (`presets.correction_rule`) to a whole optimiser batch, or, if it does not normalise, to any rows.

    `training`, `rollout`: log-probs of the sampled tokens, float [B, T]; any values where masked.
    """
    d = log_ratio(training, rollout, mask)
    # d is not clamped here.
    catastrophic = torch.zeros_like(mask) if rule.veto is None else mask & (d < math.log(rule.veto))
    vetoed_rows = catastrophic.any(dim=1)
    accepted_mask = mask & ~vetoed_rows[:, None]
    for test in rule.filters:
        accepted_mask = accepted_mask & passes(test, d, mask)
    weights = raw = torch.where(mask, clamp_exponent(_LEVELS[rule.weighting.level](d, mask)).exp(), 0.0)
    inside = mask & (raw >= rule.weighting.low) & (raw <= rule.weighting.high)
    match rule.weighting.action:
        case "truncate":
            weights = raw.clamp(max=rule.weighting.high)
        case "clip":
            weights = raw.clamp(rule.weighting.low, rule.weighting.high)
        case "band":
            weights = torch.where(inside, raw, 0.0)
        case "mask":
            accepted_mask = accepted_mask & inside
    weights = torch.where(accepted_mask, weights, 0.0)
    factor = float(weights.sum() / accepted_mask.sum().clamp_min(1)) if rule.normalise == "token" else 1.0
    # Weights whose mean is practically 0 are left as they are (verl's bound).
    factor = factor if factor > 1e-8 else 1.0
    metrics = {
        "masked_fraction": _share(mask & ~accepted_mask, mask),
        "seq_masked_fraction": _share((mask & ~accepted_mask).any(dim=1), mask.any(dim=1)),
        "oob_ratio": _share(mask & ~inside, mask),
        "batch_norm_factor": factor,
        "veto_fraction": _share(vetoed_rows, mask.any(dim=1)),
        "catastrophic_token_fraction": _share(catastrophic, mask),
    }
    return Correction(
        weights=(weights / factor).to(training.dtype),
        accepted_mask=accepted_mask,
        loss_mask=accepted_mask if rule.divides_by == "kept" else mask,
        metrics=metrics,
    )


def _share(part: Tensor, whole: Tensor) -> float:
    return int(part.sum()) / max(int(whole.sum()), 1)


_RULES = yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text("utf-8"))
PRESETS = {name: CorrectionConfig(method="custom", **rule) for name, rule in _RULES.items()}


def correction_rule(config: CorrectionConfig) -> CorrectionConfig:
    """Any configured correction as one of `method: custom`. Raises UserError: an unknown preset."""
    match config.method:
        case "none":
            return PRESETS["none"]
        case "token_tis":
            weighting = WeightingConfig(level="token", action="truncate", high=config.cap)
            return CorrectionConfig(method="custom", weighting=weighting)
        case "preset":
            assert config.preset is not None, "CorrectionConfig demands a name"
            if config.preset not in PRESETS:
                raise UserError(f"correction.preset: no preset {config.preset!r}; {suggestion(config.preset, PRESETS)}")
            return PRESETS[config.preset]
        case "custom":
            return config
