"""Matrix products whose result does not depend on the order of summation.

E4M3 values are multiples of 2^-9 up to 448, so a product is a multiple of 2^-18 and a sum over one 128-wide block
needs at most 43 bits: FP64 holds it exactly, in any order, for any batch. Blocks are added in ascending order. That
is why a prompt alone, in a batch of 64, decoded with a cache or scored in one pass, gives the same bits.
"""

import torch
from torch import Tensor

from fp8core.numerics.e4m3 import TILE


def block_gemm(left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor, block: int = TILE) -> Tensor:
    """`left @ right.T` with one scale per row and block of the contraction, accumulated exactly per block.

    Args:
        left: grid values [M, K], FP32 or FP64.
        left_scales: FP32 [M, ceil(K / block)].
        right: grid values [N, K], FP32 or FP64.
        right_scales: FP32 [N, ceil(K / block)] (tile scales repeated over the rows of their tile).
        block: width of a block.

    Returns:
        FP64 [M, N].
    """
    total = torch.zeros(left.shape[0], right.shape[0], dtype=torch.float64)
    for b in range(left_scales.shape[1]):
        columns = slice(b * block, (b + 1) * block)
        partial = left[:, columns].double() @ right[:, columns].double().t()
        total += partial * left_scales[:, b, None].double() * right_scales[:, b].double()
    return total


def scaled_gemm(left: Tensor, right: Tensor, block: int = TILE) -> Tensor:
    """`left @ right.T` for operands that are already multiplied by their power-of-two scales.

    Within one block every product carries the same power of two, so the block's dot stays exact in FP64 and the
    scales cost nothing in the inner loop. Equal to `block_gemm` bit for bit when all scales are powers of two.

    Args:
        left: FP64 [M, K], grid * scale.
        right: FP64 [N, K], grid * scale.
        block: width of a block.

    Returns:
        FP64 [M, N].
    """
    total = left[:, :block] @ right[:, :block].t()
    for start in range(block, left.shape[1], block):
        columns = slice(start, start + block)
        total += left[:, columns] @ right[:, columns].t()
    return total


def align_rows(x: Tensor, bits: int) -> Tensor:
    """Round each row to a fixed-point grid of `bits` bits below its largest magnitude.

    Products of aligned rows are integers times a common power of two, so their sums are exact in FP64 whatever the
    order, as long as bits_left + bits_right + log2(K) <= 53. An element's error is at most 2^-bits of the row's amax.
    Products of BF16 data lose less by it than by FP32 accumulation, because most elements lie on the grid; those of
    FP32 data lose more.

    Args:
        x: FP64 [..., K].
        bits: bits kept below the leading one.

    Returns:
        FP64 of the same shape.
    """
    amax = x.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny * 2.0**60)
    _, exponent = torch.frexp(amax)
    magic = torch.ldexp(torch.full_like(amax, 1.5), exponent + (52 - bits))
    return (x + magic).sub_(magic)


def aligned_gemm(left: Tensor, right_aligned: Tensor) -> Tensor:
    """`left @ right.T` of BF16 or FP32 operands that are put on fixed-point grids and then summed exactly.

    Args:
        left: [M, K], any float type.
        right_aligned: FP64 [N, K] from `align_rows(right, alignment_bits(K))`.

    Returns:
        FP64 [M, N], equal for any order of summation.
    """
    return align_rows(left.double(), alignment_bits(left.shape[-1])) @ right_aligned.t()


def alignment_bits(contraction: int) -> int:
    """Bits each operand may keep so that a dot of this length is exact in FP64's 53 bits."""
    return (53 - max(contraction - 1, 1).bit_length()) // 2
