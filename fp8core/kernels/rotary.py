"""Norms and rotary positions of the Q and K of a fused projection in Triton.

A program has 4 tokens by 8 heads of Q, of K or of V. Heads are held as halves: the rotation pairs an element with the
one half a head further. Each product and sum is rounded. The norm is that of `kernels.norm`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8core.kernels.norm import column_sums, inverse_rms, normalise
from fp8core.kernels.quantise import to_bf16
from fp8core.numerics.fused import HeadLayout

_TOKENS = 4
_HEADS = 8
# Chunks of tokens in the backward, each of which adds up the gradients of the norms over its tokens.
_BACKWARD_CHUNKS = 256


@triton.jit
def _first_head(query_heads: tl.tensor, kv_heads: tl.tensor, heads: tl.constexpr) -> tl.tuple:
    """First head of this program, the end of its kind, and the kind: 0 for Q, 1 for K, 2 for V."""
    block = tl.program_id(0)
    query_blocks, kv_blocks = tl.cdiv(query_heads, heads), tl.cdiv(kv_heads, heads)
    kind = (block >= query_blocks).to(tl.int32) + (block >= query_blocks + kv_blocks).to(tl.int32)
    start = tl.where(kind == 0, 0, query_heads + (kind - 1) * kv_heads)
    before = tl.where(kind == 0, 0, query_blocks + (kind - 1) * kv_blocks)
    return start + (block - before) * heads, start + tl.where(kind == 0, query_heads, kv_heads), kind


@triton.jit
def _inverse(first: tl.tensor, second: tl.tensor, half: tl.constexpr, eps: tl.constexpr) -> tl.tuple:
    one, two = first.to(tl.float64), second.to(tl.float64)
    rounded, high, low = inverse_rms(tl.sum(one * one + two * two, 1), 2 * half, eps)
    return rounded[:, None], high[:, None], low[:, None]


@triton.jit
def _load(x: tl.tensor, at: tl.tensor, inside: tl.tensor) -> tl.tensor:
    return tl.load(x + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _weights(q_norm: tl.tensor, k_norm: tl.tensor, kind: tl.tensor, column: tl.tensor, half: tl.constexpr) -> tl.tuple:
    norm = q_norm if kind == 0 else k_norm
    inside = column < half
    first, second = _load(norm, column, inside), _load(norm + half, column, inside)
    return first[None, :], second[None, :]


@triton.jit
def _places(
    start: tl.tensor, tokens: tl.tensor, query_heads: tl.tensor, kv_heads: tl.tensor, per: tl.constexpr,
    heads: tl.constexpr, half: tl.constexpr, block: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Tokens [rows], places of the first halves in the projection [rows, block], which of them exist, columns."""
    head, stop, _kind = _first_head(query_heads, kv_heads, heads)
    row, column = tl.arange(0, per * heads), tl.arange(0, block)
    token, head = start + row // heads, head + row % heads
    inside = ((token < tokens) & (head < stop))[:, None] & (column < half)[None, :]
    at = (token.to(tl.int64) * (query_heads + 2 * kv_heads) + head)[:, None] * (2 * half) + column[None, :]
    return token, at, inside, column


@triton.jit
def _tables(
    cos: tl.tensor, sin: tl.tensor, positions: tl.tensor, token: tl.tensor, tokens: tl.tensor, column: tl.tensor,
    inside: tl.tensor, half: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    position = tl.load(positions + token, mask=token < tokens, other=0)
    at = position[:, None] * half + column[None, :]
    return tl.load(cos + at, mask=inside, other=0.0), tl.load(sin + at, mask=inside, other=0.0)


@triton.jit
def _forward_kernel(
    qkv: tl.tensor, out: tl.tensor, q_norm: tl.tensor, k_norm: tl.tensor, cos: tl.tensor, sin: tl.tensor,
    positions: tl.tensor, tokens: tl.tensor, query_heads: tl.tensor, kv_heads: tl.tensor, eps: tl.constexpr,
    norms: tl.constexpr, per: tl.constexpr, heads: tl.constexpr, half: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    _head, _stop, kind = _first_head(query_heads, kv_heads, heads)
    start = tl.program_id(1) * per
    token, at, inside, column = _places(start, tokens, query_heads, kv_heads, per, heads, half, block)
    first, second = _load(qkv, at, inside), _load(qkv, at + half, inside)
    if kind < 2:
        if norms:
            _rounded, high, low = _inverse(first, second, half, eps)
            one, two = _weights(q_norm, k_norm, kind, column, half)
            first = normalise(first, high, low, one).to(tl.float32)
            second = normalise(second, high, low, two).to(tl.float32)
        c, s = _tables(cos, sin, positions, token, tokens, column, inside, half)
        first, second = first * c - second * s, second * c + first * s
    tl.store(out + at, to_bf16(first), mask=inside)
    tl.store(out + at + half, to_bf16(second), mask=inside)


@triton.jit
def _backward_kernel(
    grad: tl.tensor, qkv: tl.tensor, out: tl.tensor, q_norm: tl.tensor, k_norm: tl.tensor, cos: tl.tensor,
    sin: tl.tensor, positions: tl.tensor, partial_sums: tl.tensor, tokens: tl.tensor, query_heads: tl.tensor,
    kv_heads: tl.tensor, steps: tl.tensor, eps: tl.constexpr, norms: tl.constexpr, per: tl.constexpr,
    heads: tl.constexpr, half: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    _head, _stop, kind = _first_head(query_heads, kv_heads, heads)
    one_sum = tl.zeros([per * heads, block], tl.float32)
    two_sum = tl.zeros([per * heads, block], tl.float32)
    one, two = _weights(q_norm, k_norm, kind, tl.arange(0, block), half)
    for step in range(0, steps):
        start = (tl.program_id(1) * steps + step) * per
        token, at, inside, column = _places(start, tokens, query_heads, kv_heads, per, heads, half, block)
        first, second = _load(grad, at, inside), _load(grad, at + half, inside)
        if kind < 2:
            c, s = _tables(cos, sin, positions, token, tokens, column, inside, half)
            first, second = first * c + second * s, second * c - first * s
            if norms:
                x, y = _load(qkv, at, inside), _load(qkv, at + half, inside)
                inverse, _high, _low = _inverse(x, y, half, eps)
                x, y = x * inverse, y * inverse
                one_sum += first * x
                two_sum += second * y
                first, second = first * one, second * two
                mean = tl.sum(first * x + second * y, 1)[:, None] * (0.5 / half)
                first, second = inverse * (first - x * mean), inverse * (second - y * mean)
        tl.store(out + at, to_bf16(first), mask=inside)
        tl.store(out + at + half, to_bf16(second), mask=inside)
    if norms:
        column = tl.arange(0, block)
        row = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        tl.store(partial_sums + row * (2 * half) + column, tl.sum(one_sum, 0), mask=column < half)
        tl.store(partial_sums + row * (2 * half) + half + column, tl.sum(two_sum, 0), mask=column < half)


def norm_rotate(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    layout: HeadLayout,
    eps: float,
) -> Tensor:
    assert qkv.dtype == torch.bfloat16
    qkv = qkv.contiguous()
    positions = positions.contiguous()
    out = torch.empty_like(qkv)
    q_norm, k_norm = norms or (cos, cos)
    grid = (_head_blocks(layout), triton.cdiv(qkv.shape[0], _TOKENS))
    with torch.cuda.device_of(qkv):
        _forward_kernel[grid](
            qkv, out, q_norm, k_norm, cos, sin, positions, qkv.shape[0], layout.query_heads, layout.kv_heads,
            eps, norms is not None, _TOKENS, _HEADS, *_half(layout), enable_fp_fusion=False,
        )  # fmt: skip
    return out


def norm_rotate_backward(
    grad: Tensor,
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    layout: HeadLayout,
    eps: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    assert grad.dtype == qkv.dtype == torch.bfloat16
    grad = grad.contiguous()
    qkv = qkv.contiguous()
    positions = positions.contiguous()
    out = torch.empty_like(grad)
    q_norm, k_norm = norms or (cos, cos)
    steps = triton.cdiv(grad.shape[0], _TOKENS * _BACKWARD_CHUNKS)
    chunks = triton.cdiv(grad.shape[0], _TOKENS * steps)
    query_blocks = triton.cdiv(layout.query_heads, _HEADS)
    partial_sums = torch.empty(_head_blocks(layout), chunks, layout.head_dim, device=grad.device)
    with torch.cuda.device_of(grad):
        _backward_kernel[(_head_blocks(layout), chunks)](
            grad, qkv, out, q_norm, k_norm, cos, sin, positions, partial_sums, grad.shape[0], layout.query_heads,
            layout.kv_heads, steps, eps, norms is not None, _TOKENS, _HEADS, *_half(layout), enable_fp_fusion=False,
        )  # fmt: skip
    if norms is None:
        return out, None, None
    key_blocks = triton.cdiv(layout.kv_heads, _HEADS)
    of_query, of_key, _of_value = partial_sums.split([query_blocks, key_blocks, key_blocks])
    return out, column_sums(of_query.flatten(0, 1)), column_sums(of_key.flatten(0, 1))


def _head_blocks(layout: HeadLayout) -> int:
    return int(triton.cdiv(layout.query_heads, _HEADS) + 2 * triton.cdiv(layout.kv_heads, _HEADS))


def _half(layout: HeadLayout) -> tuple[int, int]:
    """Half a head, and the next power of two."""
    return layout.head_dim // 2, triton.next_power_of_2(layout.head_dim // 2)
