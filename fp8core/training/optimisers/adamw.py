"""AdamW, as torch computes it in the exact trainer, and in one pass over memory in others (`numerics.adamw`)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from fp8core.config.training import OptimiserConfig
from fp8core.numerics.adamw import EPS, MOMENT_NAMES, AdamWStep, adamw
from fp8core.training.optimisers.optimiser import OptimiserEntry, Parameter, Update, UpdateRule


class TorchAdamW(NamedTuple):
    """`torch.optim.AdamW` to the bit, by its function: the class imports torch's compiler, which takes seconds."""

    betas: tuple[float, float]
    weight_decay: float
    moments: tuple[str, ...] = MOMENT_NAMES

    def update(self, master: Tensor, gradient: Tensor, moments: Sequence[Tensor], update: Update) -> None:
        assert update.gradient_factor == 1, "the exact trainer clips gradients in place"
        first, second = moments
        torch_adamw(
            [master],
            [gradient],
            [first],
            [second],
            [],
            [torch.tensor(update.number - 1.0)],
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=update.learning_rate,
            weight_decay=self.weight_decay,
            eps=EPS,
            maximize=False,
        )


class FusedAdamW(NamedTuple):
    betas: tuple[float, float]
    weight_decay: float
    moments: tuple[str, ...] = MOMENT_NAMES

    def update(self, master: Tensor, gradient: Tensor, moments: Sequence[Tensor], update: Update) -> None:
        first, second = moments
        number, learning_rate, factor = update
        step = AdamWStep.at(number, learning_rate, self.betas, self.weight_decay, factor)
        adamw(master, gradient, first, second, step)


def adamw_rule(settings: OptimiserConfig, parameter: Parameter) -> UpdateRule:
    rule = TorchAdamW if parameter.arithmetic == "exact" else FusedAdamW
    return rule((settings.beta1, settings.beta2), settings.weight_decay)


OPTIMISER = OptimiserEntry(name="AdamW", rule=adamw_rule, by_element=True)
