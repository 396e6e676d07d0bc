"""The steps between two GEMMs of a packed layer, each one operation on BF16, with its codes and its backward.

Rounding is that of `elementwise.KERNELS`. Where the kernels' results differ from the reference:

- Norms: the mean of squares and 1 / rms are FP64. Two orders of the sum round to different BF16 with probability about
  2^-40 an element. Rotary positions hold such a norm too.
- SwiGLU: silu is FP32 in the kernels and FP64 here. The few gates whose silu lies next to a boundary of two BF16
  numbers differ.
- Backward: equal to FP32 rounding, and deterministic: no sum depends on what else runs.

Operations that write codes raise GroupNotFinite as `e4m3.row_codes` does."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fp8core.numerics import elementwise
from fp8core.numerics.dispatch import with_kernel
from fp8core.numerics.e4m3 import Codes, FiniteFlag, row_and_column_codes, row_codes
from fp8core.numerics.elementwise import KERNELS, rms_norm, rotate, round_to_bf16
from fp8core.numerics.grouped import ExpertRows
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.recipe import E4M3_MAX, AttentionProducts, Grouping


@with_kernel("norm")
def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Residual sum x + `delta` and its RMSNorm, BF16 [tokens, hidden], and 1 / rms, FP32 [tokens]; the weight is FP32
    [hidden] of BF16 values."""
    total = x if delta is None else (x.float() + delta.float()).bfloat16()
    wide = total.float()
    inverse = torch.rsqrt(wide.double().square().mean(-1) + eps).float()
    return total, rms_norm(wide, weight, eps, round_to_bf16, KERNELS.normalised).bfloat16(), inverse


@with_kernel("norm")
def add_norm_row_codes(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, rows: Grouping, flag: FiniteFlag | None = None
) -> tuple[Tensor, Codes]:
    total, normed, _inverse = add_norm(x, delta, weight, eps)
    return total, row_codes(normed, rows, flag)


@with_kernel("norm")
def add_norm_codes(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    rows: Grouping,
    columns: Grouping,
    flag: FiniteFlag | None = None,
) -> tuple[Tensor, Codes, Codes, Tensor]:
    """The sum, codes of its norm by rows and by columns, and 1 / rms."""
    total, normed, inverse = add_norm(x, delta, weight, eps)
    return total, *row_and_column_codes(normed, rows, columns, flag), inverse


@with_kernel("norm")
def add_norm_backward(
    grad_normed: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of `added`, which are equal, BF16 [tokens, hidden], and of the weight, FP32 [hidden].
    `grad_total` is that of the residual stream, None after the last layer."""
    upstream = grad_normed.float()
    factor = inverse[:, None]
    normed = total.float() * factor
    scaled = upstream * weight
    grad = factor * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    if grad_total is not None:
        grad = grad + grad_total.float()
    return grad.bfloat16(), (upstream * normed).sum(0)


@with_kernel("swiglu")
def swiglu(gate_up: Tensor) -> Tensor:
    """bf16(bf16(silu(gate)) * up), BF16 [tokens, m], of BF16 [tokens, 2 m]: the gates and then the factors."""
    return _swiglu(gate_up.float()).bfloat16()


@with_kernel("swiglu")
def swiglu_row_codes(
    gate_up: Tensor, rows: Grouping, flag: FiniteFlag | None = None, by_expert: ExpertRows | None = None
) -> Codes:
    """`by_expert`: the rows; a kernel leaves those without a token as they are."""
    return row_codes(swiglu(gate_up), rows, flag)


@with_kernel("swiglu")
def swiglu_codes(
    gate_up: Tensor, rows: Grouping, columns: Grouping, flag: FiniteFlag | None = None, spans: Tensor | None = None
) -> tuple[Codes, Codes]:
    return row_and_column_codes(swiglu(gate_up), rows, columns, flag, spans)


@with_kernel("swiglu")
def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient of `gate_up`, BF16 [tokens, 2 m]."""
    leaf = gate_up.float().requires_grad_()
    with torch.enable_grad():
        out = _swiglu(leaf)
    return torch.autograd.grad(out, leaf, grad.float())[0].bfloat16()


@with_kernel("swiglu")
def swiglu_backward_codes(
    grad: Tensor,
    gate_up: Tensor,
    rows: Grouping,
    columns: Grouping,
    flag: FiniteFlag | None = None,
    spans: Tensor | None = None,
) -> tuple[Codes, Codes]:
    return row_and_column_codes(swiglu_backward(grad, gate_up), rows, columns, flag, spans)


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return elementwise.swiglu(gate, up, round_to_bf16, KERNELS.activated)


Norms = tuple[Tensor, Tensor]

Heads = tuple[Tensor, Tensor, Tensor]
"""Q [tokens, query_heads, head_dim], K and V [tokens, kv_heads, head_dim]."""


class HeadLayout(NamedTuple):
    """The division of a row of a fused projection: heads of Q, then of K, then as many of V."""

    query_heads: int
    kv_heads: int
    head_dim: int


def heads_of(qkv: Tensor, layout: HeadLayout) -> Heads:
    """Views of [tokens, all heads * head_dim]."""
    heads = qkv.view(qkv.shape[0], -1, layout.head_dim)
    q, k, v = heads.split([layout.query_heads, layout.kv_heads, layout.kv_heads], dim=1)
    return q, k, v


@with_kernel("rotary")
def norm_rotate(
    qkv: Tensor, norms: Norms | None, cos: Tensor, sin: Tensor, positions: Tensor, layout: HeadLayout, eps: float
) -> Tensor:
    """Q and K normed by `norms`, FP32 [head_dim] each, and rotated, V as it is, BF16 [tokens, (query_heads + 2
    kv_heads) head_dim]. cos and sin are FP32 [positions, head_dim / 2], positions int64 [tokens]."""
    return _norm_rotate(qkv.float(), norms, cos[positions], sin[positions], layout, eps).bfloat16()


@with_kernel("rotary")
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
    """Gradients of qkv, BF16, and of the norms' weights, FP32 [head_dim] each; None without norms."""
    leaf = qkv.float().requires_grad_()
    weights = None if norms is None else (norms[0].detach().requires_grad_(), norms[1].detach().requires_grad_())
    with torch.enable_grad():
        out = _norm_rotate(leaf, weights, cos[positions], sin[positions], layout, eps)
    grad_qkv, *of_norms = torch.autograd.grad(out, [leaf, *(weights or ())], grad.float())
    grad_q_norm, grad_k_norm = of_norms or (None, None)
    return grad_qkv.bfloat16(), grad_q_norm, grad_k_norm


def _norm_rotate(qkv: Tensor, norms: Norms | None, cos: Tensor, sin: Tensor, layout: HeadLayout, eps: float) -> Tensor:
    q, k, v = heads_of(qkv, layout)
    if norms is not None:
        q, k = (rms_norm(x, w, eps, round_to_bf16, KERNELS.normalised) for x, w in zip((q, k), norms, strict=True))
    q, k = (rotate(x, cos[:, None], sin[:, None], round_to_bf16) for x in (q, k))
    return torch.cat((q, k, v), dim=1).flatten(1)


@with_kernel("head_codes")
def head_codes(qkv: Tensor, layout: HeadLayout, scales: LayerScales, products: AttentionProducts) -> Heads:
    """float8_e4m3fn codes of Q, K and V over their scales, saturated and contiguous. Q is a view of qkv where products
    are not of E4M3 Q."""
    q, k, v = heads_of(qkv, layout)
    query = static_codes(q, scales.q) if products == "fp8" else q
    return query, static_codes(k, scales.k), static_codes(v, scales.v)


@with_kernel("head_codes")
def head_values(qkv: Tensor, layout: HeadLayout, scales: LayerScales, products: AttentionProducts) -> Heads:
    """BF16 of the values of `head_codes`: exact for scales that are powers of two."""
    q, k, v = head_codes(qkv, layout, scales, products)
    query = _values(q, scales.q) if products == "fp8" else q
    return query, _values(k, scales.k), _values(v, scales.v)


@with_kernel("head_codes")
def head_gradients(
    grads: Heads, qkv: Tensor, layout: HeadLayout, scales: LayerScales, products: AttentionProducts
) -> Tensor:
    """Gradients of Q, K and V as one of qkv, BF16: those of saturated elements times zero, the others as they are."""
    limits = limits_of(scales, products)
    # Compared in FP32: torch would round the limit to BF16 on a CPU and not on a GPU.
    parts = zip(grads, heads_of(qkv, layout), limits, strict=True)
    return torch.cat([grad * (x.float().abs() <= limit) for grad, x, limit in parts], dim=1).flatten(1)


def static_codes(x: Tensor, scale: float) -> Tensor:
    # Divided by a tensor: torch multiplies by the reciprocal of a number on a GPU, which is another rounding.
    quotient = x.float() / torch.full((), scale, device=x.device)
    return quotient.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn, memory_format=torch.contiguous_format)


def limits_of(scales: LayerScales, products: AttentionProducts) -> tuple[float, float, float]:
    """The largest magnitudes of Q, K and V that are not saturated."""
    of_query = E4M3_MAX * scales.q if products == "fp8" else math.inf
    return of_query, E4M3_MAX * scales.k, E4M3_MAX * scales.v


def _values(codes: Tensor, scale: float) -> Tensor:
    return (codes.float() * scale).bfloat16()
