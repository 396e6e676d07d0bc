"""How far a quantised product is from the true one, and which part of that is the order of summation."""

from dataclasses import dataclass

from torch import Tensor

from fp8core.numerics.e4m3 import TILE, ScaleRule, quantise_rows, quantise_tiles
from fp8core.numerics.gemm import block_gemm, hardware_gemm


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


def relative_rms(x: Tensor, reference: Tensor) -> float:
    """Root mean square of x - reference over that of the reference, in FP64; any shape, the reference not all zero."""
    wide = reference.double()
    return ((x.double() - wide).square().mean() / wide.square().mean()).sqrt().item()


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
    left_grid, left_scales = quantise_rows(left, rule, block)
    right_grid, tile_scales = quantise_tiles(right, rule, block)
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
