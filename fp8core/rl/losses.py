"""Policy losses of the GRPO family: per-token terms under one mask, one aggregation and one denominator.

Every loss is minimised, computed in FP64 and differentiable in `current` alone. The mask is the only authority on
what counts: a token it hides may hold NaN and has no gradient. The denominator counts the whole optimiser batch,
after rejection or (`CorrectionRule.denominator`) with rejected tokens. In a policy loss rejected tokens add to the
denominator alone: their terms are 0. No mean of ratios over a row, no selection and no gradient has them; a mean of
terms over a row counts them. Reference penalty and entropy bonus cover all that the denominator counts, as in NeMo RL
and in verl's bypass mode. So micro-batch losses and statistics add up to those of the batch, in every mode of
correction.

Ratios are r = exp(clamp(current - old, -20, 20)), the weight w comes from `fp8core.rl.correction`, A is the
advantage. In bypass mode pass the rollout's log-probs as `old`.

All policy losses have the arguments of `clipped_surrogate`, and after them the options of their own. Those that clip
nothing leave `clip` unread.

Five aggregations go from terms to one scalar. Their denominator counts the tokens and non-empty sequences of the whole
optimiser batch. An aggregation of an empty batch is 0.

`reference_penalty` keeps the policy near a frozen reference policy. Let d = log p_reference - log p_current at tokens
sampled from (about) the current policy. The per-token estimates of KL(current || reference) are k1 = -d, k2 = d^2/2 and
k3 = exp(d) - 1 - d (GRPO, arXiv 2402.03300, eq. 4). As losses they differ from what they estimate, for on-policy
tokens:

| estimate | value           | expected gradient                                 |
|----------|-----------------|---------------------------------------------------|
| k1       | unbiased        | zero: it does not pull at all                     |
| k2       | biased          | that of KL(current || reference)                  |
| k3       | unbiased, >= 0  | that of KL(reference || current), bounded pull up |

The derivative of an estimate alone leaves out that the policy also moves what is sampled. The remedy is a factor, the
ratio current / behaviour of the sampled token (`behaviour` of `reference_penalty`). Each estimate that is unbiased as a
value then has the gradient of KL(current || reference). Sources: arXiv 2506.09477; NeMo RL,
nemo_rl/algorithms/loss/loss_functions.py and `calculate_kl` of nemo_rl/algorithms/utils.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fp8core.rl.alignment_metrics import clamp_exponent, k1, k2, k3


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
"""(terms [B, T], mask bool [B, T], denominator) -> scalar."""


def token_mean(terms: Tensor, mask: Tensor, denominator: Denominator) -> Tensor:
    """Sum over tokens / tokens: every token weighs the same (DAPO, arXiv 2503.14476, eq. 12)."""
    return token_sum(terms, mask, denominator) / max(denominator.tokens, 1)


def token_sum(terms: Tensor, mask: Tensor, denominator: Denominator) -> Tensor:
    return torch.where(mask, terms, 0.0).sum()


def sequence_mean_token_sum(terms: Tensor, mask: Tensor, denominator: Denominator) -> Tensor:
    """Sum over tokens / sequences: long sequences weigh more."""
    return token_sum(terms, mask, denominator) / max(denominator.sequences, 1)


def sequence_mean_token_mean(terms: Tensor, mask: Tensor, denominator: Denominator) -> Tensor:
    """Mean over sequences of their token means: every sequence weighs the same (GRPO, arXiv 2402.03300, eq. 3)."""
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
    "token-sum": token_sum,
    "seq-mean-token-sum": sequence_mean_token_sum,
    "seq-mean-token-mean": sequence_mean_token_mean,
}
"""By the names of verl's `loss_agg_mode`."""


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
    """Bool [B, T]: tokens that the policy wrote and that the loss divides by (`Correction.counted`)."""
    denominator: Denominator
    """Counts of the whole optimiser batch, of which this is a part."""
    weights: Tensor | None = None
    """Importance weights, float [B, T]; null is 1 everywhere."""
    selected: Tensor | None = None
    """Bool [B, T]: tokens that a loss singles out of its whole minibatch (`clip_cov_selection`, `kl_cov_selection`)."""
    kept: Tensor | None = None
    """Bool [B, T]: tokens that were not rejected (`Correction.mask`); null is all of `mask`."""

    @property
    def learnt(self) -> Tensor:
        """Bool [B, T]: tokens of `mask` that were not rejected, which alone have terms and parts in row means."""
        return self.mask if self.kept is None else self.mask & self.kept

    def __post_init__(self) -> None:
        shape = self.current.shape
        assert self.mask.dtype == torch.bool, f"mask is {self.mask.dtype}, not bool"
        assert self.old.shape == self.mask.shape == shape, "current, old and mask differ in shape"
        assert self.weights is None or self.weights.shape == shape, "weights and current differ in shape"
        assert self.selected is None or self.selected.shape == shape, "selected and current differ in shape"
        assert self.kept is None or self.kept.shape == shape, "kept and current differ in shape"
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
        return ratio.clamp(1 - self.low, 1 + self.high)


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """A differentiable loss and detached statistics, all scalars that add over micro-batches."""

    loss: Tensor
    clip_fraction: Tensor
    """Tokens whose gradient the clip removed, per token of the denominator."""
    ratio_clipped: Tensor
    """Those of them that were clipped for their ratio, and not as `LossInputs.selected`."""
    ratio_mean: Tensor
    """Mean ratio of the denominator's tokens; of rejected ones it is 1."""


def clipped_surrogate(inputs: LossInputs, clip: ClipRange, aggregate: Aggregate) -> LossOutput:
    """w * max(-A r, -A clip(r)): PPO (arXiv 1707.06347, eq. 7), GRPO (arXiv 2402.03300, eq. 3), with the asymmetric
    clip and the token mean of DAPO (arXiv 2503.14476, eq. 8). w multiplies after clipping (decoupled PPO,
    arXiv 2110.00641). Dual clip (arXiv 1912.09729): where A < 0, the term before w is at most -dual * A."""
    x = masked_inputs(inputs)
    return _clipped(inputs, clip, aggregate, x, clamp_exponent(x.current - x.old).exp())


def gspo(inputs: LossInputs, clip: ClipRange, aggregate: Aggregate) -> LossOutput:
    """The clipped surrogate with one ratio a row, s = exp(row mean of current - old) (GSPO, arXiv 2507.18071, eq. 5).

    Written per token as s * exp(current - sg(current)) (GSPO-token, eq. 13), sg = stop-gradient, so that advantages
    and weights may differ by token; the log-ratio is at most 10, as in verl.
    """
    x = masked_inputs(inputs)
    lengths = inputs.learnt.sum(dim=1, keepdim=True).clamp_min(1)
    log_s = (x.current - x.old).detach().sum(dim=1, keepdim=True) / lengths
    log_ratio = torch.where(inputs.learnt, x.current - x.current.detach() + log_s, 0.0)
    return _clipped(inputs, clip, aggregate, x, log_ratio.clamp(max=10).exp())


def cispo(inputs: LossInputs, clip: ClipRange, aggregate: Aggregate) -> LossOutput:
    """-w sg(clip(r)) A current: the ratio is clipped, no token's gradient is (CISPO, arXiv 2506.13585, eq. 4 and 5)."""
    x = masked_inputs(inputs)
    ratio = clamp_exponent(x.current - x.old).exp().detach()
    clipped = clip.clip(ratio)
    loss = aggregate(-x.weights * clipped * x.advantages * x.current, inputs.mask, inputs.denominator)
    return loss_output(inputs, loss, ratio, clipped != ratio)


def reinforce(inputs: LossInputs, clip: ClipRange, aggregate: Aggregate) -> LossOutput:
    """-w A current (REINFORCE; Sutton and Barto, 2nd edition, eq. 13.8, with importance weights).

    In bypass mode w is the truncated ratio current / rollout. It carries no gradient: with one, a bias proportional
    to current * grad(w) would be added.
    """
    x = masked_inputs(inputs)
    ratio = clamp_exponent(x.current - x.old).exp().detach()
    loss = aggregate(-x.weights * x.advantages * x.current, inputs.mask, inputs.denominator)
    return loss_output(inputs, loss, ratio, torch.zeros_like(inputs.mask))


def binary_tv(inputs: LossInputs, clip: ClipRange, aggregate: Aggregate) -> LossOutput:
    """-w A r + 0.001 (log r)^2, without the first term where the probability itself has moved more than 0.2 in A's
    direction (prime-rl, `src/prime_rl/trainer/rl/loss.py`). There `old` is the rollout policy.
    """
    x = masked_inputs(inputs)
    log_ratio = clamp_exponent(x.current - x.old)
    ratio = log_ratio.exp()
    moved = (x.current.exp() - x.old.exp()).detach()
    trusted = torch.where(x.advantages > 0, moved <= 0.2, moved >= -0.2)
    terms = torch.where(trusted, -x.weights * x.advantages * ratio, 0.0) + 1e-3 * log_ratio.square()
    return loss_output(inputs, aggregate(terms, inputs.mask, inputs.denominator), ratio, ~trusted)


def sapo(
    inputs: LossInputs, clip: ClipRange, aggregate: Aggregate, *, tau_positive: float, tau_negative: float
) -> LossOutput:
    """-w A (4 / tau) sigmoid(tau (r - 1)): a gate that closes smoothly in place of a clip. One tau holds where A > 0,
    another elsewhere (SAPO, arXiv 2511.20347; verl, `compute_policy_loss_sapo` of verl/trainer/ppo/core_algos.py)."""
    x = masked_inputs(inputs)
    ratio = clamp_exponent(x.current - x.old).exp()
    # Of two plain numbers torch would make FP32.
    tau = torch.where(x.advantages > 0, torch.full_like(ratio, tau_positive), tau_negative)
    terms = -x.weights * x.advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    loss = aggregate(terms, inputs.mask, inputs.denominator)
    return loss_output(inputs, loss, ratio, torch.zeros_like(inputs.mask))


def geo_mean(inputs: LossInputs, clip: ClipRange, aggregate: Aggregate) -> LossOutput:
    """-w A exp(row mean of the clipped log r): the geometric mean of a row's ratios (GMPO, arXiv 2507.20673; verl,
    `compute_policy_loss_geo_mean` of verl/trainer/ppo/core_algos.py).

    log r is limited to [-low, high] by token where that lowers A r. A is the row mean of the advantages, and w the
    geometric mean of the row's weights, at least 1e-10 each (verl adds 1e-10). The row's loss stands at each of its
    tokens, for `aggregate`.
    """
    x = masked_inputs(inputs)
    log_ratio, sign = x.current - x.old, x.advantages.sign()
    bounded = log_ratio.clamp(-clip.low, clip.high)
    clipped = sign * bounded < sign * log_ratio
    lengths = inputs.learnt.sum(dim=1, keepdim=True).clamp_min(1)
    limited, log_weights, advantages = (
        torch.where(inputs.learnt, values, 0.0).sum(dim=1, keepdim=True) / lengths
        # An advantage of 0 leaves no ratio, as in verl.
        for values in (
            sign.abs() * torch.where(clipped, bounded, log_ratio),
            x.weights.clamp_min(1e-10).log(),
            x.advantages,
        )
    )
    terms = -advantages * clamp_exponent(limited).exp() * log_weights.exp()
    loss = aggregate(torch.where(inputs.learnt, terms, 0.0), inputs.mask, inputs.denominator)
    return loss_output(inputs, loss, clamp_exponent(log_ratio).exp(), clipped)


def clip_cov(inputs: LossInputs, clip: ClipRange, aggregate: Aggregate) -> LossOutput:
    """The clipped surrogate without the tokens of `clip_cov_selection` (Clip-Cov, arXiv 2505.22617; verl,
    `compute_policy_loss_clip_cov`). They stay in the denominator."""
    assert inputs.selected is not None, "clip_cov_selection comes first"
    x = masked_inputs(inputs)
    ratio = clamp_exponent(x.current - x.old).exp()
    unclipped, clipped = -x.advantages * ratio, -x.advantages * clip.clip(ratio)
    terms = torch.where(inputs.selected, 0.0, torch.maximum(unclipped, clipped))
    loss = aggregate(x.weights * terms, inputs.mask, inputs.denominator)
    return loss_output(inputs, loss, ratio, inputs.selected | (clipped > unclipped))


def kl_cov(inputs: LossInputs, clip: ClipRange, aggregate: Aggregate, *, weight: float) -> LossOutput:
    """-w A r, + w * weight * |log r| at the tokens of `kl_cov_selection`; nothing is clipped (KL-Cov, arXiv 2505.22617;
    verl, `compute_policy_loss_kl_cov`)."""
    assert inputs.selected is not None, "kl_cov_selection comes first"
    x = masked_inputs(inputs)
    log_ratio = clamp_exponent(x.current - x.old)
    ratio = log_ratio.exp()
    terms = -x.advantages * ratio + torch.where(inputs.selected, weight * log_ratio.abs(), 0.0)
    loss = aggregate(x.weights * terms, inputs.mask, inputs.denominator)
    return loss_output(inputs, loss, ratio, torch.zeros_like(inputs.mask))


def clip_cov_selection(
    inputs: LossInputs, clip: ClipRange, generator: torch.Generator, *, share: float, low: float, high: float
) -> Tensor:
    """Bool [B, T]: max(floor(share * tokens), 1) tokens, drawn from those with a covariance between `low` and `high`
    (both excluded) that the clip does not hold.

    `inputs` is a whole minibatch: verl draws in each micro-batch anew, and so depends on their size.
    """
    x = masked_inputs(inputs)
    ratio = clamp_exponent(x.current - x.old).exp()
    clipped = -x.advantages * clip.clip(ratio) > -x.advantages * ratio
    covariance = _covariances(inputs.learnt, x)
    places = (inputs.learnt & ~clipped & (covariance > low) & (covariance < high)).nonzero()
    count = max(int(share * int(inputs.learnt.sum())), 1)
    chosen = places[torch.randperm(len(places), generator=generator)[:count]]
    selected = torch.zeros_like(inputs.mask)
    selected[chosen[:, 0], chosen[:, 1]] = True
    return selected


def kl_cov_selection(inputs: LossInputs, share: float) -> Tensor:
    """Bool [B, T]: the max(floor(share * tokens), 1) tokens of the largest covariance; of equal ones the first ones.
    `inputs` is a whole minibatch, as in `clip_cov_selection`."""
    covariance = _covariances(inputs.learnt, masked_inputs(inputs))[inputs.learnt]
    order = torch.sort(covariance, descending=True, stable=True).indices
    chosen = torch.zeros_like(covariance, dtype=torch.bool)
    chosen[order[: max(int(share * len(covariance)), 1)]] = True
    return torch.zeros_like(inputs.mask).masked_scatter(inputs.learnt, chosen)


def _covariances(mask: Tensor, x: "MaskedInputs") -> Tensor:
    """FP64 [B, T]: each token's share (A - mean A) (current - mean current) of their covariance over all tokens."""
    tokens = mask.sum().clamp_min(1)
    current = x.current.detach()
    return (x.advantages - x.advantages.sum() / tokens) * (current - current.sum() / tokens)


@dataclass(frozen=True)
class MaskedInputs:
    """FP64 [B, T], 0 at masked and rejected tokens, so that nothing there can leak; only `current` has a gradient."""

    current: Tensor
    old: Tensor
    advantages: Tensor
    weights: Tensor


def masked_inputs(inputs: LossInputs) -> MaskedInputs:
    """Inputs in FP64 and one shape; only `current` has a gradient, and only at `LossInputs.learnt` tokens."""
    advantages = inputs.advantages if inputs.advantages.ndim == 2 else inputs.advantages[:, None]
    weights = torch.ones_like(inputs.old) if inputs.weights is None else inputs.weights
    sources = (inputs.current, inputs.old.detach(), advantages.detach(), weights.detach())
    return MaskedInputs(*(torch.where(inputs.learnt, values.double(), 0.0) for values in sources))


def _clipped(inputs: LossInputs, clip: ClipRange, aggregate: Aggregate, x: MaskedInputs, ratio: Tensor) -> LossOutput:
    unclipped, clipped = -x.advantages * ratio, -x.advantages * clip.clip(ratio)
    terms, constant = torch.maximum(unclipped, clipped), clipped > unclipped
    if clip.dual is not None:
        ceiling = -clip.dual * x.advantages
        above = (x.advantages < 0) & (terms > ceiling)
        terms, constant = torch.where(above, ceiling, terms), constant | above
    loss = aggregate(x.weights * terms, inputs.mask, inputs.denominator)
    return loss_output(inputs, loss, ratio, constant)


def loss_output(inputs: LossInputs, loss: Tensor, ratio: Tensor, clipped: Tensor) -> LossOutput:
    mask, tokens = inputs.mask, max(inputs.denominator.tokens, 1)
    by_ratio = clipped if inputs.selected is None else clipped & ~inputs.selected
    return LossOutput(
        loss=loss,
        clip_fraction=(clipped & mask).sum().double() / tokens,
        ratio_clipped=(by_ratio & mask).sum().double() / tokens,
        ratio_mean=torch.where(mask, ratio.detach(), 0.0).sum() / tokens,
    )


ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def reference_penalty(
    current: Tensor,
    reference: Tensor,
    mask: Tensor,
    denominator: Denominator,
    *,
    estimate: Callable[[Tensor], Tensor] = k3,
    aggregate: Aggregate = token_mean,
    behaviour: Tensor | None = None,
) -> Tensor:
    """Aggregated KL estimate, an FP64 scalar, differentiable in `current`.

    `current`, `reference`: log-probs, float [B, T]; `mask`: bool [B, T]. d is clamped to +-20 and the
    estimate to +-10, as in NeMo RL by default; a token beyond a bound has no gradient.

    `behaviour`: float [B, T], log-probs of the policy that the tokens count as sampled from. The estimate is multiplied
    by exp(current - behaviour), before the outer clamp. NeMo RL's default is `current` itself, detached (a ratio of 1
    with a gradient), its `use_on_policy_kl_approximation` the rollout policy. It turns a ratio that overflows into 0;
    here exponents are clamped to +-20. None multiplies by nothing, as in GRPO and verl.
    """
    d = torch.where(mask, reference.detach().double() - current.double(), 0.0)
    bounded = d.clamp(-20.0, 20.0)
    terms = estimate(bounded)
    if behaviour is not None:
        log_ratio = torch.where(mask, current.double() - behaviour.detach().double(), 0.0)
        ratio = clamp_exponent(log_ratio).exp()
        terms = torch.where(d == bounded, ratio, ratio.detach()) * terms
    return aggregate(terms.clamp(-10.0, 10.0), mask, denominator)
