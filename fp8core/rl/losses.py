"""Policy losses of the GRPO family: per-token terms under one mask, one aggregation and one denominator.

Every loss is minimised, computed in FP64 and differentiable in `current` alone. The mask is the only authority on
what counts: a token it hides may hold NaN and has no gradient. The denominator counts the whole optimiser batch
after rejection, so micro-batch losses and statistics add up to those of the batch, in every mode of correction.

Ratios are r = exp(clamp(current - old, -20, 20)), the weight w comes from `fp8core.rl.correction`, A is the
advantage. In bypass mode pass the rollout's log-probs as `old`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8core.alignment.divergences import clamp_exponent
from fp8core.rl.aggregation import Aggregate, Denominator, sequence_mean_token_mean, token_mean


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """One micro-batch of B sequences, padded to T tokens."""

    current: Tensor
    """Log-probs under the policy being updated, float [B, T]; the gradient flows through it."""
    old: Tensor
    """Log-probs under the policy at the start of the step (the rollout's in bypass mode), float [B, T]."""
    advantages: Tensor
    """Float [B], or [B, T] when they differ by token."""
    mask: Tensor
    """Bool [B, T]: tokens that the policy wrote and no filter rejected."""
    denominator: Denominator
    """Counts of the whole optimiser batch, of which this is a part."""
    weights: Tensor | None = None
    """Importance weights, float [B, T]; null is 1 everywhere."""

    def __post_init__(self) -> None:
        shape = self.current.shape
        assert self.mask.dtype == torch.bool, f"mask is {self.mask.dtype}, not bool"
        assert self.old.shape == self.mask.shape == shape, "current, old and mask differ in shape"
        assert self.weights is None or self.weights.shape == shape, "weights and current differ in shape"
        assert self.advantages.shape in (shape, shape[:1]), "advantages are neither [B] nor [B, T]"


@dataclass(frozen=True, kw_only=True)
class ClipRange:
    """Ratios between 1 - low and 1 + high are trusted; `dual` bounds the loss of negative advantages (null: not)."""

    low: float
    high: float
    dual: float | None = None

    def __post_init__(self) -> None:
        if self.dual is not None and not self.dual > 1:
            raise ValueError(f"dual={self.dual}: the dual-clip constant must be above 1")

    def clip(self, ratio: Tensor) -> Tensor:
        """The ratio limited to the trusted range."""
        return ratio.clamp(1 - self.low, 1 + self.high)


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """A differentiable loss and detached statistics, all scalars; all but the extremes add over micro-batches."""

    loss: Tensor
    clip_fraction: Tensor
    """Tokens whose gradient the clip removed, per token of the denominator."""
    dual_clip_fraction: Tensor
    """Tokens whose loss the dual clip bounded, per token of the denominator."""
    ratio_mean: Tensor
    ratio_min: Tensor
    ratio_max: Tensor


def clipped_surrogate(inputs: LossInputs, clip: ClipRange, aggregate: Aggregate = token_mean) -> LossOutput:
    """w * max(-A r, -A clip(r)): PPO (arXiv 1707.06347, eq. 7), GRPO (arXiv 2402.03300, eq. 3), with the asymmetric
    clip and the token mean of DAPO (arXiv 2503.14476, eq. 8). w multiplies after clipping (decoupled PPO,
    arXiv 2110.00641). Dual clip (arXiv 1912.09729): where A < 0, the term before w is at most -dual * A."""
    x = _selected(inputs)
    return _clipped(inputs, clip, aggregate, x, clamp_exponent(x.current - x.old).exp())


def gspo(inputs: LossInputs, clip: ClipRange, aggregate: Aggregate = sequence_mean_token_mean) -> LossOutput:
    """The clipped surrogate with one ratio a row, s = exp(row mean of current - old) (GSPO, arXiv 2507.18071, eq. 5).

    Written per token as s * exp(current - sg(current)) (GSPO-token, eq. 13), sg = stop-gradient, so that advantages
    and weights may differ by token; the log-ratio is at most 10, as in verl.
    """
    x = _selected(inputs)
    lengths = inputs.mask.sum(dim=1, keepdim=True).clamp_min(1)
    log_s = (x.current - x.old).detach().sum(dim=1, keepdim=True) / lengths
    log_ratio = torch.where(inputs.mask, x.current - x.current.detach() + log_s, 0.0)
    return _clipped(inputs, clip, aggregate, x, log_ratio.clamp(max=10).exp())


def cispo(inputs: LossInputs, clip: ClipRange, aggregate: Aggregate = token_mean) -> LossOutput:
    """-w sg(clip(r)) A current: the ratio is clipped, no token's gradient is (CISPO, arXiv 2506.13585, eq. 4 and 5)."""
    x = _selected(inputs)
    ratio = clamp_exponent(x.current - x.old).exp().detach()
    clipped = clip.clip(ratio)
    loss = aggregate(-x.weights * clipped * x.advantages * x.current, inputs.mask, inputs.denominator)
    return _output(inputs, loss, ratio, clipped != ratio)


def reinforce(inputs: LossInputs, aggregate: Aggregate = token_mean) -> LossOutput:
    """-w A current (REINFORCE; Sutton and Barto, 2nd edition, eq. 13.8, with importance weights).

    In bypass mode w is the truncated ratio current / rollout. It carries no gradient: with one, a bias proportional
    to current * grad(w) would be added.
    """
    x = _selected(inputs)
    ratio = clamp_exponent(x.current - x.old).exp().detach()
    loss = aggregate(-x.weights * x.advantages * x.current, inputs.mask, inputs.denominator)
    return _output(inputs, loss, ratio, torch.zeros_like(inputs.mask))


def binary_tv(
    inputs: LossInputs, bound: float = 0.2, penalty: float = 1e-3, aggregate: Aggregate = token_mean
) -> LossOutput:
    """-w A r + penalty * (log r)^2, without the first term where the probability itself has moved more than `bound` in
    the direction of A (prime-rl, `src/prime_rl/trainer/rl/loss.py`). There `old` is the rollout policy.
    """
    x = _selected(inputs)
    log_ratio = clamp_exponent(x.current - x.old)
    ratio = log_ratio.exp()
    moved = (x.current.exp() - x.old.exp()).detach()
    trusted = torch.where(x.advantages > 0, moved <= bound, moved >= -bound)
    terms = torch.where(trusted, -x.weights * x.advantages * ratio, 0.0) + penalty * log_ratio.square()
    return _output(inputs, aggregate(terms, inputs.mask, inputs.denominator), ratio, ~trusted)


@dataclass(frozen=True)
class _Selected:
    """FP64 [B, T] with zeros at masked tokens, so that nothing there can leak; only `current` has a gradient."""

    current: Tensor
    old: Tensor
    advantages: Tensor
    weights: Tensor


def _selected(inputs: LossInputs) -> _Selected:
    advantages = inputs.advantages if inputs.advantages.ndim == 2 else inputs.advantages[:, None]
    weights = torch.ones_like(inputs.old) if inputs.weights is None else inputs.weights
    sources = (inputs.current, inputs.old.detach(), advantages.detach(), weights.detach())
    return _Selected(*(torch.where(inputs.mask, values.double(), 0.0) for values in sources))


def _clipped(inputs: LossInputs, clip: ClipRange, aggregate: Aggregate, x: _Selected, ratio: Tensor) -> LossOutput:
    unclipped, clipped = -x.advantages * ratio, -x.advantages * clip.clip(ratio)
    terms = torch.maximum(unclipped, clipped)
    bounded = torch.zeros_like(inputs.mask)
    if clip.dual is not None:
        ceiling = -clip.dual * x.advantages
        bounded = (x.advantages < 0) & (terms > ceiling)
        terms = torch.where(bounded, ceiling, terms)
    loss = aggregate(x.weights * terms, inputs.mask, inputs.denominator)
    return _output(inputs, loss, ratio, clipped > unclipped, bounded)


def _output(
    inputs: LossInputs, loss: Tensor, ratio: Tensor, clipped: Tensor, bounded: Tensor | None = None
) -> LossOutput:
    mask, tokens = inputs.mask, max(inputs.denominator.tokens, 1)
    ratio = ratio.detach()
    return LossOutput(
        loss=loss,
        clip_fraction=(clipped & mask).sum().double() / tokens,
        dual_clip_fraction=loss.new_zeros(()) if bounded is None else (bounded & mask).sum().double() / tokens,
        ratio_mean=torch.where(mask, ratio, 0.0).sum() / tokens,
        ratio_min=torch.where(mask, ratio, torch.inf).min(),
        ratio_max=torch.where(mask, ratio, -torch.inf).max(),
    )
