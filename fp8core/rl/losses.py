"""Policy losses of the GRPO family: per-token terms under one mask, one aggregation and one denominator.

Every loss is minimised, computed in FP64 and differentiable in `current` alone. The mask is the only authority on what
counts: a token it hides may hold NaN and has no gradient. The denominator counts the whole optimiser batch, so losses
and statistics of micro-batches add up. Rejected tokens add to the denominator alone: their terms are 0. Reference
penalty and entropy bonus cover all that the denominator counts, as in NeMo RL and in verl's bypass mode.

Ratios are r = exp(clamp(current - old, -20, 20)), the weight w comes from `fp8core.rl.correction`, A is the advantage.
In bypass mode pass the rollout's log-probs as `old`. Losses that clip nothing leave `clip` unread.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fp8core.rl.alignment_metrics import clamp_exponent, k3


@dataclass(frozen=True)
class Denominator:
    """Counts of the whole optimiser batch; counts of its parts add."""

    tokens: int
    sequences: int

    @classmethod
    def of(cls, mask: Tensor) -> "Denominator":
        return cls(tokens=int(mask.sum()), sequences=int(mask.any(dim=1).sum()))

    def __add__(self, other: "Denominator") -> "Denominator":
        return Denominator(self.tokens + other.tokens, self.sequences + other.sequences)


Aggregate = Callable[[Tensor, Tensor, Denominator], Tensor]
"""(terms [B, T], mask bool [B, T], denominator) -> scalar; 0 for an empty batch."""


def token_mean(terms: Tensor, mask: Tensor, denominator: Denominator) -> Tensor:
    """Every token weighs the same (DAPO, arXiv 2503.14476, eq. 12)."""
    return torch.where(mask, terms, 0.0).sum() / max(denominator.tokens, 1)


def sequence_mean_token_sum(terms: Tensor, mask: Tensor, denominator: Denominator) -> Tensor:
    """Sum over tokens / sequences: long sequences weigh more."""
    return torch.where(mask, terms, 0.0).sum() / max(denominator.sequences, 1)


def sequence_mean_token_mean(terms: Tensor, mask: Tensor, denominator: Denominator) -> Tensor:
    """Every sequence weighs the same (GRPO, arXiv 2402.03300, eq. 3)."""
    lengths = mask.sum(dim=1).clamp_min(1)
    return (torch.where(mask, terms, 0.0).sum(dim=1) / lengths).sum() / max(denominator.sequences, 1)


def constant_length(length: int) -> Aggregate:
    """Sum over tokens / (sequences * length), `length` a constant such as the generation budget (Dr. GRPO,
    arXiv 2503.20783, section 3.2; `seq-mean-token-sum-norm` in verl)."""
    return partial(_over_constant, length)


def _over_constant(length: int, terms: Tensor, mask: Tensor, denominator: Denominator) -> Tensor:
    return sequence_mean_token_sum(terms, mask, denominator) / length


AGGREGATIONS: dict[str, Aggregate] = {
    "token-mean": token_mean,
    "seq-mean-token-sum": sequence_mean_token_sum,
    "seq-mean-token-mean": sequence_mean_token_mean,
}
"""By the names of verl's `loss_agg_mode`."""


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """One micro-batch of B sequences, padded to T tokens.

    Attributes:
        current: log-probs under the policy being updated, float [B, T]; the gradient flows through it.
        old: those under the policy at the start of the step (the rollout's in bypass mode), float [B, T].
        advantages: float [B], or [B, T] when they differ by token.
        loss_mask: bool [B, T], tokens that the loss divides by (`Correction.loss_mask`).
        denominator: of the whole optimiser batch, of which this is a part.
        weights: importance weights, float [B, T]; None is 1 everywhere.
        accepted_mask: bool [B, T], tokens that were not rejected; None is all of `loss_mask`.
    """

    current: Tensor
    old: Tensor
    advantages: Tensor
    loss_mask: Tensor
    denominator: Denominator
    weights: Tensor | None = None
    accepted_mask: Tensor | None = None

    @property
    def active_mask(self) -> Tensor:
        """Bool [B, T]: tokens of `loss_mask` that were not rejected. They alone have terms and count in row means."""
        return self.loss_mask if self.accepted_mask is None else self.loss_mask & self.accepted_mask

    def __post_init__(self) -> None:
        shape = self.current.shape
        assert self.loss_mask.dtype == torch.bool, f"loss_mask is {self.loss_mask.dtype}, not bool"
        for name in ("old", "loss_mask", "weights", "accepted_mask"):
            tensor = getattr(self, name)
            assert tensor is None or tensor.shape == shape, f"{name} and current differ in shape"
        assert self.advantages.shape in (shape, shape[:1]), "advantages are neither [B] nor [B, T]"


@dataclass(frozen=True, kw_only=True)
class ClipRange:
    """Ratios between 1 - low and 1 + high are trusted; `dual` bounds the loss of negative advantages (None: not)."""

    low: float
    high: float
    dual: float | None = None

    def clip(self, ratio: Tensor) -> Tensor:
        return ratio.clamp(1 - self.low, 1 + self.high)


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """A differentiable loss and detached statistics, all scalars that add over micro-batches.

    Attributes:
        loss: the loss.
        clip_fraction: tokens whose gradient the clip removed, per token of the denominator.
        ratio_mean: mean ratio of the denominator's tokens; of rejected ones it is 1.
    """

    loss: Tensor
    clip_fraction: Tensor
    ratio_mean: Tensor


@dataclass(frozen=True)
class MaskedInputs:
    """FP64 [B, T], 0 at masked and rejected tokens, so that nothing there can leak; only `current` has a gradient."""

    current: Tensor
    old: Tensor
    advantages: Tensor
    weights: Tensor

    @classmethod
    def of(cls, inputs: LossInputs) -> "MaskedInputs":
        advantages = inputs.advantages if inputs.advantages.ndim == 2 else inputs.advantages[:, None]
        weights = torch.ones_like(inputs.old) if inputs.weights is None else inputs.weights
        sources = (inputs.current, inputs.old.detach(), advantages.detach(), weights.detach())
        return cls(*(torch.where(inputs.active_mask, values.double(), 0.0) for values in sources))

    @property
    def log_ratio(self) -> Tensor:
        return clamp_exponent(self.current - self.old)


def loss_output(
    inputs: LossInputs, terms: Tensor, aggregate: Aggregate, ratio: Tensor, clip_mask: Tensor | None = None
) -> LossOutput:
    """The loss of terms [B, T]; `clip_mask`: bool [B, T], tokens whose gradient the clip removed, or None."""
    mask = inputs.loss_mask
    tokens = max(inputs.denominator.tokens, 1)
    lost_gradients = torch.zeros_like(mask) if clip_mask is None else clip_mask & mask
    return LossOutput(
        loss=aggregate(terms, mask, inputs.denominator),
        clip_fraction=lost_gradients.sum().double() / tokens,
        ratio_mean=torch.where(mask, ratio.detach(), 0.0).sum() / tokens,
    )


def clipped_surrogate(inputs: LossInputs, clip: ClipRange, aggregate: Aggregate) -> LossOutput:
    """w * max(-A r, -A clip(r)): PPO (arXiv 1707.06347, eq. 7), GRPO (arXiv 2402.03300, eq. 3), with the asymmetric
    clip and the token mean of DAPO (arXiv 2503.14476, eq. 8). w multiplies after clipping (decoupled PPO,
    arXiv 2110.00641). Dual clip (arXiv 1912.09729): where A < 0, the term before w is at most -dual * A."""
    x = MaskedInputs.of(inputs)
    return _clipped_loss(inputs, clip, aggregate, x, x.log_ratio.exp())


def gspo(inputs: LossInputs, clip: ClipRange, aggregate: Aggregate) -> LossOutput:
    """The clipped surrogate with one ratio a row, s = exp(row mean of current - old) (GSPO, arXiv 2507.18071, eq. 5).

    Written per token as s * exp(current - sg(current)) (GSPO-token, eq. 13), sg = stop-gradient, so that advantages
    and weights may differ by token; the log-ratio is at most 10, as in verl.
    """
    x = MaskedInputs.of(inputs)
    lengths = inputs.active_mask.sum(dim=1, keepdim=True).clamp_min(1)
    log_s = (x.current - x.old).detach().sum(dim=1, keepdim=True) / lengths
    log_ratio = torch.where(inputs.active_mask, x.current - x.current.detach() + log_s, 0.0)
    return _clipped_loss(inputs, clip, aggregate, x, log_ratio.clamp(max=10).exp())


def _clipped_loss(
    inputs: LossInputs, clip: ClipRange, aggregate: Aggregate, x: MaskedInputs, ratio: Tensor
) -> LossOutput:
    raw_loss = -x.advantages * ratio
    clipped_loss = -x.advantages * clip.clip(ratio)
    constant = clipped_loss > raw_loss
    # Of equal ones the raw one: the gradient of `clamp` at a bound is 1 or 0, by version of torch.
    terms = torch.where(constant, clipped_loss, raw_loss)
    if clip.dual is not None:
        ceiling = -clip.dual * x.advantages
        above = (x.advantages < 0) & (terms > ceiling)
        terms = torch.where(above, ceiling, terms)
        constant = constant | above
    return loss_output(inputs, x.weights * terms, aggregate, ratio, constant)


def cispo(inputs: LossInputs, clip: ClipRange, aggregate: Aggregate) -> LossOutput:
    """-w sg(clip(r)) A current: the ratio is clipped, no token's gradient is (CISPO, arXiv 2506.13585, eq. 4 and 5)."""
    x = MaskedInputs.of(inputs)
    ratio = x.log_ratio.exp().detach()
    clipped_ratio = clip.clip(ratio)
    return loss_output(
        inputs, -x.weights * clipped_ratio * x.advantages * x.current, aggregate, ratio, clipped_ratio != ratio
    )


def reinforce(inputs: LossInputs, clip: ClipRange, aggregate: Aggregate) -> LossOutput:
    """-w A current (REINFORCE; Sutton and Barto, 2nd edition, eq. 13.8, with importance weights without gradient)."""
    x = MaskedInputs.of(inputs)
    return loss_output(inputs, -x.weights * x.advantages * x.current, aggregate, x.log_ratio.exp())


def binary_tv(inputs: LossInputs, clip: ClipRange, aggregate: Aggregate) -> LossOutput:
    """-w A r + 0.001 (log r)^2, without the first term where the probability itself has moved more than 0.2 in A's
    direction (prime-rl, `src/prime_rl/trainer/rl/loss.py`). There `old` is the rollout policy."""
    x = MaskedInputs.of(inputs)
    ratio = x.log_ratio.exp()
    shift = (x.current.exp() - x.old.exp()).detach()
    trust_mask = torch.where(x.advantages > 0, shift <= 0.2, shift >= -0.2)
    terms = torch.where(trust_mask, -x.weights * x.advantages * ratio, 0.0) + 1e-3 * x.log_ratio.square()
    return loss_output(inputs, terms, aggregate, ratio, ~trust_mask)


def reference_penalty(
    current: Tensor, reference: Tensor, mask: Tensor, denominator: Denominator, aggregate: Aggregate = token_mean
) -> Tensor:
    """Aggregated k3 estimate of KL(current || reference), an FP64 scalar, differentiable in `current` (GRPO,
    arXiv 2402.03300, eq. 4).

    `current`, `reference`: log-probs, float [B, T]. Their difference is clamped to +-20 and the estimate to +-10, as in
    NeMo RL (`calculate_kl` of nemo_rl/algorithms/utils.py). A token beyond a bound has no gradient.
    """
    d = torch.where(mask, reference.detach().double() - current.double(), 0.0)
    return aggregate(k3(clamp_exponent(d)).clamp(-10.0, 10.0), mask, denominator)
