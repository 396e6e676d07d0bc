"""Matrix products whose result does not depend on the order of summation.

E4M3 values are multiples of 2^-9 up to 448. So a product is a multiple of 2^-18, and a sum over one 128-wide block
needs at most 43 bits: FP64 holds it exactly. Blocks are added in ascending order. FP32 operands have no such blocks:
`sliced_gemm` and `ordered_gemm` are for the FP32 side of a contract.

Operations on codes multiply exactly here, and on tensor cores where there are any (`kernels.hopper_gemm`):

    forward_gemm          Y  = X W^T      rows of X,  tiles of W
    input_gradient_gemm   dX = dY W       rows of dY, tiles of W^T
    weight_gradient_gemm  dW = dY^T X     columns of dY, columns of X"""

import torch
from torch import Tensor

from fp8core.numerics.dispatch import with_kernel
from fp8core.numerics.e4m3 import Codes, decode
from fp8core.numerics.recipe import TILE

OUTPUT_MULTIPLE = 64
"""DeepGEMM writes so many columns at once: on a GPU the width of a product is a multiple."""

_CACHED_ROWS = 128
_CACHED_COLUMNS = 512


def block_gemm(
    left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor | None, block: int = TILE
) -> Tensor:
    """`left @ right.T`, FP64 [M, N], with one scale per row and block of the contraction, each block exact.

    Operands are grid values [M, K] and [N, K], or such times powers of two. Scales are FP32 [M, ceil(K / block)] and
    [N, ceil(K / block)], or None for 1."""
    wide = left.double()
    factors = left_scales.double()
    total = torch.empty(left.shape[0], right.shape[0], dtype=torch.float64)
    # So much of a sum and of a block's product stays in the cache.
    for first in range(0, right.shape[0], _CACHED_COLUMNS):
        columns = slice(first, first + _CACHED_COLUMNS)
        weights = right[columns].double().t()
        others = None if right_scales is None else right_scales[columns].double().t()
        for start in range(0, left.shape[0], _CACHED_ROWS):
            rows = slice(start, start + _CACHED_ROWS)
            _add_blocks(total[rows, columns], wide[rows], factors[rows], weights, others, block)
    return total


def _add_blocks(total: Tensor, left: Tensor, factors: Tensor, right: Tensor, others: Tensor | None, block: int) -> None:
    for b in range(factors.shape[1]):
        inner = slice(b * block, (b + 1) * block)
        product = left[:, inner] @ right[inner]
        product *= factors[:, b, None]
        if others is not None:
            product *= others[b]
        # Two operations: a fused one would round differently in vectors and in what is left over.
        if b == 0:
            total.copy_(product)
        else:
            total += product


def scaled_gemm(left: Tensor, right: Tensor, block: int = TILE) -> Tensor:
    """`block_gemm`, bit for bit, of FP64 operands that are already multiplied by their power-of-two scales."""
    total = left[:, :block] @ right[:, :block].t()
    for start in range(block, left.shape[1], block):
        columns = slice(start, start + block)
        total += left[:, columns] @ right[:, columns].t()
    return total


def align_rows(x: Tensor, bits: int) -> Tensor:
    """Round each row of FP64 [..., K] to a fixed-point grid of `bits` bits below its largest magnitude.

    Sums of products of aligned rows are exact in FP64 as long as bits_left + bits_right + log2(K) <= 53. An element's
    error is at most 2^-bits of the row's amax."""
    amax = x.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny * 2.0**60)
    _, exponent = torch.frexp(amax)
    magic = torch.ldexp(torch.full_like(amax, 1.5), exponent + (52 - bits))
    return (x + magic).sub_(magic)


def aligned_gemm(left: Tensor, right_aligned: Tensor) -> Tensor:
    """`left @ right.T`, FP64 [M, N], of BF16 or FP32 [M, K] and FP64 [N, K] from `align_rows(right,
    alignment_bits(K))`."""
    return align_rows(left.double(), alignment_bits(left.shape[-1])) @ right_aligned.t()


def sliced_gemm(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right^T` of FP32 [..., M, K] and [..., N, K], FP64 [..., M, N], equal for any order of summation.

    Each operand is cut into two slices on fixed-point grids, whose four products are exact in FP64 (Ozaki et al.,
    "Error-free transformations of matrix multiplication", 2012). The rest is below the rounding of FP32."""
    bits = alignment_bits(left.shape[-1])
    (high, low), (other_high, other_low) = _slices(left.double(), bits), _slices(right.double(), bits)
    cross_terms = high @ other_low.mT + low @ other_high.mT
    return high @ other_high.mT + (cross_terms + low @ other_low.mT)


def _slices(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    high = align_rows(x, bits)
    return high, align_rows(x - high, bits)


def ordered_gemm(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right`, FP64, added up in the order of the contraction: zeros at either end change nothing. For keys, of
    which a batch has more or fewer."""
    total = left.new_zeros(*left.shape[:-1], right.shape[-1])
    for k in range(left.shape[-1]):
        # Two operations: a fused one would round differently in vectors and in what is left over.
        total += left[..., k, None] * right[..., k, None, :]
    return total


def alignment_bits(contraction: int) -> int:
    """Bits of each operand with which a dot of this length is exact in FP64's 53 bits."""
    return (53 - max(contraction - 1, 1).bit_length()) // 2


@with_kernel("hopper_gemm")
def forward_gemm(x: Codes, weight: Codes) -> Tensor:
    """X W^T, BF16 [tokens, out], of X [tokens, in] in 1 x 128 groups, scales column-major, and W [out, in] in tiles. On
    a GPU `in` is a multiple of 16."""
    codes, scales = weight
    by_row = scales.repeat_interleave(TILE, dim=0)[: codes.shape[0]]
    return _code_gemm(x, (codes, by_row)).bfloat16()


@with_kernel("hopper_gemm")
def bf16_gemm(x: Tensor, weight: Tensor) -> Tensor:
    """X W^T, BF16 [tokens, out]: a row depends on its own row of X alone. FP64 sums: another order changes a result
    with probability about 2^-40."""
    return (x.double() @ weight.double().t()).bfloat16()


def input_gradient_gemm(grad: Codes, transposed: Codes) -> Tensor:
    """dY W, BF16 [tokens, in], of dY [tokens, out] and the weight's own tiles (`transpose`)."""
    return forward_gemm(grad, transposed)


@with_kernel("hopper_gemm")
def weight_gradient_gemm(grad: Codes, x: Codes, total: Tensor | None = None) -> Tensor:
    """dY^T X, FP32 [out, in], of dY^T [out, tokens] and X^T [in, tokens] in groups along the tokens, added to `total`
    in place. On a GPU the number of tokens is a multiple of 16."""
    return _add(_code_gemm(grad, x).float(), total)


def fp32_product(left: Tensor, right: Tensor, total: Tensor | None = None) -> Tensor:
    """left @ right of BF16 matrices, with FP32 sums, added to FP32 `total` in place."""
    if not left.is_cuda:
        return _add(left.float() @ right.float(), total)
    if total is None:
        return torch.mm(left, right, out_dtype=torch.float32)
    # One kernel reads and writes the total; a product of its own would be written, and both read again.
    return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)


def _add(product: Tensor, total: Tensor | None) -> Tensor:
    return product if total is None else total.add_(product)


@with_kernel("quantise")
def transpose(weight: Codes) -> Codes:
    """The tiles of W, or of each of several, as those of W^T: nothing is quantised again."""
    codes, scales = weight
    return codes.view(torch.uint8).mT.contiguous().view(torch.float8_e4m3fn), scales.mT.contiguous()


def _code_gemm(left: Codes, right: Codes) -> Tensor:
    return block_gemm(decode(left[0]), left[1], decode(right[0]), right[1])
