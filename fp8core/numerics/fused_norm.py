"""Residual sum, RMSNorm and its block-FP8 codes in one operation, and its backward.

Where `kernel_choice` says so a Triton kernel, else the torch reference; the results are the same bytes in the forward
(two FP64 sums of one row in different order round to different BF16 with probability about 2^-40 an element), and agree
to FP32 rounding in the backward. The backward is deterministic: no sum depends on what else runs.

Rounding is that of `rounding.KERNELS`: total = bf16(x + added), and the norm reads the rounded total; the mean of
squares and 1 / rms are FP64; normed = bf16(fp32(total / rms) * weight).
"""

from functools import partial

import torch
from torch import Tensor

from fp8core.numerics.block_codes import Codes, FiniteFlag, launched, row_and_column_codes, row_codes
from fp8core.numerics.e4m3 import ScaleRule
from fp8core.numerics.elementwise import rms_norm
from fp8core.numerics.kernel_choice import has_kernels
from fp8core.numerics.rounding import KERNELS, round_to_bf16


def add_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Residual sum and its RMSNorm.

    Args:
        x: BF16 [tokens, hidden], the residual stream.
        added: BF16 of the same shape, what a block adds to it; None before the first.
        weight: FP32 [hidden], of BF16 values.
        eps: added to the mean square.

    Returns:
        total: BF16 [tokens, hidden]; x itself without `added`.
        normed: BF16 [tokens, hidden].
        inverse: FP32 [tokens], 1 / rms, for the backward.
    """
    if has_kernels(x):
        from fp8core.numerics import triton_norm

        return triton_norm.add_norm(x, added, weight, eps)
    total = x if added is None else (x.float() + added.float()).bfloat16()
    wide = total.float()
    inverse = torch.rsqrt(wide.double().square().mean(-1) + eps).float()
    return total, rms_norm(wide, weight, eps, round_to_bf16, KERNELS.normalised).bfloat16(), inverse


def add_norm_row_codes(
    x: Tensor, added: Tensor | None, weight: Tensor, eps: float, rule: ScaleRule, flag: FiniteFlag | None = None
) -> tuple[Tensor, Codes]:
    """`add_norm` for a linear whose input is not kept: normed as codes of 1 x 128 groups alone.

    Args:
        x, added, weight, eps: as for `add_norm`.
        rule, flag: as for `block_codes.row_codes`.

    Returns:
        total: as `add_norm`.
        rows: codes [tokens, hidden] and scales [tokens, ceil(hidden / 128)].

    Raises:
        GroupNotFinite: as for `block_codes.row_codes`.
    """
    if has_kernels(x):
        from fp8core.numerics import triton_norm

        return launched(partial(triton_norm.add_norm_row_codes, x, added, weight, eps, rule), x.device, flag)
    total, normed, _inverse = add_norm(x, added, weight, eps)
    return total, row_codes(normed, rule, flag)


def add_norm_codes(
    x: Tensor, added: Tensor | None, weight: Tensor, eps: float, rule: ScaleRule, flag: FiniteFlag | None = None
) -> tuple[Tensor, Codes, Codes, Tensor]:
    """`add_norm` for a linear that is trained: normed as codes for the forward and for the gradient of the weight.

    Args:
        x, added, weight, eps: as for `add_norm`.
        rule, flag: as for `block_codes.row_codes`.

    Returns:
        total: as `add_norm`.
        rows, columns: as `block_codes.row_and_column_codes` of normed.
        inverse: as `add_norm`.

    Raises:
        GroupNotFinite: as for `block_codes.row_codes`.
    """
    if has_kernels(x):
        from fp8core.numerics import triton_norm

        return launched(partial(triton_norm.add_norm_codes, x, added, weight, eps, rule), x.device, flag)
    total, normed, inverse = add_norm(x, added, weight, eps)
    return total, *row_and_column_codes(normed, rule, flag), inverse


def add_norm_backward(
    grad_normed: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x and `added`, which are equal, and of the weight.

    Args:
        grad_normed: BF16 [tokens, hidden].
        grad_total: BF16 of the same shape, what later layers send along the residual stream; None after the last.
        total, inverse: as `add_norm` returned them.
        weight: FP32 [hidden].

    Returns:
        grad: BF16 [tokens, hidden].
        grad_weight: FP32 [hidden].
    """
    if has_kernels(grad_normed):
        from fp8core.numerics import triton_norm

        return triton_norm.add_norm_backward(grad_normed, grad_total, total, weight, inverse)
    upstream, factor = grad_normed.float(), inverse[:, None]
    normed, scaled = total.float() * factor, upstream * weight
    grad = factor * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    if grad_total is not None:
        grad = grad + grad_total.float()
    return grad.bfloat16(), (upstream * normed).sum(0)
