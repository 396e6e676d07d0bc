"""AdamW's update in one pass over memory; equal to the reference but for the order of roundings in FP32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8core.numerics.adamw import AdamWStep

_BLOCK = 2048


@triton.jit
def _adamw_kernel(
    master: tl.tensor, grad: tl.tensor, first: tl.tensor, second: tl.tensor, count: tl.tensor,
    gradient_factor: tl.tensor, beta1: tl.tensor, beta2: tl.tensor, kept: tl.tensor, rate: tl.tensor, root: tl.tensor,
    eps: tl.tensor, block: tl.constexpr,
) -> None:  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    g = tl.load(grad + at, mask=inside, other=0.0) * gradient_factor
    m = tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(second + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(master + at, mask=inside, other=0.0)
    m = beta1 * m + (1.0 - beta1) * g
    v = beta2 * v + (1.0 - beta2) * g * g
    w = w * kept - rate * m / (tl.sqrt_rn(v) / root + eps)
    tl.store(master + at, w, mask=inside)
    tl.store(first + at, m.to(first.dtype.element_ty), mask=inside)
    tl.store(second + at, v.to(second.dtype.element_ty), mask=inside)


def adamw(master: Tensor, grad: Tensor, first: Tensor, second: Tensor, step: AdamWStep) -> None:
    for tensor in (master, grad, first, second):
        assert tensor.is_contiguous(), "an update goes through memory in one order"
    grid = (triton.cdiv(master.numel(), _BLOCK),)
    with torch.cuda.device_of(master):
        _adamw_kernel[grid](master, grad, first, second, master.numel(), *step, _BLOCK, num_warps=8)
