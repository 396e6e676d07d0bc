"""E4M3 codes of Q, K and V under static scales in Triton.

A program has 4 tokens by 1,024 columns of Q, of K or of V. Quotients are `div.rn`; nothing is contracted to an FMA."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8core.kernels.quantise import to_bf16, to_e4m3
from fp8core.numerics.fused import HeadLayout, Heads, heads_of, limits_of
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.recipe import AttentionProducts

_TOKENS = 4
_COLUMNS = 1024


@triton.jit
def _kind(query_width: tl.tensor, kv_width: tl.tensor, first: tl.tensor, columns: tl.constexpr) -> tl.tuple:
    """0 for Q, 1 for K, 2 for V, and the blocks of columns before this program's in it; program 0 has block `first`."""
    block = first + tl.program_id(0)
    query_blocks, kv_blocks = tl.cdiv(query_width, columns), tl.cdiv(kv_width, columns)
    kind = (block >= query_blocks).to(tl.int32) + (block >= query_blocks + kv_blocks).to(tl.int32)
    return kind, block - tl.where(kind == 0, 0, query_blocks + (kind - 1) * kv_blocks)


@triton.jit
def _places(
    tokens: tl.tensor, query_width: tl.tensor, kv_width: tl.tensor, first: tl.tensor, rows: tl.constexpr,
    columns: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Places in the projection and in the part, both [rows, columns], and which of them exist."""
    kind, block = _kind(query_width, kv_width, first, columns)
    width = tl.where(kind == 0, query_width, kv_width)
    start = tl.where(kind == 0, 0, query_width + (kind - 1) * kv_width)
    token = (tl.program_id(1) * rows + tl.arange(0, rows)).to(tl.int64)[:, None]
    column = (block * columns + tl.arange(0, columns))[None, :]
    inside = (token < tokens) & (column < width)
    return token * (query_width + 2 * kv_width) + start + column, token * width + column, inside


@triton.jit
def _head_codes_kernel(
    qkv: tl.tensor, q: tl.tensor, k: tl.tensor, v: tl.tensor, q_scale: tl.tensor, k_scale: tl.tensor,
    v_scale: tl.tensor, tokens: tl.tensor, query_width: tl.tensor, kv_width: tl.tensor, first: tl.tensor,
    values: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
) -> None:  # fmt: skip
    kind, _block = _kind(query_width, kv_width, first, columns)
    out = q if kind == 0 else (k if kind == 1 else v)
    scale = tl.where(kind == 0, q_scale, tl.where(kind == 1, k_scale, v_scale))
    whole, part, inside = _places(tokens, query_width, kv_width, first, rows, columns)
    x = tl.load(qkv + whole, mask=inside, other=0.0).to(tl.float32)
    written = to_e4m3(tl.div_rn(x, scale))
    if values:
        written = to_bf16(written.to(tl.float32) * scale)
    tl.store(out + part, written, mask=inside)


@triton.jit
def _codes_of_scale_tensor_kernel(
    x: tl.tensor, codes: tl.tensor, scale: tl.tensor, width: tl.tensor, pitch: tl.tensor, columns: tl.constexpr
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < width
    value = tl.load(x + token * pitch + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(codes + token * width + column, to_e4m3(tl.div_rn(value, tl.load(scale))), mask=inside)


@triton.jit
def _head_gradients_kernel(
    grad_q: tl.tensor, grad_k: tl.tensor, grad_v: tl.tensor, qkv: tl.tensor, out: tl.tensor, q_limit: tl.tensor,
    k_limit: tl.tensor, v_limit: tl.tensor, tokens: tl.tensor, query_width: tl.tensor, kv_width: tl.tensor,
    rows: tl.constexpr, columns: tl.constexpr,
) -> None:  # fmt: skip
    kind, _block = _kind(query_width, kv_width, 0, columns)
    grad = grad_q if kind == 0 else (grad_k if kind == 1 else grad_v)
    limit = tl.where(kind == 0, q_limit, tl.where(kind == 1, k_limit, v_limit))
    whole, part, inside = _places(tokens, query_width, kv_width, 0, rows, columns)
    x = tl.load(qkv + whole, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(grad + part, mask=inside, other=0.0).to(tl.float32)
    # A product, as in the reference: zeros have the gradient's sign, and what is not finite is not hidden.
    passed = given * (tl.abs(x) <= limit).to(tl.float32)
    tl.store(out + whole, to_bf16(passed), mask=inside)


def head_codes(qkv: Tensor, layout: HeadLayout, scales: LayerScales, products: AttentionProducts) -> Heads:
    return _parts(qkv, layout, scales, products, torch.float8_e4m3fn)


def codes_of_scale_tensor(x: Tensor, scale: Tensor) -> Tensor:
    """Contiguous E4M3 codes of BF16 [tokens, ...] under a scale, FP32 [1], on its device, which graphs read anew."""
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    tokens = len(x)
    width = x[:1].numel()
    if tokens:
        assert x.flatten(1).data_ptr() == x.data_ptr(), "a token's elements lie apart"
        grid = (tokens, triton.cdiv(width, _COLUMNS))
        _codes_of_scale_tensor_kernel[grid](x, codes, scale, width, x.stride(0), _COLUMNS)
    return codes


def head_values(qkv: Tensor, layout: HeadLayout, scales: LayerScales, products: AttentionProducts) -> Heads:
    return _parts(qkv, layout, scales, products, torch.bfloat16)


def head_gradients(
    grads: Heads, qkv: Tensor, layout: HeadLayout, scales: LayerScales, products: AttentionProducts
) -> Tensor:
    assert {qkv.dtype, *(grad.dtype for grad in grads)} == {torch.bfloat16}
    qkv = qkv.contiguous()
    given = [grad.contiguous() for grad in grads]
    out = torch.empty_like(qkv)
    with torch.cuda.device_of(qkv):
        _head_gradients_kernel[_grid(qkv, layout, 0)](
            *given,
            qkv,
            out,
            *limits_of(scales, products),
            *_sizes(qkv, layout),
            _TOKENS,
            _COLUMNS,
            enable_fp_fusion=False,
        )
    return out


def _parts(
    qkv: Tensor, layout: HeadLayout, scales: LayerScales, products: AttentionProducts, dtype: torch.dtype
) -> Heads:
    assert qkv.dtype == torch.bfloat16
    qkv = qkv.contiguous()
    q, k, v = heads_of(qkv, layout)
    k, v = (torch.empty(x.shape, dtype=dtype, device=qkv.device) for x in (k, v))
    # Nothing is written of Q in BF16, but all places have one type.
    first = triton.cdiv(q.shape[1] * q.shape[2], _COLUMNS)
    place = k
    if products == "fp8":
        q = torch.empty(q.shape, dtype=dtype, device=qkv.device)
        first = 0
        place = q
    values = dtype == torch.bfloat16
    each = (scales.q, scales.k, scales.v)
    with torch.cuda.device_of(qkv):
        _head_codes_kernel[_grid(qkv, layout, first)](
            qkv, place, k, v, *each, *_sizes(qkv, layout), first, values, _TOKENS, _COLUMNS, enable_fp_fusion=False
        )
    return q, k, v


def _sizes(qkv: Tensor, layout: HeadLayout) -> tuple[int, int, int]:
    return len(qkv), layout.query_heads * layout.head_dim, layout.kv_heads * layout.head_dim


def _grid(qkv: Tensor, layout: HeadLayout, first: int) -> tuple[int, int]:
    tokens, query_width, kv_width = _sizes(qkv, layout)
    blocks = triton.cdiv(query_width, _COLUMNS) + 2 * triton.cdiv(kv_width, _COLUMNS)
    return int(blocks) - first, int(triton.cdiv(tokens, _TOKENS))
