"""The weight of a linear with a LoRA adapter (arXiv 2106.09685), W + factor * B A, and the gradients of A and B.

The products of an element, exact in FP64, are added in the order of the rank. Times the factor and plus W the sum is
rounded to FP32 once. The bytes are the same on every device and for any cut into rows."""

from typing import Any

import torch
from torch import Tensor

from fp8core.numerics.dispatch import with_kernel

# Elements whose FP64 sums stay in the cache of a processor while the products are added.
_CHUNK = 1 << 15


@with_kernel("lora")
def merged_weight(base: Tensor, left: Tensor, right: Tensor, factor: float) -> Tensor:
    """FP32 from W, BF16 or FP32 [out, in], B, FP32 [out, rank], and A, FP32 [rank, in]. W and B may be the same rows of
    the whole."""
    policy_weight = torch.empty_like(base, dtype=torch.float32)
    step = max(1, _CHUNK // base.shape[1])
    wide = right.double()
    for start in range(0, len(base), step):
        rows = slice(start, start + step)
        columns = left[rows].double()
        total = torch.zeros_like(base[rows], dtype=torch.float64)
        for rank in range(len(right)):
            # The product is exact, so a fused operation rounds as two do.
            total.addcmul_(columns[:, rank, None], wide[rank])
        policy_weight[rows] = total.mul_(factor).add_(base[rows])
    return policy_weight


def adapter_gradients(gradient: Tensor, left: Tensor, right: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Of B and A, from the gradient of the merged weight, FP32 [out, in]."""
    return (gradient @ right.t()).mul_(factor), (left.t() @ gradient).mul_(factor)


class _AdapterGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, policy_weight: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.factor = factor
        return policy_weight.view_as(policy_weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        left, right = ctx.saved_tensors
        return *adapter_gradients(gradient, left, right, ctx.factor), None, None


def with_gradients(policy_weight: Tensor, left: Tensor, right: Tensor, factor: float) -> Tensor:
    """A merged weight whose gradient goes on to B and A."""
    weight: Tensor = _AdapterGradients.apply(left, right, policy_weight, factor)  # type: ignore[no-untyped-call]
    return weight
