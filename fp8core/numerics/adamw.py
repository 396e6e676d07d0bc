"""AdamW's update of one tensor (arXiv 1711.05101, algorithm 2). Moments in BF16 (DeepSeek-V3, arXiv 2412.19437, section
3.3.2) are computed in FP32 and rounded to nearest when stored."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fp8core.numerics.dispatch import with_kernel

EPS = 1e-8
MOMENT_NAMES = ("exp_avg", "exp_avg_sq")


class AdamWStep(NamedTuple):
    """`kept`: what weight decay leaves of the master. `rate`: the learning rate over the first moment's bias. `root`:
    the square root of the second moment's bias."""

    gradient_factor: float
    beta1: float
    beta2: float
    kept: float
    rate: float
    root: float
    eps: float

    @classmethod
    def at(
        cls, number: int, learning_rate: float, betas: tuple[float, float], weight_decay: float, gradient_factor: float
    ) -> "AdamWStep":
        """Of update `number`, from 1; weight decay is decoupled."""
        beta1, beta2 = betas
        rate = learning_rate / (1 - beta1**number)
        root = math.sqrt(1 - beta2**number)
        return cls(gradient_factor, beta1, beta2, 1 - learning_rate * weight_decay, rate, root, EPS)


@with_kernel("adamw")
def adamw(master: Tensor, grad: Tensor, first: Tensor, second: Tensor, step: AdamWStep) -> None:
    """Update a contiguous FP32 master, by an FP32 gradient, and its moments, FP32 or BF16, in place."""
    grad = grad * step.gradient_factor
    m = first.float().mul_(step.beta1).add_(grad, alpha=1 - step.beta1)
    v = second.float().mul_(step.beta2).addcmul_(grad, grad, value=1 - step.beta2)
    master.mul_(step.kept).addcdiv_(m, torch.sqrt(v).div_(step.root).add_(step.eps), value=-step.rate)
    first.copy_(m)
    second.copy_(v)
