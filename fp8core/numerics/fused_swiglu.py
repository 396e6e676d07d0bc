"""SwiGLU of a fused projection and its block-FP8 codes in one operation, and its backward.

Where `kernel_choice` says so a Triton kernel, else the torch reference. silu is FP32 in the kernels and FP64 in the
reference, rounded to BF16 before it multiplies `up`; the products are the same bytes but for the few gates whose silu
lies next to a boundary of two BF16 numbers.
"""

from functools import partial

import torch
from torch import Tensor

from fp8core.numerics import elementwise
from fp8core.numerics.block_codes import Codes, FiniteFlag, launched, row_and_column_codes, row_codes
from fp8core.numerics.e4m3 import TILE, ScaleRule
from fp8core.numerics.kernel_choice import has_kernels
from fp8core.numerics.rounding import KERNELS, round_to_bf16


def swiglu(gate_up: Tensor) -> Tensor:
    """bf16(bf16(silu(gate)) * up).

    Args:
        gate_up: BF16 [tokens, 2 m], the gates and then the factors.

    Returns:
        BF16 [tokens, m].
    """
    if has_kernels(gate_up):
        from fp8core.numerics import triton_swiglu

        return triton_swiglu.swiglu(gate_up)
    return _reference(gate_up.float()).bfloat16()


def swiglu_row_codes(gate_up: Tensor, rule: ScaleRule, flag: FiniteFlag | None = None) -> Codes:
    """Codes of 1 x 128 groups of `swiglu`, for a linear whose input is not kept.

    Args:
        gate_up: as for `swiglu`.
        rule, flag: as for `block_codes.row_codes`.

    Returns:
        codes [tokens, m] and scales [tokens, ceil(m / 128)].

    Raises:
        GroupNotFinite: as for `block_codes.row_codes`.
    """
    if has_kernels(gate_up):
        from fp8core.numerics import triton_swiglu

        return launched(partial(triton_swiglu.swiglu_row_codes, gate_up, rule), gate_up.device, flag)
    return row_codes(swiglu(gate_up), rule, flag)


def swiglu_codes(gate_up: Tensor, rule: ScaleRule, flag: FiniteFlag | None = None) -> tuple[Codes, Codes]:
    """Codes of `swiglu` for a linear that is trained.

    Args:
        gate_up: as for `swiglu`.
        rule, flag: as for `block_codes.row_codes`.

    Returns:
        rows, columns: as `block_codes.row_and_column_codes` of `swiglu`.

    Raises:
        GroupNotFinite: as for `block_codes.row_codes`.
    """
    if has_kernels(gate_up):
        from fp8core.numerics import triton_swiglu

        return launched(partial(triton_swiglu.swiglu_codes, gate_up, rule), gate_up.device, flag)
    return row_and_column_codes(swiglu(gate_up), rule, flag)


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient of `gate_up`.

    Args:
        grad: BF16 [tokens, m].
        gate_up: as for `swiglu`.

    Returns:
        BF16 [tokens, 2 m].
    """
    if has_kernels(gate_up):
        from fp8core.numerics import triton_swiglu

        return triton_swiglu.swiglu_backward(grad, gate_up)
    leaf = gate_up.float().requires_grad_()
    with torch.enable_grad():
        out = _reference(leaf)
    return torch.autograd.grad(out, leaf, grad.float())[0].bfloat16()


def swiglu_backward_codes(
    grad: Tensor, gate_up: Tensor, rule: ScaleRule, flag: FiniteFlag | None = None
) -> tuple[Codes, Codes]:
    """Codes of `swiglu_backward`, for both gradients of the fused projection.

    Args:
        grad, gate_up: as for `swiglu_backward`.
        rule, flag: as for `block_codes.row_codes`.

    Returns:
        rows, columns: as `block_codes.row_and_column_codes` of `swiglu_backward`.

    Raises:
        GroupNotFinite: as for `block_codes.row_codes`.
    """
    # Where gate and up share a group of columns, one tile has both gradients: not worth a kernel.
    if has_kernels(gate_up) and grad.shape[1] % TILE == 0:
        from fp8core.numerics import triton_swiglu

        return launched(partial(triton_swiglu.swiglu_backward_codes, grad, gate_up, rule), gate_up.device, flag)
    return row_and_column_codes(swiglu_backward(grad, gate_up), rule, flag)


def _reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return elementwise.swiglu(gate, up, round_to_bf16, KERNELS.activated)
