"""Errors of block-FP8 products, and what part of them is the order of summation.

`hardware_gemm` follows the order of Hopper's kernels for comparison: as independent of the batch as the program's own
order, but rounded to FP32 at every block. `quantise_tensor` is the scale that a block is compared with.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8core.numerics.e4m3 import quantise_rows, quantise_tiles, round_to_e4m3, scale_from_amax
from fp8core.numerics.gemm import block_gemm, relative_rms
from fp8core.numerics.recipe import TILE, Grouping, ScaleRule


def quantise_tensor(x: Tensor, rule: ScaleRule) -> tuple[Tensor, Tensor]:
    """Quantise with one scale for the whole tensor.

    Args:
        x: FP32, any shape with at least one element.
        rule: scale rule.

    Returns:
        grid: FP32 of the same shape, on the E4M3 grid.
        scale: FP32 scalar [].
    """
    scale = scale_from_amax(x.abs().amax(), rule)
    return round_to_e4m3(x / scale), scale


def hardware_gemm(left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor, block: int = TILE) -> Tensor:
    """`left @ right.T` in the order of Hopper's kernels: one FP32 FMA per block, blocks ascending.

    For each block, `acc = fma(left_scale * right_scale, partial, acc)` in FP32, the product of the scales rounded to
    FP32 first (DeepGEMM `sm90_fp8_gemm_1d2d.cuh`). Assumption: the tensor cores' partial of a block is the exact dot
    rounded once to FP32. Real ones keep about 14 bits inside a block (DeepSeek-V3, arXiv 2412.19437, section 3.5.2),
    in an order that is not documented. So this is a lower bound of their error, not their bytes.

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

    The product has 48 bits and is exact in FP64. Rounding its FP64 sum with c a second time would be wrong in about 1
    in 2^29 random sums. There the FP64 sum falls on a midpoint of FP32 that the exact one only comes near. Therefore
    the FP64 sum is rounded to odd (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008). The
    rounding of that to FP32 is the rounding of the exact sum.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    back = total - product
    # Knuth's TwoSum: what the addition lost, exactly.
    lost = (product - (total - back)) + (addend - back)
    even = (total.view(torch.int64) & 1) == 0
    towards = torch.where(lost > 0, torch.inf, -torch.inf).to(total)
    return torch.where((lost != 0) & even, torch.nextafter(total, towards), total).float()


@dataclass(frozen=True)
class GemmError:
    """Distances of block-FP8 products, as relative RMS errors.

    Attributes:
        exact: exact accumulation, from the FP64 product of the operands before quantisation.
        hardware: Hopper's order, from the same.
        plain_fp32: FP32 matrix product of the dequantised operands, from the same.
        hardware_order: Hopper's order, from exact accumulation of the same codes.
        plain_fp32_order: the FP32 matrix product, from exact accumulation of the same codes.
        bf16_differing: share of elements whose BF16 roundings differ between Hopper's order and the exact one.
    """

    exact: float
    hardware: float
    plain_fp32: float
    hardware_order: float
    plain_fp32_order: float
    bf16_differing: float


def gemm_error(left: Tensor, right: Tensor, rule: ScaleRule, block: int = TILE) -> GemmError:
    """Errors of `left @ right.T` in block FP8.

    Args:
        left: FP32 [M, K], quantised in 1 x `block` groups (activations).
        right: FP32 [N, K], quantised in `block` x `block` tiles (weights).
        rule: scale rule.
        block: width of a group.

    Raises:
        GroupNotFinite: an operand holds NaN or infinity.
    """
    left_grid, left_scales = quantise_rows(left, Grouping(1, block, rule))
    right_grid, tile_scales = quantise_tiles(right, Grouping(block, block, rule))
    right_scales = tile_scales.repeat_interleave(block, dim=0)[: right.shape[0]]
    exact = block_gemm(left_grid, left_scales, right_grid, right_scales, block)
    hardware = hardware_gemm(left_grid, left_scales, right_grid, right_scales, block)
    plain = _dequantised(left_grid, left_scales, block) @ _dequantised(right_grid, right_scales, block).t()
    true = left.double() @ right.double().t()
    return GemmError(
        exact=relative_rms(exact, true),
        hardware=relative_rms(hardware, true),
        plain_fp32=relative_rms(plain, true),
        hardware_order=relative_rms(hardware, exact),
        plain_fp32_order=relative_rms(plain, exact),
        bf16_differing=(hardware.bfloat16() != exact.float().bfloat16()).double().mean().item(),
    )


def _dequantised(grid: Tensor, scales: Tensor, block: int) -> Tensor:
    return grid * scales.repeat_interleave(block, dim=1)[:, : grid.shape[1]]
