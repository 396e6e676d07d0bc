"""The objective of one configuration: mismatch correction, policy loss and reference penalty, composed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp8core.config.loss import OWN_LOSS, SHIPPED_LOSSES, DistillationConfig, LossConfig
from fp8core.config.training import CorrectionConfig
from fp8core.rl import losses
from fp8core.rl.alignment_metrics import clamp_exponent
from fp8core.rl.batch import RolloutBatch
from fp8core.rl.correction import correct, correction_rule
from fp8core.rl.user_loss import load_loss

PolicyLoss = Callable[[losses.LossInputs, losses.ClipRange, losses.Aggregate], losses.LossOutput]

_LOSSES: dict[str, PolicyLoss] = {
    "clipped": losses.clipped_surrogate,
    "gspo": losses.gspo,
    "cispo": losses.cispo,
    "reinforce": losses.reinforce,
    "binary_tv": losses.binary_tv,
}


@dataclass(frozen=True)
class ObjectiveTerms:
    """A micro-batch's share of the loss; shares add up to the batch's loss and statistics, but for MAXIMA.

    Attributes:
        loss: differentiable scalar.
        clip_fraction, ratio_mean: as of `LossOutput`.
        ratio_bias, ratio_deviation: mean, and largest magnitude, of a token's importance ratio - 1.
        reward_slope: see `reward_slope`.
        weight_mean: mean importance weight of the correction.
        zero_weight_fraction: tokens that the loss divides by and that weigh 0.
        reference_kl: divergence from the reference policy, a mean over tokens whatever the loss's aggregation is.
        teacher_kl: mean of log old - log teacher.
    """

    loss: Tensor
    clip_fraction: Tensor
    ratio_mean: Tensor
    ratio_bias: Tensor
    ratio_deviation: Tensor
    reward_slope: Tensor
    weight_mean: Tensor
    zero_weight_fraction: Tensor
    reference_kl: Tensor
    teacher_kl: Tensor

    def statistics(self) -> dict[str, float]:
        return {name: float(value.detach()) for name, value in vars(self).items()}


MAXIMA = frozenset({"ratio_deviation"})
"""Statistics of `ObjectiveTerms` of which a batch has the largest of its parts', not their sum."""


def merge_totals(totals: Mapping[str, float], part: Mapping[str, float]) -> dict[str, float]:
    return {k: max(totals[k], v) if k in MAXIMA else totals[k] + v for k, v in part.items()} if totals else dict(part)


class Objective:
    """Callable on the current policy's log-probs; holds no state.

    `corrected` acts on the whole batch of a step, because rejection and normalisation look at rows and batches. The
    objective itself then takes micro-batches. The correction of bypass mode depends on the updated policy, and is
    computed there for every update anew.
    """

    def __init__(self, loss: LossConfig, correction: CorrectionConfig) -> None:
        """Raises UserError: an unknown preset, or as `load_loss`."""
        self._rule = correction_rule(correction)
        self._bypass = self._rule.mode == "bypass"
        builtin_loss = _LOSSES.get(loss.policy)
        self._policy: PolicyLoss = load_loss(loss.policy, loss.options) if builtin_loss is None else builtin_loss
        # In bypass mode the ratio holds the whole mismatch: weights of clipped losses would count it twice.
        self._has_weights = not self._bypass or SHIPPED_LOSSES.get(loss.policy, OWN_LOSS).weighted_in_bypass
        self._clip = losses.ClipRange(low=loss.clip_low, high=loss.clip_high, dual=loss.dual_clip)
        self._aggregate = losses.AGGREGATIONS[loss.aggregation]
        if loss.length_normaliser is not None:
            self._aggregate = losses.constant_length(loss.length_normaliser)
        self._reference_weight = loss.reference_kl
        self._entropy_weight = loss.entropy
        self._distillation = loss.distillation
        # Of router logits, which the trainers have.
        self.router = loss.router

    def corrected(self, batch: RolloutBatch) -> tuple[RolloutBatch, dict[str, float]]:
        """The batch with its weights and without the rows that have no token left, and the correction's metrics.

        In bypass mode weights, accepted tokens and metrics are those of the first update. A batch without old log-probs
        is corrected later, part by part; where that would be another correction, `whole_batch_setting` names why.
        """
        return (batch, {}) if batch.old_logprobs is None else self._apply_correction(batch.old_logprobs, batch)

    def _apply_correction(self, training: Tensor, batch: RolloutBatch) -> tuple[RolloutBatch, dict[str, float]]:
        correction = correct(self._rule, training, batch.rollout_logprobs, batch.loss_mask)
        corrected_batch = replace(
            batch,
            denominator_mask=correction.loss_mask,
            accepted_mask=correction.accepted_mask,
            weights=correction.weights if self._has_weights else correction.accepted_mask.to(correction.weights.dtype),
            row_mask=batch.row_mask & correction.row_mask,
        )
        return corrected_batch, correction.metrics

    def __call__(
        self, current: Tensor, batch: RolloutBatch, denominator: losses.Denominator, entropy: Tensor | None = None
    ) -> ObjectiveTerms:
        """Loss of a micro-batch.

        Args:
            current: FP32 [b, C], log-probs under the policy that is updated; differentiable.
            batch: the same rows of what `corrected` returned.
            denominator: counts of the whole optimiser batch, from the corrected mask.
            entropy: FP32 [b, C], of the distribution of each token; differentiable. For an entropy bonus.
        """
        if batch.old_logprobs is None:
            micro_batch = batch
            batch, _ = self.corrected(replace(batch, old_logprobs=current.detach()))
            same = torch.equal(batch.loss_mask, micro_batch.loss_mask)
            assert same, "the denominator was counted before the correction"
        inputs = self._inputs(current, batch, denominator)
        assert inputs.weights is not None, "_inputs gives weights"
        policy = self._policy(inputs, self._clip, self._aggregate)
        log_ratio = torch.where(inputs.loss_mask, current.detach() - inputs.old, 0.0).double()
        deviation = torch.expm1(clamp_exponent(log_ratio))
        penalty = divergence = self._penalty(current, batch, denominator, self._aggregate)
        if self._aggregate is not losses.token_mean:
            divergence = self._penalty(current.detach(), batch, denominator, losses.token_mean)
        return ObjectiveTerms(
            loss=policy.loss + self._reference_weight * penalty - self._bonus(entropy, batch.loss_mask, denominator),
            clip_fraction=policy.clip_fraction,
            ratio_mean=policy.ratio_mean,
            ratio_bias=losses.token_mean(deviation, inputs.loss_mask, denominator),
            ratio_deviation=deviation.abs().max(),
            reward_slope=reward_slope(policy.loss, current, batch, denominator),
            weight_mean=losses.token_mean(inputs.weights.double(), batch.loss_mask, denominator),
            zero_weight_fraction=losses.token_mean((inputs.weights == 0).double(), batch.loss_mask, denominator),
            reference_kl=divergence,
            teacher_kl=losses.token_mean(-_towards_teacher(batch), batch.loss_mask, denominator),
        )

    def _inputs(self, current: Tensor, batch: RolloutBatch, denominator: losses.Denominator) -> losses.LossInputs:
        old = batch.rollout_logprobs if self._bypass else batch.old_logprobs
        assert old is not None, "old log-probs are given, or those of the call"
        # In bypass mode of the current policy, as verl (`compute_policy_loss_bypass_mode`).
        corrected_batch = self._apply_correction(current, batch)[0] if self._bypass else batch
        assert corrected_batch.weights is not None, "corrected() comes first"
        return losses.LossInputs(
            current=current,
            old=old,
            advantages=_applied_advantages(batch, self._distillation),
            loss_mask=batch.loss_mask,
            denominator=denominator,
            weights=corrected_batch.weights,
            accepted_mask=corrected_batch.accepted_mask,
        )

    def _bonus(self, entropy: Tensor | None, mask: Tensor, denominator: losses.Denominator) -> Tensor | float:
        if self._entropy_weight == 0:
            return 0.0
        assert entropy is not None, "loss.entropy needs the entropy of each token"
        return self._entropy_weight * self._aggregate(entropy.double(), mask, denominator)

    def _penalty(
        self, current: Tensor, batch: RolloutBatch, denominator: losses.Denominator, aggregate: losses.Aggregate
    ) -> Tensor:
        if batch.reference_logprobs is None:
            assert self._reference_weight == 0, "loss.reference_kl needs the reference step"
            return torch.zeros((), dtype=torch.float64)
        return losses.reference_penalty(current, batch.reference_logprobs, batch.loss_mask, denominator, aggregate)


def reward_slope(loss: Tensor, current: Tensor, batch: RolloutBatch, denominator: losses.Denominator) -> Tensor:
    """Positive if descent along `loss` makes rewarded completions likelier: a share of the batch's mean, FP64 scalar.

    The mean over rows of -d loss / d log-prob, averaged over the row's tokens, times the row's centred reward. It is 0
    where rewards are not known or nothing requires a gradient. With importance ratios and weights of 1 no advantage
    estimator makes it negative; a wrong sign of advantage or loss does.
    """
    if batch.centred_rewards is None or not current.requires_grad:
        return torch.zeros((), dtype=torch.float64)
    (slope,) = torch.autograd.grad(loss, current, retain_graph=True)
    lengths = batch.loss_mask.sum(dim=1).clamp_min(1)
    push = torch.where(batch.loss_mask, -slope.double(), 0.0).sum(dim=1) / lengths
    return (push * batch.centred_rewards.double()).sum() * denominator.tokens / max(denominator.sequences, 1)


def row_advantages(batch: RolloutBatch, loss: LossConfig, rule: CorrectionConfig) -> Tensor:
    """FP64 [B]: what the loss multiplies by, a mean over the tokens of a row that were not rejected; 0 without any."""
    assert batch.old_logprobs is not None, "the update was made"
    correction = correct(correction_rule(rule), batch.old_logprobs, batch.rollout_logprobs, batch.loss_mask)
    accepted_mask = correction.accepted_mask
    values = _applied_advantages(batch, loss.distillation).double()
    if values.dim() == 1:
        return torch.where(accepted_mask.any(dim=1), values, 0.0)
    return torch.where(accepted_mask, values, 0.0).sum(dim=1) / accepted_mask.sum(dim=1).clamp_min(1)


def _applied_advantages(batch: RolloutBatch, distillation: DistillationConfig) -> Tensor:
    """Those of rewards, or with a teacher's part by token, [B, C]: rewards * A + weight * log teacher / old.

    With `rewards` 1 that is slime's (`apply_opd_kl_to_advantages` of slime/backends/megatron_utils/loss.py), with
    `rewards` 0 and `weight` 1 NeMo RL's (`OPDAdvantageEstimator` of nemo_rl/algorithms/advantage_estimator.py,
    arXiv 2601.02780, eq. 8) and SkyRL's (examples/train/on_policy_distillation).
    """
    if distillation.weight == 0:
        return batch.advantages
    assert batch.teacher_logprobs is not None, "loss.distillation needs the teacher step"
    towards_teacher = distillation.weight * _towards_teacher(batch)
    if distillation.rewards == 0:
        return towards_teacher
    return distillation.rewards * batch.advantages[:, None].double() + towards_teacher


def _towards_teacher(batch: RolloutBatch) -> Tensor:
    if batch.teacher_logprobs is None:
        return torch.zeros(batch.policy_mask.shape, dtype=torch.float64)
    assert batch.old_logprobs is not None, "old log-probs are given, or those of the call"
    return torch.where(batch.policy_mask, batch.teacher_logprobs.double() - batch.old_logprobs.double(), 0.0)


def whole_batch_setting(correction: CorrectionConfig) -> str | None:
    """The setting that needs the old log-probs of a whole batch before its first backward; None where none does.
    Raises UserError: as `correction_rule`."""
    rule = correction_rule(correction)
    if rule.normalise != "none":
        return f"correction.normalise={rule.normalise}"
    if rule.rejects and rule.divides_by == "kept":
        return "correction.denominator=kept with filters, a veto or action=mask"
    return None
