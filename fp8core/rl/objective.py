"""The objective of one configuration: mismatch correction, policy loss and reference penalty, composed.

`corrected` acts on the whole batch of a step, because rejection and normalisation look at rows and batches; the
objective itself then takes micro-batches whose shares add up.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp8core.config.run import CorrectionConfig, LossConfig
from fp8core.rl.aggregation import AGGREGATIONS, Aggregate, Denominator, constant_length, token_mean
from fp8core.rl.batch import RolloutBatch
from fp8core.rl.correction import CorrectionRule, correct
from fp8core.rl.importance import Weighting
from fp8core.rl.losses import ClipRange, LossInputs, LossOutput, binary_tv, cispo, clipped_surrogate, gspo, reinforce
from fp8core.rl.presets import Preset, preset
from fp8core.rl.reference import ESTIMATES, reference_penalty
from fp8core.rl.rejection import Filter, Veto

PolicyLoss = Callable[[LossInputs, ClipRange, Aggregate], LossOutput]

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "clipped": clipped_surrogate,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": lambda inputs, clip, aggregate: reinforce(inputs, aggregate),
    "binary_tv": lambda inputs, clip, aggregate: binary_tv(inputs, aggregate=aggregate),
}
_LOSS_OF_PRESET = {"clipped_surrogate": "clipped", "reinforce": "reinforce", "binary_tv": "binary_tv"}


@dataclass(frozen=True)
class ObjectiveTerms:
    """A micro-batch's share of the loss; shares add up to the batch's loss and statistics."""

    loss: Tensor
    clip_fraction: Tensor
    ratio_mean: Tensor
    weight_mean: Tensor
    reference_kl: Tensor

    def statistics(self) -> dict[str, float]:
        """Detached values by name."""
        return {name: float(value.detach()) for name, value in vars(self).items()}


class Objective:
    """Callable on the current policy's log-probs; holds no state."""

    def __init__(self, loss: LossConfig, correction: CorrectionConfig) -> None:
        """Raises UserError for an unknown preset or filter."""
        named = named_correction(correction)
        self._rule, self._bypass = named.rule, named.mode == "bypass"
        self._policy = POLICY_LOSSES[loss.policy if named.loss == "clipped_surrogate" else _LOSS_OF_PRESET[named.loss]]
        self._clip = ClipRange(low=loss.clip_low, high=loss.clip_high, dual=loss.dual_clip)
        self._aggregate = AGGREGATIONS[loss.aggregation]
        if loss.length_normaliser is not None:
            self._aggregate = constant_length(loss.length_normaliser)
        self._reference_weight = loss.reference_kl
        self._estimate = ESTIMATES[loss.reference_kl_estimate]

    def corrected(self, batch: RolloutBatch) -> tuple[RolloutBatch, dict[str, float]]:
        """The batch with its weights, without what was rejected, and the correction's metrics.

        Bypass mode trains on the ratio to the rollout policy, which holds the whole mismatch already: the clipped
        losses then take no weights, or it would count twice.
        """
        mask = batch.mask & batch.keep[:, None]
        verdict = correct(self._rule, batch.old_logprobs, batch.rollout_logprobs, mask)
        twice = self._bypass and self._policy is not POLICY_LOSSES["reinforce"]
        weights = verdict.mask.to(verdict.weights.dtype) if twice else verdict.weights
        return replace(batch, mask=verdict.mask, weights=weights), verdict.metrics

    def __call__(self, current: Tensor, batch: RolloutBatch, denominator: Denominator) -> ObjectiveTerms:
        """Loss of a micro-batch.

        Args:
            current: FP32 [b, C], log-probs under the policy that is updated; differentiable.
            batch: the same rows of what `corrected` returned.
            denominator: counts of the whole optimiser batch, from the corrected mask.
        """
        assert batch.weights is not None, "corrected() comes first"
        inputs = LossInputs(
            current=current,
            old=batch.rollout_logprobs if self._bypass else batch.old_logprobs,
            advantages=batch.advantages,
            mask=batch.mask,
            denominator=denominator,
            weights=batch.weights,
        )
        policy = self._policy(inputs, self._clip, self._aggregate)
        penalty = self._penalty(current, batch, denominator)
        return ObjectiveTerms(
            loss=policy.loss + self._reference_weight * penalty,
            clip_fraction=policy.clip_fraction,
            ratio_mean=policy.ratio_mean,
            weight_mean=token_mean(batch.weights.double(), batch.mask, denominator),
            reference_kl=penalty,
        )

    def _penalty(self, current: Tensor, batch: RolloutBatch, denominator: Denominator) -> Tensor:
        """Divergence from the reference policy; GRPO (arXiv 2402.03300, equation 4) takes k3."""
        if batch.reference_logprobs is None:
            assert self._reference_weight == 0, "loss.reference_kl needs the reference step"
            return torch.zeros((), dtype=torch.float64)
        return reference_penalty(
            current,
            batch.reference_logprobs,
            batch.mask,
            denominator,
            estimate=self._estimate,
            aggregate=self._aggregate,
        )


def named_correction(config: CorrectionConfig) -> Preset:
    """The rule, mode and loss of a configuration.

    Raises:
        UserError: an unknown preset or filter, or bounds that a filter does not take.
    """
    match config.method:
        case "none":
            return Preset(rule=CorrectionRule(), source="configuration")
        case "token_tis":
            tis = Weighting(level="token", action="truncate", high=config.cap)
            return Preset(rule=CorrectionRule(weighting=tis), source="configuration")
        case "preset":
            assert config.preset is not None, "CorrectionConfig demands a name"
            return preset(config.preset)
        case "custom":
            return Preset(rule=_custom_rule(config), source="configuration", mode=config.mode)


def _custom_rule(config: CorrectionConfig) -> CorrectionRule:
    return CorrectionRule(
        weighting=Weighting(**config.weighting.model_dump()),
        filters=tuple(Filter(**item.model_dump()) for item in config.filters),
        veto=None if config.veto is None else Veto(low=config.veto),
        normalise=config.normalise,
    )
