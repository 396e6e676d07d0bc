"""RMSNorm, rotary positions and SwiGLU, rounded where Hopper engines round them.

Reductions run in FP64 and are rounded to BF16 afterwards: the order of summation shows in a result with probability
about 2^-40 an element. Exponentials run in FP64 because torch's vector and scalar FP32 forms differ in the last bit.
`rounding` is `round_to_bf16`, or `keep_fp32` in the reference mode; `rounding.RoundingPoints` lists what is rounded on
the way to a result.
"""

import math
from typing import Any

import torch
from torch import Tensor

from fp8core.numerics.rounding import Rounding


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
    """RMSNorm over the last dimension (arXiv 1910.07467, equation 4).

    Args:
        x: FP32 [..., n].
        weight: FP32 [n].
        eps: added to the mean square.
        rounding: output format.
        inner: of the normalised values before the weight.
    """
    y: Tensor = _RmsNorm.apply(x, weight, eps, rounding, inner)  # type: ignore[no-untyped-call]
    return y


def swiglu(gate: Tensor, up: Tensor, rounding: Rounding, inner: Rounding) -> Tensor:
    """silu(gate) * up (arXiv 2002.05202), `inner` rounds the activation before the product; all FP32 [..., n]."""
    y: Tensor = _SwiGlu.apply(gate, up, rounding, inner)  # type: ignore[no-untyped-call]
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor, rounding: Rounding) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864) in the half-split layout of Hugging Face.

    Args:
        x: FP32 [B, heads, T, d].
        cos: FP32 [B, 1, T, d / 2].
        sin: FP32 [B, 1, T, d / 2].
        rounding: output format.
    """
    first, second = x.chunk(2, dim=-1)
    return rounding(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))


def inverse_frequencies(dim: int, theta: float) -> Tensor:
    """FP32 [d / 2]: theta^(-2i / d)."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)


def scale_frequencies(frequencies: Tensor, factor: float, low: float, high: float, original: int) -> Tensor:
    """Llama 3.1's context extension: long wavelengths are divided by `factor`, with a smooth band between.

    Args:
        frequencies: FP32 [d / 2].
        factor: stretch of the context.
        low: `low_freq_factor`; wavelengths above original / low are stretched in full.
        high: `high_freq_factor`; wavelengths below original / high are left alone.
        original: context length the model was trained with.
    """
    wavelengths = 2 * math.pi / frequencies
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / factor + smooth * frequencies
