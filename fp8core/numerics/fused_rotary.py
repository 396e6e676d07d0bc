"""Norms of Q and K and rotary positions on a fused projection, and their backward.

Where `kernel_choice` says so a Triton kernel, else the torch reference; what `fused_norm` says of bytes holds here too.
What the norms give is rounded to BF16 before it is rotated; the rotation is FP32, its result BF16.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fp8core.numerics.elementwise import rms_norm, rotate
from fp8core.numerics.kernel_choice import has_kernels
from fp8core.numerics.rounding import KERNELS, round_to_bf16

Norms = tuple[Tensor, Tensor]

Heads = tuple[Tensor, Tensor, Tensor]
"""Q [tokens, query_heads, head_dim], K and V [tokens, kv_heads, head_dim]."""


class HeadLayout(NamedTuple):
    """How a row of a fused projection is divided: heads of Q, then of K, then as many of V."""

    query_heads: int
    kv_heads: int
    head_dim: int


def heads_of(qkv: Tensor, layout: HeadLayout) -> Heads:
    """Q, K and V by head: views of [tokens, all heads * head_dim]."""
    heads = qkv.view(qkv.shape[0], -1, layout.head_dim)
    q, k, v = heads.split([layout.query_heads, layout.kv_heads, layout.kv_heads], dim=1)
    return q, k, v


def norm_rotate(
    qkv: Tensor, norms: Norms | None, cos: Tensor, sin: Tensor, positions: Tensor, layout: HeadLayout, eps: float
) -> Tensor:
    """Q and K normed (Qwen3) and rotated, V as it is.

    Args:
        qkv: BF16 [tokens, (query_heads + 2 kv_heads) head_dim].
        norms: weights for Q and for K, FP32 [head_dim] each; None where the family has no such norms.
        cos, sin: tables, FP32 [positions, head_dim / 2].
        positions: int64 [tokens], below the tables' length.
        layout: how qkv is divided.
        eps: of the norms.

    Returns:
        BF16 of qkv's shape.
    """
    if has_kernels(qkv):
        from fp8core.numerics import triton_rotary

        return triton_rotary.norm_rotate(qkv, norms, cos, sin, positions, layout, eps)
    return _reference(qkv.float(), norms, cos[positions], sin[positions], layout, eps).bfloat16()


def norm_rotate_backward(
    grad: Tensor,
    qkv: Tensor,
    norms: Norms | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    layout: HeadLayout,
    eps: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of qkv and of the norms' weights.

    Args:
        grad: BF16 of qkv's shape.
        qkv, norms, cos, sin, positions, layout, eps: as for `norm_rotate`.

    Returns:
        grad_qkv: BF16 of qkv's shape.
        grad_q_norm, grad_k_norm: FP32 [head_dim]; None without norms.
    """
    if has_kernels(qkv):
        from fp8core.numerics import triton_rotary

        return triton_rotary.norm_rotate_backward(grad, qkv, norms, cos, sin, positions, layout, eps)
    leaf = qkv.float().requires_grad_()
    weights = None if norms is None else (norms[0].detach().requires_grad_(), norms[1].detach().requires_grad_())
    with torch.enable_grad():
        out = _reference(leaf, weights, cos[positions], sin[positions], layout, eps)
    grad_qkv, *of_norms = torch.autograd.grad(out, [leaf, *(weights or ())], grad.float())
    grad_q_norm, grad_k_norm = of_norms or (None, None)
    return grad_qkv.bfloat16(), grad_q_norm, grad_k_norm


def _reference(qkv: Tensor, norms: Norms | None, cos: Tensor, sin: Tensor, layout: HeadLayout, eps: float) -> Tensor:
    """FP32 values of the result; cos and sin are those of the tokens."""
    q, k, v = heads_of(qkv, layout)
    if norms is not None:
        q, k = (rms_norm(x, w, eps, round_to_bf16, KERNELS.normalised) for x, w in zip((q, k), norms, strict=True))
    q, k = (rotate(x, cos[:, None], sin[:, None], round_to_bf16) for x in (q, k))
    return torch.cat((q, k, v), dim=1).flatten(1)
