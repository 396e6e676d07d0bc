"""AdamW over named FP32 masters; the moments' format decides how much memory they take (`numerics.adamw`)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fp8core.config.run import TrainingConfig
from fp8core.numerics.adamw import AdamWStep, adamw

_EPS = 1e-8
_MOMENTS = ("exp_avg", "exp_avg_sq")
_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class AdamW:
    """Updates masters in place from their `.grad`.

    Attributes:
        updates: how often it has.
        moments: by `exp_avg/<name>` and `exp_avg_sq/<name>`.
    """

    def __init__(self, masters: Mapping[str, Tensor], training: TrainingConfig) -> None:
        self._masters, self._config = dict(masters), training
        self.updates = 0
        dtype = _FORMATS[training.optimiser_state]
        self.moments = {
            f"{moment}/{name}": torch.zeros_like(master, dtype=dtype, requires_grad=False)
            for name, master in masters.items()
            for moment in _MOMENTS
        }

    def step(self, learning_rate: float, gradient_factor: float) -> None:
        """One update; gradients are multiplied by `gradient_factor` first, which is what clips their norm."""
        self.updates += 1
        config = self._config
        step = AdamWStep.at(
            self.updates, learning_rate, (config.beta1, config.beta2), config.weight_decay, _EPS, gradient_factor
        )
        for name, master in self._masters.items():
            assert master.grad is not None, f"{name} got no gradient"
            first, second = (self.moments[f"{moment}/{name}"] for moment in _MOMENTS)
            adamw(master.detach(), master.grad.contiguous(), first, second, step)

    def load(self, moments: Mapping[str, Tensor], updates: int) -> None:
        """Continue from what was saved; names must be those of the masters."""
        assert moments.keys() == self.moments.keys(), "moments of another model"
        for name, moment in self.moments.items():
            moment.copy_(moments[name])
        self.updates = updates
