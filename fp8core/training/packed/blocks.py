"""The linears of a layer with what is fused to them, forward and backward, in block FP8 and in BF16.

    norm_linear   total = x + added, y = norm(total) W^T
    linear        y = x W^T
    mlp           total = x + added, y = (silu(g) * u) D^T with [g, u] = norm(total) W^T

In block FP8 every activation is quantised where it is made: norm and SwiGLU write codes. For a pass with gradients, row
codes (for fprop) and column codes (for wgrad) come from one read. Column codes are all that is kept of an activation,
one byte an element. Gradients between blocks are BF16, those of weights FP32.

Without gradients (`torch.no_grad`) only row codes are made. Activations are BF16 [tokens, features].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fp8core.numerics.e4m3 import Codes, FiniteFlag, ScaleRule, row_and_column_codes, row_codes, tile_codes
from fp8core.numerics.fused import (
    add_norm,
    add_norm_backward,
    add_norm_codes,
    add_norm_row_codes,
    swiglu,
    swiglu_backward,
    swiglu_backward_codes,
    swiglu_codes,
    swiglu_row_codes,
)
from fp8core.numerics.gemm import forward_gemm, fp32_product, input_gradient_gemm, transpose, weight_gradient_gemm


class Norm(NamedTuple):
    """Weight FP32 [hidden] of BF16 values, and epsilon, of an RMSNorm."""

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class BlockWeight:
    """A weight as its block multiplies with it, made once an update.

    Attributes:
        master: [out, in], receives the gradient, FP32; its own values are not read.
        values: BF16 [out, in], or codes with tile scales.
        transposed: codes and scales of the transpose, of codes.
    """

    master: Tensor
    values: Tensor | Codes
    transposed: Codes | None


class Blocks(Protocol):
    """The linears of one format."""

    name: str

    def made(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Operands of these blocks, from whole tiles of rows of an FP32 master."""
        ...

    def ready(self, master: Tensor, made: Sequence[Tensor]) -> BlockWeight:
        """A weight of these blocks, from the operands of all its rows; `master` receives the gradient."""
        ...

    def norm_linear(self, x: Tensor, added: Tensor | None, norm: Norm, weight: BlockWeight) -> tuple[Tensor, Tensor]:
        """The residual stream x + added, and its norm times the weight."""
        ...

    def linear(self, x: Tensor, weight: BlockWeight) -> Tensor:
        """x times the weight."""
        ...

    def mlp(
        self, x: Tensor, added: Tensor | None, norm: Norm, gate_up: BlockWeight, down: BlockWeight
    ) -> tuple[Tensor, Tensor]:
        """The residual stream x + added, and the SwiGLU block of its norm."""
        ...


class Fp8Blocks:
    """E4M3 in all three GEMMs; NaN and infinity anywhere set `flag`."""

    name = "fp8_block"

    def __init__(self, rule: ScaleRule, flag: FiniteFlag) -> None:
        self._quantiser = _Quantiser(rule, flag)

    def made(self, rows: Tensor) -> tuple[Tensor, ...]:
        return tile_codes(rows.bfloat16(), *self._quantiser)

    def ready(self, master: Tensor, made: Sequence[Tensor]) -> BlockWeight:
        codes, scales = made
        return BlockWeight(master, (codes, scales), transpose((codes, scales)))

    def norm_linear(self, x: Tensor, added: Tensor | None, norm: Norm, weight: BlockWeight) -> tuple[Tensor, Tensor]:
        if not torch.is_grad_enabled():
            total, rows = add_norm_row_codes(x, added, *norm, *self._quantiser)
            return total, _forward(rows, weight)
        return _two(_NormLinear.apply(x, added, norm.weight, weight.master, weight, norm.eps, self._quantiser))  # type: ignore[no-untyped-call]

    def linear(self, x: Tensor, weight: BlockWeight) -> Tensor:
        if not torch.is_grad_enabled():
            return _forward(row_codes(x, *self._quantiser), weight)
        y: Tensor = _Linear.apply(x, weight.master, weight, self._quantiser)  # type: ignore[no-untyped-call]
        return y

    def mlp(
        self, x: Tensor, added: Tensor | None, norm: Norm, gate_up: BlockWeight, down: BlockWeight
    ) -> tuple[Tensor, Tensor]:
        if not torch.is_grad_enabled():
            total, rows = add_norm_row_codes(x, added, *norm, *self._quantiser)
            return total, _forward(swiglu_row_codes(_forward(rows, gate_up), *self._quantiser), down)
        weights = gate_up.master, down.master, gate_up, down
        return _two(_Mlp.apply(x, added, norm.weight, *weights, norm.eps, self._quantiser))  # type: ignore[no-untyped-call]


class Bf16Blocks:
    """BF16 operands, FP32 sums, BF16 results."""

    name = "bf16"

    def made(self, rows: Tensor) -> tuple[Tensor, ...]:
        return (rows.bfloat16(),)

    def ready(self, master: Tensor, made: Sequence[Tensor]) -> BlockWeight:
        (values,) = made
        return BlockWeight(master, values, None)

    def norm_linear(self, x: Tensor, added: Tensor | None, norm: Norm, weight: BlockWeight) -> tuple[Tensor, Tensor]:
        total, normed = _two(_AddNorm.apply(x, added, norm.weight, norm.eps))  # type: ignore[no-untyped-call]
        return total, self.linear(normed, weight)

    def linear(self, x: Tensor, weight: BlockWeight) -> Tensor:
        y: Tensor = _Bf16Linear.apply(x, weight.master, weight.values)  # type: ignore[no-untyped-call]
        return y

    def mlp(
        self, x: Tensor, added: Tensor | None, norm: Norm, gate_up: BlockWeight, down: BlockWeight
    ) -> tuple[Tensor, Tensor]:
        total, inner = self.norm_linear(x, added, norm, gate_up)
        activated: Tensor = _Swiglu.apply(inner)  # type: ignore[no-untyped-call]
        return total, self.linear(activated, down)


def norm_only(x: Tensor, added: Tensor | None, norm: Norm) -> Tensor:
    """norm(x + added), BF16: the end of the decoder."""
    return _two(_AddNorm.apply(x, added, norm.weight, norm.eps))[1]  # type: ignore[no-untyped-call]


class _Quantiser(NamedTuple):
    rule: ScaleRule
    flag: FiniteFlag


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, master: Tensor, weight: BlockWeight, quantiser: _Quantiser) -> Tensor:
        rows, columns = row_and_column_codes(x, *quantiser)
        ctx.save_for_backward(*columns)
        ctx.weight, ctx.quantiser = weight, quantiser
        return _forward(rows, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = _backward(grad, ctx.saved_tensors, ctx.weight, ctx.quantiser)
        return grad_x, grad_weight, None, None


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        added: Tensor | None,
        norm: Tensor,
        master: Tensor,
        weight: BlockWeight,
        eps: float,
        quantiser: _Quantiser,
    ) -> tuple[Tensor, Tensor]:
        total, rows, columns, inverse = add_norm_codes(x, added, norm, eps, *quantiser)
        ctx.save_for_backward(total, norm, inverse, *columns)
        ctx.weight, ctx.quantiser = weight, quantiser
        ctx.set_materialize_grads(False)
        return total, _forward(rows, weight)

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor | None, grad: Tensor) -> tuple[Tensor | None, ...]:
        total, norm, inverse, *columns = ctx.saved_tensors
        grad_normed, grad_weight = _backward(grad, columns, ctx.weight, ctx.quantiser)
        grad_x, grad_norm = add_norm_backward(grad_normed, grad_total, total, norm, inverse)
        return grad_x, _of_added(ctx, grad_x), grad_norm, grad_weight, None, None, None


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        added: Tensor | None,
        norm: Tensor,
        gate_up_master: Tensor,
        down_master: Tensor,
        gate_up: BlockWeight,
        down: BlockWeight,
        eps: float,
        quantiser: _Quantiser,
    ) -> tuple[Tensor, Tensor]:
        total, rows, columns, inverse = add_norm_codes(x, added, norm, eps, *quantiser)
        inner = _forward(rows, gate_up)
        inner_rows, inner_columns = swiglu_codes(inner, *quantiser)
        ctx.save_for_backward(total, norm, inverse, *columns, inner, *inner_columns)
        ctx.gate_up, ctx.down, ctx.quantiser = gate_up, down, quantiser
        ctx.set_materialize_grads(False)
        return total, _forward(inner_rows, down)

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor | None, grad: Tensor) -> tuple[Tensor | None, ...]:
        total, norm, inverse, codes, scales, inner, *inner_columns = ctx.saved_tensors
        grad_activated, grad_down = _backward(grad, inner_columns, ctx.down, ctx.quantiser)
        rows, columns = swiglu_backward_codes(grad_activated, inner, *ctx.quantiser)
        grad_normed = input_gradient_gemm(rows, ctx.gate_up.transposed)
        grad_gate_up = weight_gradient_gemm(columns, (codes, scales))
        grad_x, grad_norm = add_norm_backward(grad_normed, grad_total, total, norm, inverse)
        return grad_x, _of_added(ctx, grad_x), grad_norm, grad_gate_up, grad_down, None, None, None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor | None, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total, normed, inverse = add_norm(x, added, norm, eps)
        ctx.save_for_backward(total, norm, inverse)
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor | None, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_norm = add_norm_backward(grad.contiguous(), grad_total, *ctx.saved_tensors)
        return grad_x, _of_added(ctx, grad_x), grad_norm, None


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        return swiglu_backward(grad.contiguous(), gate_up)


class _Bf16Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, master: Tensor, values: Tensor) -> Tensor:
        ctx.save_for_backward(x, values)
        return torch.nn.functional.linear(x, values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, values = ctx.saved_tensors
        return grad @ values, fp32_product(grad.t(), x), None


def _forward(rows: Codes, weight: BlockWeight) -> Tensor:
    assert not isinstance(weight.values, Tensor), "a BF16 weight in a block of codes"
    return forward_gemm(rows, weight.values)


def _backward(
    grad: Tensor, columns: tuple[Tensor, ...] | list[Tensor], weight: BlockWeight, quantiser: _Quantiser
) -> tuple[Tensor, Tensor]:
    """Gradients of a linear's input (BF16) and weight (FP32), from that of its output and its input's column codes."""
    assert weight.transposed is not None, "a BF16 weight in a block of codes"
    rows, grad_columns = row_and_column_codes(grad, *quantiser)
    codes, scales = columns
    return input_gradient_gemm(rows, weight.transposed), weight_gradient_gemm(grad_columns, (codes, scales))


def _of_added(ctx: Any, grad_x: Tensor) -> Tensor | None:
    """The gradient of what was added to the residual stream is the stream's own."""
    return grad_x if ctx.needs_input_grad[1] else None


def _two(pair: Any) -> tuple[Tensor, Tensor]:
    first, second = pair
    return first, second
