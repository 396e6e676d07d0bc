"""The weight of a linear with a LoRA adapter (arXiv 2106.09685), W + factor * B A, and the gradients of A and B.

One rule gives the same bytes on every device and for any cut into rows. A product of two FP32 numbers is exact in
FP64. The products of an element are added in the order of the rank, the factor multiplies the sum, and W is added. Each
of these operations rounds to FP64. The result is rounded to FP32 once.
"""

from typing import Any

import torch
from torch import Tensor

from fp8core.numerics.dispatch import with_kernel

# Elements whose FP64 sums stay in the cache of a processor while the products are added.
_CHUNK = 1 << 15


@with_kernel("lora")
def merged_weight(base: Tensor, left: Tensor, right: Tensor, factor: float) -> Tensor:
    """W + factor * B A, FP32, where W is BF16 or FP32 [out, in], or some of its rows, and the factor is alpha / rank.

    B is FP32 [out, rank], the same rows, and A is FP32 [rank, in].
    """
    merged = torch.empty_like(base, dtype=torch.float32)
    step, wide = max(1, _CHUNK // base.shape[1]), right.double()
    for start in range(0, len(base), step):
        rows = slice(start, start + step)
        columns = left[rows].double()
        total = torch.zeros_like(base[rows], dtype=torch.float64)
        for rank in range(len(right)):
            # The product is exact, so a fused operation rounds as two do.
            total.addcmul_(columns[:, rank, None], wide[rank])
        merged[rows] = total.mul_(factor).add_(base[rows])
    return merged


def adapter_gradients(gradient: Tensor, left: Tensor, right: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Of B and A, FP32 like them, from the gradient of the merged weight, FP32 [out, in]."""
    return (gradient @ right.t()).mul_(factor), (left.t() @ gradient).mul_(factor)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, merged: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.factor = factor
        return merged.view_as(merged)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        left, right = ctx.saved_tensors
        return *adapter_gradients(gradient, left, right, ctx.factor), None, None


def with_gradients(merged: Tensor, left: Tensor, right: Tensor, factor: float) -> Tensor:
    """A merged weight whose gradient goes on to B and A at once, and is not kept."""
    given: Tensor = _Merged.apply(left, right, merged, factor)  # type: ignore[no-untyped-call]
    return given
