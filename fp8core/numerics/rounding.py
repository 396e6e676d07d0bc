"""Roundings that a gradient passes through (straight-through estimators, Bengio et al., arXiv 1308.3432)."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from fp8core.numerics.e4m3 import E4M3_MAX, round_to_e4m3

Rounding = Callable[[Tensor], Tensor]


class _RoundToBf16(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _ToE4m3Grid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        scaled = x.float() / scale
        ctx.scale = scale
        ctx.save_for_backward(scaled.abs() <= E4M3_MAX)
        return round_to_e4m3(scaled).double()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (inside,) = ctx.saved_tensors
        return grad * inside / ctx.scale, None


class _ToFixedPoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bits: int) -> Tensor:
        magic = 1.5 * 2.0 ** (52 - bits)
        return (x + magic).sub_(magic)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def keep_fp32(x: Tensor) -> Tensor:
    """The rounding of the FP32 reference mode: to FP32, and no further."""
    return x.float()


def round_to_bf16(x: Tensor) -> Tensor:
    """BF16 values of `x` (any float type, FP64 by way of FP32), held in FP32; the gradient passes through."""
    rounded: Tensor = _RoundToBf16.apply(x)  # type: ignore[no-untyped-call]
    return rounded


@dataclass(frozen=True)
class RoundingPoints:
    """Values rounded inside an operation, on the way to a result that is rounded in any case.

    Attributes:
        name: of the whole.
        sums: the residual sum that a norm reads; what later layers read of it is rounded in any case.
        normalised: x / rms, before its weight.
        tables: cosines and sines of the rotary positions.
        activated: silu(gate), before its product with up, outside experts.
        expert_activated: the same in experts, which one kernel computes whoever compiles the rest.
        weights: exp(score - maximum) of BF16 attention, before its product with V.
        routed: the router's logits, before experts are chosen and weighted.
        gates: the weights of the chosen experts, where these sum to 1.
    """

    name: str
    sums: Rounding
    normalised: Rounding
    tables: Rounding
    activated: Rounding
    expert_activated: Rounding
    weights: Rounding
    routed: Rounding
    gates: Rounding


def _points(name: str, *rounded: str) -> RoundingPoints:
    places = [field.name for field in fields(RoundingPoints) if field.name != "name"]
    assert set(rounded) <= set(places)
    return RoundingPoints(name, **{place: round_to_bf16 if place in rounded else keep_fp32 for place in places})


# Kernels of experts and routers stay unfused, compiled or not: on a GPU vLLM's own
# (silu_mul_per_token_group_quant_fp8_colmajor, a BF16 gate), on a CPU `rollout.vllm.in_place.InPlaceExperts`.
_EXPERTS = ("expert_activated", "routed")
NOWHERE = _points("nowhere")
STEPWISE = _points("stepwise", "sums", "normalised", "activated", "expert_activated", "weights")
# vLLM's definitions in torch, each operation by itself, and its attention and its softmax over experts for CPUs.
NATIVE = _points("native", "normalised", "tables", "activated", *_EXPERTS, "gates")
# One kernel each for norm, rotary positions and SwiGLU, as vLLM's CUDA sources have them (csrc/libtorch_stable), and
# FlashAttention.
KERNELS = _points("kernels", "sums", "tables", "activated", "weights", *_EXPERTS)
# Values that torch.compile fuses stay FP32 inside a kernel; the rotary tables lie in memory as BF16.
FUSED = _points("fused", "tables", "weights", *_EXPERTS)


def to_e4m3_grid(x: Tensor, scale: float) -> Tensor:
    """`x / scale` on the E4M3 grid, FP64; saturated elements get no gradient, the others 1 / scale.

    Args:
        x: any float type, any shape.
        scale: positive and finite.
    """
    grid: Tensor = _ToE4m3Grid.apply(x, scale)  # type: ignore[no-untyped-call]
    return grid


def to_fixed_point(x: Tensor, bits: int) -> Tensor:
    """Round FP64 values of magnitude <= 1 to multiples of 2^-bits, so that sums of 2^(52 - bits) of them are exact."""
    fixed: Tensor = _ToFixedPoint.apply(x, bits)  # type: ignore[no-untyped-call]
    return fixed
