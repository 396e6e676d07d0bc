"""E4M3 codes of Q, K and V under static scales, the values they stand for, and gradients that pass them by.

Where `kernel_choice` says so a Triton kernel, else the torch reference; both give the same bytes. Quotients are FP32.

Shapes: qkv BF16 [tokens, (query_heads + 2 kv_heads) head_dim], the others as `fused_rotary.Heads`, contiguous.
"""

import torch
from torch import Tensor

from fp8core.numerics.e4m3 import E4M3_MAX
from fp8core.numerics.fused_rotary import HeadLayout, Heads, heads_of
from fp8core.numerics.kernel_choice import has_kernels
from fp8core.numerics.kv_scales import LayerScales


def head_codes(qkv: Tensor, layout: HeadLayout, scales: LayerScales) -> Heads:
    """float8_e4m3fn codes of Q, K and V over their scales, saturated."""
    if has_kernels(qkv):
        from fp8core.numerics import triton_head_codes

        return triton_head_codes.head_codes(qkv, layout, scales)
    q, k, v = heads_of(qkv, layout)
    return static_codes(q, scales.q), static_codes(k, scales.k), static_codes(v, scales.v)


def head_values(qkv: Tensor, layout: HeadLayout, scales: LayerScales) -> Heads:
    """BF16 of the values that the codes stand for: exact for scales that are powers of two."""
    if has_kernels(qkv):
        from fp8core.numerics import triton_head_codes

        return triton_head_codes.head_values(qkv, layout, scales)
    q, k, v = head_codes(qkv, layout, scales)
    return _values(q, scales.q), _values(k, scales.k), _values(v, scales.v)


def head_gradients(grads: Heads, qkv: Tensor, layout: HeadLayout, scales: LayerScales) -> Tensor:
    """Gradients of Q, K and V as one of qkv: those of saturated elements times zero, the others as they are.

    Args:
        grads: BF16, of the values.
        qkv, layout, scales: what the codes are of.

    Returns:
        BF16 of qkv's shape.
    """
    if has_kernels(qkv):
        from fp8core.numerics import triton_head_codes

        return triton_head_codes.head_gradients(grads, qkv, layout, scales)
    limits = limits_of(scales)
    # Compared in FP32: torch would round the limit to BF16 on a CPU and not on a GPU.
    parts = zip(grads, heads_of(qkv, layout), limits, strict=True)
    return torch.cat([grad * (x.float().abs() <= limit) for grad, x, limit in parts], dim=1).flatten(1)


def static_codes(x: Tensor, scale: float) -> Tensor:
    """float8_e4m3fn codes of x / scale, saturated; any shape, contiguous."""
    # Divided by a tensor: torch multiplies by the reciprocal of a number on a GPU, which is another rounding.
    divided = x.float() / torch.full((), scale, device=x.device)
    return divided.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn, memory_format=torch.contiguous_format)


def limits_of(scales: LayerScales) -> tuple[float, float, float]:
    """The largest magnitudes of Q, K and V that are not saturated."""
    return E4M3_MAX * scales.q, E4M3_MAX * scales.k, E4M3_MAX * scales.v


def _values(codes: Tensor, scale: float) -> Tensor:
    return (codes.float() * scale).bfloat16()
