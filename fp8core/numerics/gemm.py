"""Matrix products whose result does not depend on the order of summation.

E4M3 values are multiples of 2^-9 up to 448, so a product is a multiple of 2^-18 and a sum over one 128-wide block
needs at most 43 bits: FP64 holds it exactly, in any order, for any batch. Blocks are added in ascending order. That
is why a prompt alone, in a batch of 64, decoded with a cache or scored in one pass, gives the same bits.

`hardware_gemm` is the order of Hopper's block-FP8 kernels, for comparison: also independent of the batch, but rounded
to FP32 at every block.
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


def hardware_gemm(left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor, block: int = TILE) -> Tensor:
    """`left @ right.T` in the order of Hopper's kernels: one FP32 FMA per block, blocks ascending.

    For each block, `acc = fma(left_scale * right_scale, partial, acc)` in FP32, the product of the scales rounded to
    FP32 first (DeepGEMM `sm90_fp8_gemm_1d2d.cuh`). Assumption: the tensor cores' partial of a block is the exact dot
    rounded once to FP32. Real ones keep about 14 bits inside a block (DeepSeek-V3, arXiv 2412.19437, section 3.5.2),
    in an order that is not documented, so this is a lower bound of their error, not their bytes.

    Args:
        left: grid values [M, K], FP32 or FP64.
        left_scales: FP32 [M, ceil(K / block)].
        right: grid values [N, K], FP32 or FP64.
        right_scales: FP32 [N, ceil(K / block)].
        block: width of a block.

    Returns:
        FP32 [M, N].
    """
    total = torch.zeros(left.shape[0], right.shape[0])
    for b in range(left_scales.shape[1]):
        columns = slice(b * block, (b + 1) * block)
        partial = (left[:, columns].double() @ right[:, columns].double().t()).float()
        total = fused_multiply_add(left_scales[:, b, None] * right_scales[:, b], partial, total)
    return total


def fused_multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c rounded once to FP32, for finite FP32 tensors of one broadcast shape.

    The product has 48 bits and is exact in FP64. Rounding its FP64 sum with c a second time would be wrong where that
    sum falls on a midpoint of FP32 that the exact one only comes near (about 1 in 2^29 random sums); therefore the
    FP64 sum is rounded to odd (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008), after which
    the rounding to FP32 is that of the exact sum.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    back = total - product
    # Knuth's TwoSum: what the addition lost, exactly.
    lost = (product - (total - back)) + (addend - back)
    even = (total.view(torch.int64) & 1) == 0
    towards = torch.where(lost > 0, torch.inf, -torch.inf).to(total)
    return torch.where((lost != 0) & even, torch.nextafter(total, towards), total).float()


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
