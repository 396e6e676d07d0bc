"""GEMMs on block-FP8 codes: on Hopper's tensor cores, and exactly where there are none.

    forward_gemm          Y  = X W^T      rows of X,  tiles of W           DeepGEMM, or cuBLASLt without it
    input_gradient_gemm   dX = dY W       rows of dY, tiles of W^T         the same kernel
    weight_gradient_gemm  dW = dY^T X     columns of dY, columns of X      cuBLASLt, FP32 out

vLLM multiplies with DeepGEMM; a trainer that calls the same kernel gets the same bits, whatever the number of rows
(one FP32 accumulator an element, promoted every 128 of the contraction, no split of it). With powers of two as scales
cuBLASLt's block GEMM gives these bits as well (docs/numerics.md), so it stands in where DeepGEMM is not installed.

The references multiply codes exactly (`numerics.gemm`); they are what runs on a CPU.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, pad, scaled_mm

from fp8core.numerics.block_codes import Codes
from fp8core.numerics.e4m3 import TILE, decode
from fp8core.numerics.gemm import block_gemm
from fp8core.numerics.kernel_choice import has_kernels

_ROWS, _TILES = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
_SCALE_PITCH = 4


def forward_gemm(x: Codes, weight: Codes) -> Tensor:
    """X W^T.

    Args:
        x: codes [tokens, in] in 1 x 128 groups; scales [tokens, ceil(in / 128)], column-major.
        weight: codes [out, in] in 128 x 128 tiles; scales [ceil(out / 128), ceil(in / 128)].

    Returns:
        BF16 [tokens, out]. On a GPU `in` is a multiple of 128, `out` one of 64.
    """
    if not has_kernels(x[0]):
        return _exact(x, (weight[0], _by_row(weight))).bfloat16()
    if (library := deep_gemm()) is None:
        return _scaled_mm(x, _ROWS, weight, _TILES, torch.bfloat16)
    y = torch.empty(x[0].shape[0], weight[0].shape[0], dtype=torch.bfloat16, device=x[0].device)
    # Scales stay FP32 on Hopper; the cast is for later hardware.
    library.fp8_gemm_nt(x, weight, y, disable_ue8m0_cast=True)
    return y


def input_gradient_gemm(grad: Codes, transposed: Codes) -> Tensor:
    """dY W.

    Args:
        grad: codes [tokens, out] in 1 x 128 groups, scales [tokens, ceil(out / 128)], column-major.
        transposed: the weight's own tiles, codes [in, out] and scales [ceil(in / 128), ceil(out / 128)] (`transpose`).

    Returns:
        BF16 [tokens, in].
    """
    return forward_gemm(grad, transposed)


def weight_gradient_gemm(grad: Codes, x: Codes) -> Tensor:
    """dY^T X.

    Args:
        grad: codes of dY^T, [out, tokens] in 1 x 128 groups along the tokens; scales [out, ceil(tokens / 128)].
        x: likewise of X^T, [in, tokens].

    Returns:
        FP32 [out, in]. On a GPU the number of tokens is a multiple of 16.
    """
    if not has_kernels(grad[0]):
        return _exact(grad, x).float()
    return _scaled_mm(grad, _ROWS, x, _ROWS, torch.float32)


def fp32_product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right of BF16 matrices, with FP32 sums and an FP32 result."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def transpose(weight: Codes) -> Codes:
    """The tiles of W as those of W^T: nothing is quantised again."""
    codes, scales = weight
    return codes.view(torch.uint8).t().contiguous().view(torch.float8_e4m3fn), scales.t().contiguous()


def _scaled_mm(left: Codes, left_type: ScalingType, right: Codes, right_type: ScalingType, out: torch.dtype) -> Tensor:
    """cuBLASLt's left @ right^T, which wants the scales of tiles padded along the contraction."""
    scales = right[1]
    if right_type == _TILES:
        scales = pad(scales, (0, -scales.shape[1] % _SCALE_PITCH)).t()
    return scaled_mm(
        left[0], right[0].t(), left[1], left_type, scales, right_type, output_dtype=out, use_fast_accum=False
    )


def _exact(left: Codes, right: Codes) -> Tensor:
    """FP64 left @ right^T of codes with a scale for each row and 128 of the contraction."""
    return block_gemm(decode(left[0]), left[1], decode(right[0]), right[1])


def _by_row(weight: Codes) -> Tensor:
    codes, scales = weight
    return scales.repeat_interleave(TILE, dim=0)[: codes.shape[0]]


@cache
def deep_gemm() -> Any | None:
    """DeepGEMM, its own package or the one inside vLLM; vLLM prefers the former as well."""
    for name in ("deep_gemm", "vllm.third_party.deep_gemm"):
        if find_spec(name.partition(".")[0]) is not None:
            return import_module(name)
    return None
