"""RMSNorm, rotary positions and SwiGLU, rounded where Hopper engines round them.

Reductions run in FP64 and are rounded to BF16 afterwards: the order of summation shows in a result with probability
about 2^-40 an element. Exponentials run in FP64 because torch's vector and scalar FP32 forms differ in the last bit.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from fp8core.numerics.e4m3 import round_to_e4m3
from fp8core.numerics.gemm import align_rows
from fp8core.numerics.recipe import E4M3_MAX

Rounding = Callable[[Tensor], Tensor]
_FP16_MAX = 65504.0


class _PassedThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: Rounding) -> Tensor:
        return rounding(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


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


def keep_fp32(x: Tensor) -> Tensor:
    return x.float()


def round_to_bf16(x: Tensor) -> Tensor:
    """BF16 values of any float type (FP64 by way of FP32), held in FP32; the gradient passes through."""
    return _passed_through(x, lambda values: values.to(torch.bfloat16).float())


@dataclass(frozen=True)
class RoundingPoints:
    """Values rounded inside an operation, on the way to a result that is rounded in any case.

    Attributes:
        sums: the residual sum that a norm reads.
        normalised: x / rms, before its weight.
        tables: cosines and sines of the rotary positions.
        activated, expert_activated: silu(gate), before its product with up, outside and inside experts.
        weights: exp(score - maximum) of BF16 attention, before its product with V.
        routed: the router's logits, before experts are chosen and weighted.
        gates: the weights of the chosen experts, where these sum to 1."""

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
# (silu_mul_per_token_group_quant_fp8_colmajor, a BF16 gate).
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
    """`x / scale` on the E4M3 grid, FP64; saturated elements get no gradient, the others 1 / scale."""
    grid: Tensor = _ToE4m3Grid.apply(x, scale)  # type: ignore[no-untyped-call]
    return grid


def to_fixed_point(x: Tensor, bits: int) -> Tensor:
    """Round FP64 values of magnitude <= 1 to multiples of 2^-bits, so that sums of 2^(52 - bits) of them are exact."""
    magic = 1.5 * 2.0 ** (52 - bits)
    return _passed_through(x, lambda values: (values + magic).sub_(magic))


def to_fp16(x: Tensor) -> Tensor:
    """FP16 values, saturated, in FP64; the gradient passes through."""
    return _passed_through(x, _fp16)


def to_fp16_rows(x: Tensor, bits: int) -> Tensor:
    """`to_fp16` on a grid of so many bits below the largest magnitude of a row (`gemm.align_rows`)."""
    return _passed_through(x, lambda values: align_rows(_fp16(values), bits))


def _fp16(x: Tensor) -> Tensor:
    return x.clamp(-_FP16_MAX, _FP16_MAX).float().half().double()


def _passed_through(x: Tensor, rounding: Rounding) -> Tensor:
    rounded: Tensor = _PassedThrough.apply(x, rounding)  # type: ignore[no-untyped-call]
    return rounded


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, rounding: Rounding, inner: Rounding) -> Tensor:
        wide = x.double()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        normed = inner(wide * inverse)
        ctx.save_for_backward(normed, weight, inverse.float())
        return rounding(normed * weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        normed, weight, inverse = ctx.saved_tensors
        scaled = grad * weight
        grad_x = inverse * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
        grad_weight = (grad * normed).reshape(-1, weight.shape[0]).sum(0)
        return grad_x, grad_weight, None, None, None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, rounding: Rounding, inner: Rounding) -> Tensor:
        wide = gate.double()
        sigmoid = torch.reciprocal(1 + torch.exp(-wide))
        activated = inner(wide * sigmoid)
        ctx.save_for_backward(gate, up, sigmoid.float(), activated)
        return rounding(activated * up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gate, up, sigmoid, activated = ctx.saved_tensors
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        return grad * up * slope, grad * activated, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, rounding: Rounding, inner: Rounding) -> Tensor:
    """RMSNorm (arXiv 1910.07467, equation 4) of FP32 [..., n], with weights FP32 [n]; `inner` rounds before the
    weight."""
    y: Tensor = _RmsNorm.apply(x, weight, eps, rounding, inner)  # type: ignore[no-untyped-call]
    return y


def swiglu(gate: Tensor, up: Tensor, rounding: Rounding, inner: Rounding) -> Tensor:
    """silu(gate) * up (arXiv 2002.05202), FP32 [..., n]; `inner` rounds silu(gate)."""
    y: Tensor = _SwiGlu.apply(gate, up, rounding, inner)  # type: ignore[no-untyped-call]
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor, rounding: Rounding) -> Tensor:
    """Rotary positions (arXiv 2104.09864) of FP32 [B, heads, T, d], half-split as in Hugging Face; cos and sin are FP32
    [B, 1, T, d / 2]."""
    first, second = x.chunk(2, dim=-1)
    return rounding(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
