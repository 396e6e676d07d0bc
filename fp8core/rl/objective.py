"""The objective of one configuration: clipped surrogate, mismatch correction and reference penalty, composed."""

from dataclasses import dataclass

from torch import Tensor

from fp8core.config.run import CorrectionConfig, LossConfig
from fp8core.rl.aggregation import Denominator, token_mean
from fp8core.rl.batch import RolloutBatch
from fp8core.rl.correction import token_tis
from fp8core.rl.losses import ClipRange, LossInputs, clipped_surrogate
from fp8core.rl.reference import reference_penalty


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
        self._clip = ClipRange(low=loss.clip_low, high=loss.clip_high)
        self._reference_weight = loss.reference_kl
        self._correction = correction

    def __call__(self, current: Tensor, batch: RolloutBatch, denominator: Denominator) -> ObjectiveTerms:
        """Loss of a micro-batch.

        Args:
            current: FP32 [b, C], log-probs under the policy that is updated; differentiable.
            batch: the same rows.
            denominator: counts of the whole optimiser batch.
        """
        mask = batch.mask & batch.keep[:, None]
        weights = self._weights(batch, mask)
        surrogate = clipped_surrogate(
            LossInputs(
                current=current,
                old=batch.old_logprobs,
                advantages=batch.advantages,
                mask=mask,
                denominator=denominator,
                weights=weights,
            ),
            self._clip,
        )
        penalty = self._penalty(current, batch, mask, denominator)
        return ObjectiveTerms(
            loss=surrogate.loss + self._reference_weight * penalty,
            clip_fraction=surrogate.clip_fraction,
            ratio_mean=surrogate.ratio_mean,
            weight_mean=token_mean(weights.double(), mask, denominator),
            reference_kl=penalty,
        )

    def _weights(self, batch: RolloutBatch, mask: Tensor) -> Tensor:
        if self._correction.method == "none":
            return mask.double()
        return token_tis(batch.old_logprobs, batch.rollout_logprobs, mask, self._correction.cap)

    def _penalty(self, current: Tensor, batch: RolloutBatch, mask: Tensor, denominator: Denominator) -> Tensor:
        """k3 estimate of KL(current || reference), GRPO (arXiv 2402.03300, equation 4)."""
        if batch.reference_logprobs is None:
            assert self._reference_weight == 0, "loss.reference_kl needs the reference step"
            return current.new_zeros(())
        return reference_penalty(current, batch.reference_logprobs, mask, denominator)
