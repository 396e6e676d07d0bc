"""GEMMs on Hopper's tensor cores: block-FP8 codes by DeepGEMM or cuBLASLt, and the BF16 output head.

vLLM multiplies with DeepGEMM: the same kernel gives the same bits, whatever the number of rows. An element has one FP32
accumulator, promoted every 128 of the contraction. With powers of two as scales cuBLASLt's block GEMM gives these bits
as well and stands in where DeepGEMM is not installed."""

import threading
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, pad, scaled_mm

from fp8core.numerics.e4m3 import Codes
from fp8core.numerics.grouped import ExpertRows
from fp8core.numerics.recipe import TILE

DEEP_GEMM_DISTRIBUTIONS = ("deep_gemm", "vllm", "sgl-deep-gemm")
"""Each brings DeepGEMM: its own package, the one inside vLLM's, SGLang's build of it."""
_DEEP_GEMM_MODULES = ("deep_gemm", "vllm.third_party.deep_gemm")
_ROWS = ScalingType.BlockWise1x128
_TILES = ScalingType.BlockWise128x128
_SCALE_PITCH = 4
_thread = threading.local()


def forward_gemm(x: Codes, weight: Codes) -> Tensor:
    if (library := _deep_gemm_on(x[0].device)) is None:
        return _scaled_mm(x, _ROWS, weight, _TILES, torch.bfloat16)
    y = torch.empty(x[0].shape[0], weight[0].shape[0], dtype=torch.bfloat16, device=x[0].device)
    # Scales stay FP32 on Hopper; the cast is for later hardware.
    library.fp8_gemm_nt(x, weight, y, disable_ue8m0_cast=True)
    return y


def grouped_gemm(x: Codes, weights: Codes, rows: ExpertRows) -> Tensor:
    y = torch.empty(x[0].shape[0], weights[0].shape[1], dtype=torch.bfloat16, device=x[0].device)
    # Of rows that belong to no expert nothing is multiplied: zeros are written.
    _grouping_library(rows).m_grouped_fp8_gemm_nt_contiguous(x, weights, y, rows.owners, disable_ue8m0_cast=True)
    return y


def grouped_bf16_gemm(x: Tensor, weights: Tensor, rows: ExpertRows) -> Tensor:
    y = torch.empty(x.shape[0], weights.shape[1], dtype=torch.bfloat16, device=x.device)
    _grouping_library(rows).m_grouped_bf16_gemm_nt_contiguous(x, weights, y, rows.owners)
    return y


def grouped_bf16_input_gradient(grad: Tensor, weights: Tensor, rows: ExpertRows) -> Tensor:
    of_input = torch.empty(grad.shape[0], weights.shape[2], dtype=torch.bfloat16, device=grad.device)
    _grouping_library(rows).m_grouped_bf16_gemm_nn_contiguous(grad, weights, of_input, rows.owners)
    return of_input


def grouped_bf16_weight_gradient(grad: Tensor, x: Tensor, rows: ExpertRows, total: Tensor) -> Tensor:
    library, counts = _grouping_library(rows), rows.counts
    tokens = sum(counts)
    library.k_grouped_bf16_gemm_tn_contiguous(grad[:tokens], x[:tokens], total, counts, rows.sizes, total, "mn")
    return total


def _grouping_library(rows: ExpertRows) -> Any:
    """DeepGEMM, with tiles as high as the groups of rows."""
    library = _deep_gemm_on(rows.owners.device)
    assert library is not None, "experts need DeepGEMM"
    library.set_mk_alignment_for_contiguous_layout(rows.multiple)
    return library


def weight_gradient_gemm(grad: Codes, x: Codes, total: Tensor | None = None) -> Tensor:
    if (library := _deep_gemm_on(grad[0].device)) is None:
        product = _scaled_mm(grad, _ROWS, x, _ROWS, torch.float32)
        return product if total is None else total.add_(product)
    if total is None:
        # On Hopper this product has to be added to something.
        total = torch.zeros(grad[0].shape[0], x[0].shape[0], device=grad[0].device)
    # One kernel for all numbers of tokens: the shape of the weight alone is compiled in.
    options = {"recipe": (1, 1, TILE), "compiled_dims": "mn", "disable_ue8m0_cast": True}
    library.fp8_gemm_nt(grad, x, total, c=total, **options)
    return total


def head_logits(hidden: Tensor, weight: Tensor, output: torch.dtype = torch.float32) -> Tensor:
    """FP32 sums in an order that does not depend on the number of rows."""
    if (library := _deep_gemm_on(hidden.device)) is None:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32).to(output).float()
    logits = torch.empty(hidden.shape[0], weight.shape[0], device=hidden.device)
    library.bf16_gemm_nt(hidden, weight, logits)
    return logits.to(output).float()


def bf16_gemm(x: Tensor, weight: Tensor) -> Tensor:
    """Sums in the same order for every number of rows, by DeepGEMM."""
    library = _deep_gemm_on(x.device)
    assert library is not None, "layers in BF16 beside block FP8 need DeepGEMM"
    y = torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
    library.bf16_gemm_nt(x, weight, y)
    return y


@cache
def deep_gemm() -> Any | None:
    """Its own package or the one inside vLLM."""
    name = _deep_gemm_module()
    return None if name is None else import_module(name)


def has_deep_gemm() -> bool:
    """True if DeepGEMM is installed; nothing is imported."""
    return _deep_gemm_module() is not None


def _deep_gemm_module() -> str | None:
    return next((name for name in _DEEP_GEMM_MODULES if find_spec(name.partition(".")[0]) is not None), None)


def _deep_gemm_on(device: torch.device) -> Any | None:
    """DeepGEMM, in a thread that has the context of the device, which a kernel of torch binds."""
    # The thread of a backward that begins with a product has run none before.
    library = deep_gemm()
    if library is not None and not getattr(_thread, "has_context", False):
        torch.zeros(1, device=device)
        _thread.has_context = True
    return library


def _scaled_mm(left: Codes, left_type: ScalingType, right: Codes, right_type: ScalingType, out: torch.dtype) -> Tensor:
    """cuBLASLt's left @ right^T, which takes the scales of tiles padded along the contraction."""
    scales = right[1]
    if right_type == _TILES:
        scales = pad(scales, (0, -scales.shape[1] % _SCALE_PITCH)).t()
    return scaled_mm(
        left[0], right[0].t(), left[1], left_type, scales, right_type, output_dtype=out, use_fast_accum=False
    )
