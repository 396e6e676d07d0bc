"""The operands of a layer's linears and their products, forward and backward, in block FP8 and in BF16.

A layer multiplies four times; each operand is made where its values are:

    normed     total = x + added, and the norm of total as an operand
    operand    values as they are
    activated  silu(g) * u of inner = [g, u]

For a pass with gradients (`kept_...`), row codes (for fprop) and column codes (for wgrad) come from one read. Column
codes are all that is kept of an operand. Activations and gradients between blocks are BF16 [tokens, features].
Gradients of weights are FP32."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8core.numerics import e4m3, fused, gemm, grouped
from fp8core.numerics.e4m3 import Codes, FiniteFlag
from fp8core.numerics.grouped import ExpertRows, Operand
from fp8core.numerics.recipe import Recipe


class Norm(NamedTuple):
    """Weight FP32 [hidden] of BF16 values, and epsilon."""

    weight: Tensor
    eps: float


class NormOutput(NamedTuple):
    """`total`: BF16 [tokens, hidden], the residual stream. `inverse`: FP32 [tokens], 1 / rms. `kept`: for the gradient
    of the weight."""

    total: Tensor
    inverse: Tensor
    operand: Operand
    kept: Operand


class TilePadding(NamedTuple):
    """Zeros that fill the parts of a stack (of so many rows) up to `rooms`, and columns up to `width`."""

    parts: tuple[int, ...]
    rooms: tuple[int, ...]
    columns: int
    width: int

    def fill(self, x: Tensor, unit: int = 1) -> Tensor:
        """An element stands for `unit` rows and columns. Without columns the stack is a vector."""
        parts, rooms = ([-(-rows // unit) for rows in each] for each in (self.parts, self.rooms))
        right = () if x.dim() == 1 else (0, -(-self.width // unit) - x.shape[1])
        # torch fills bytes, and not codes.
        bits = x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
        tiles = [pad(part, (*right, 0, room - len(part))) for part, room in zip(bits.split(parts), rooms, strict=True)]
        return torch.cat(tiles).view(x.dtype)

    def cut(self, x: Tensor) -> Tensor:
        pieces = zip(x.split(self.rooms), self.parts, strict=True)
        return torch.cat([room[:rows] if x.dim() == 1 else room[:rows, : self.columns] for room, rows in pieces])


@dataclass(frozen=True)
class BlockWeight:
    """Of experts with another dimension before the others. `transposed`: of codes. `filling`: of codes with zeros
    between them."""

    values: Operand
    transposed: Codes | None
    filling: TilePadding | None = None


class Fp8Blocks:
    """E4M3 in all three GEMMs; NaN and infinity anywhere set `flag`."""

    name = "fp8_block"

    def __init__(self, recipe: Recipe, flag: FiniteFlag) -> None:
        self._tiles = recipe.weights
        self._flag = flag
        self._rows = recipe.activations, flag
        self._rows_and_columns = recipe.activations, recipe.tokens, flag
        self._of_gradients = recipe.gradients, recipe.tokens, flag

    def made(self, rows: Tensor, parts: Sequence[int]) -> tuple[Tensor, ...]:
        """From rows of an FP32 master: so many of each part, which begins with a tile."""
        narrow = rows.bfloat16()
        quantiser = (self._tiles, self._flag)
        if all(part % self._tiles.rows == 0 for part in parts[:-1]):
            return e4m3.tile_codes(narrow, *quantiser)
        codes, scales = zip(*(e4m3.tile_codes(part, *quantiser) for part in narrow.split(parts)), strict=True)
        return torch.cat([each.view(torch.uint8) for each in codes]).view(codes[0].dtype), torch.cat(scales)

    def ready(self, parts_of_rows: Sequence[Tensor], filling: TilePadding | None) -> BlockWeight:
        codes, scales = parts_of_rows
        if filling is not None:
            codes = filling.fill(codes)
            scales = filling.fill(scales, self._tiles.rows)
        return BlockWeight((codes, scales), gemm.transpose((codes, scales)), filling)

    def ready_experts(self, parts_of_rows: Sequence[Tensor], filling: TilePadding | None, count: int) -> BlockWeight:
        """Of weights one above the other."""
        if filling is None:
            codes, scales = (each.view(count, -1, each.shape[-1]) for each in parts_of_rows)
        else:
            unit = self._tiles.rows
            codes, scales = (
                torch.stack([filling.fill(part, step).view(torch.uint8) for part in each.chunk(count)]).view(each.dtype)
                for each, step in zip(parts_of_rows, (1, unit), strict=True)
            )
        return BlockWeight((codes, scales), gemm.transpose((codes, scales)), filling)

    def normed(self, x: Tensor, delta: Tensor | None, norm: Norm) -> tuple[Tensor, Operand]:
        return fused.add_norm_row_codes(x, delta, *norm, *self._rows)

    def operand(self, x: Tensor) -> Operand:
        return e4m3.row_codes(x, *self._rows)

    def activated(self, inner: Tensor) -> Operand:
        return fused.swiglu_row_codes(inner, *self._rows)

    def kept_normed(self, x: Tensor, delta: Tensor | None, norm: Norm) -> NormOutput:
        total, rows, columns, inverse = fused.add_norm_codes(x, delta, norm.weight, norm.eps, *self._rows_and_columns)
        return NormOutput(total, inverse, rows, columns)

    def kept_operand(self, x: Tensor) -> tuple[Operand, Operand]:
        """The operand of a product, and what is kept of it."""
        return e4m3.row_and_column_codes(x, *self._rows_and_columns)

    def kept_activated(self, inner: Tensor) -> tuple[Operand, Operand]:
        return fused.swiglu_codes(inner, *self._rows_and_columns)

    def product(self, operand: Operand, weight: BlockWeight) -> Tensor:
        return gemm.forward_gemm(_codes(operand), _codes(weight.values))

    def gradients(
        self, grad: Tensor, saved_operand: Operand, weight: BlockWeight, total: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The gradients of a product's input, BF16, and of its weight, FP32, which is added to `total` in place."""
        return self._products(e4m3.row_and_column_codes(grad, *self._of_gradients), saved_operand, weight, total)

    def inner_gradients(
        self, grad: Tensor, inner: Tensor, saved_operand: Operand, gate_up: BlockWeight, total: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As `gradients`, of the product that gave `inner`; `grad` is that of its SwiGLU."""
        return self._products(
            fused.swiglu_backward_codes(grad, inner, *self._of_gradients), saved_operand, gate_up, total
        )

    def expert_operand(self, x: Tensor, rows: ExpertRows) -> Operand:
        return grouped.gathered_codes(_codes(self.operand(x)), rows)

    def expert_activated(self, inner: Tensor, rows: ExpertRows) -> Operand:
        return fused.swiglu_row_codes(inner, *self._rows, rows)

    def kept_expert_operand(self, x: Tensor, rows: ExpertRows) -> tuple[Operand, Operand]:
        return grouped.gathered_row_and_column_codes(x, rows, *self._rows_and_columns)

    def kept_expert_activated(self, inner: Tensor, rows: ExpertRows) -> tuple[Operand, Operand]:
        return fused.swiglu_codes(inner, *self._rows_and_columns, rows.spans)

    def expert_product(self, operand: Operand, weight: BlockWeight, rows: ExpertRows) -> Tensor:
        return grouped.grouped_gemm(_codes(operand), _codes(weight.values), rows)

    def expert_gradients(
        self, grad: Tensor, saved_operand: Operand, weight: BlockWeight, rows: ExpertRows, total: Tensor
    ) -> Tensor:
        """The gradient of the products' input, BF16; that of weights is added to `total`, FP32 [experts, out, in]."""
        codes = e4m3.row_and_column_codes(grad, *self._of_gradients, rows.spans)
        return self._expert_products(codes, saved_operand, weight, rows, total)

    def inner_expert_gradients(
        self,
        grad: Tensor,
        inner: Tensor,
        saved_operand: Operand,
        gate_up: BlockWeight,
        rows: ExpertRows,
        total: Tensor,
    ) -> Tensor:
        codes = fused.swiglu_backward_codes(grad, inner, *self._of_gradients, rows.spans)
        return self._expert_products(codes, saved_operand, gate_up, rows, total)

    @staticmethod
    def _expert_products(
        grad: tuple[Codes, Codes], saved_operand: Operand, weight: BlockWeight, rows: ExpertRows, total: Tensor
    ) -> Tensor:
        by_row, by_column = grad
        assert weight.transposed is not None, "a BF16 weight in a block of codes"
        of_input = grouped.grouped_gemm(by_row, weight.transposed, rows)
        if weight.filling is None:
            grouped.grouped_weight_gradient(by_column, _codes(saved_operand), rows, total)
            return of_input
        room = torch.zeros(_codes(weight.values)[0].shape, device=total.device)
        for own, product in zip(
            total, grouped.grouped_weight_gradient(by_column, _codes(saved_operand), rows, room), strict=True
        ):
            own.add_(weight.filling.cut(product))
        return of_input

    @staticmethod
    def _products(
        grad: tuple[Codes, Codes], saved_operand: Operand, weight: BlockWeight, total: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        rows, columns = grad
        assert weight.transposed is not None, "a BF16 weight in a block of codes"
        of_input = gemm.input_gradient_gemm(rows, weight.transposed)
        if weight.filling is None:
            return of_input, gemm.weight_gradient_gemm(columns, _codes(saved_operand), total)
        product = weight.filling.cut(gemm.weight_gradient_gemm(columns, _codes(saved_operand)))
        return of_input, product if total is None else total.add_(product)


class Bf16Blocks:
    name = "bf16"

    def made(self, rows: Tensor, parts: Sequence[int]) -> tuple[Tensor, ...]:
        return (rows.bfloat16(),)

    def ready(self, parts_of_rows: Sequence[Tensor], filling: TilePadding | None) -> BlockWeight:
        assert filling is None, "BF16 has no tiles to fill"
        (values,) = parts_of_rows
        return BlockWeight(values, None)

    def ready_experts(self, parts_of_rows: Sequence[Tensor], filling: TilePadding | None, count: int) -> BlockWeight:
        assert filling is None, "BF16 has no tiles to fill"
        (values,) = parts_of_rows
        return BlockWeight(values.view(count, -1, values.shape[-1]), None)

    def normed(self, x: Tensor, delta: Tensor | None, norm: Norm) -> tuple[Tensor, Operand]:
        total, values, _inverse = fused.add_norm(x, delta, *norm)
        return total, values

    def operand(self, x: Tensor) -> Operand:
        return x

    def activated(self, inner: Tensor) -> Operand:
        return fused.swiglu(inner)

    def kept_normed(self, x: Tensor, delta: Tensor | None, norm: Norm) -> NormOutput:
        total, values, inverse = fused.add_norm(x, delta, *norm)
        return NormOutput(total, inverse, values, values)

    def kept_operand(self, x: Tensor) -> tuple[Operand, Operand]:
        return x, x

    def kept_activated(self, inner: Tensor) -> tuple[Operand, Operand]:
        values = fused.swiglu(inner)
        return values, values

    def product(self, operand: Operand, weight: BlockWeight) -> Tensor:
        return torch.nn.functional.linear(_values(operand), _values(weight.values))

    def gradients(
        self, grad: Tensor, saved_operand: Operand, weight: BlockWeight, total: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return grad @ _values(weight.values), gemm.fp32_product(grad.t(), _values(saved_operand), total)

    def inner_gradients(
        self, grad: Tensor, inner: Tensor, saved_operand: Operand, gate_up: BlockWeight, total: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return self.gradients(fused.swiglu_backward(grad.contiguous(), inner), saved_operand, gate_up, total)

    def expert_operand(self, x: Tensor, rows: ExpertRows) -> Operand:
        return grouped.gathered(x, rows)

    def expert_activated(self, inner: Tensor, rows: ExpertRows) -> Operand:
        return self.activated(inner)

    def kept_expert_operand(self, x: Tensor, rows: ExpertRows) -> tuple[Operand, Operand]:
        values = grouped.gathered(x, rows)
        return values, values

    def kept_expert_activated(self, inner: Tensor, rows: ExpertRows) -> tuple[Operand, Operand]:
        return self.kept_activated(inner)

    def expert_product(self, operand: Operand, weight: BlockWeight, rows: ExpertRows) -> Tensor:
        return grouped.grouped_bf16_gemm(_values(operand), _values(weight.values), rows)

    def expert_gradients(
        self, grad: Tensor, saved_operand: Operand, weight: BlockWeight, rows: ExpertRows, total: Tensor
    ) -> Tensor:
        grouped.grouped_bf16_weight_gradient(grad, _values(saved_operand), rows, total)
        return grouped.grouped_bf16_input_gradient(grad, _values(weight.values), rows)

    def inner_expert_gradients(
        self,
        grad: Tensor,
        inner: Tensor,
        saved_operand: Operand,
        gate_up: BlockWeight,
        rows: ExpertRows,
        total: Tensor,
    ) -> Tensor:
        return self.expert_gradients(fused.swiglu_backward(grad, inner), saved_operand, gate_up, rows, total)


class InvariantBf16Blocks(Bf16Blocks):
    """Beside block FP8: the engine's products, whose rows do not depend on one another."""

    def product(self, operand: Operand, weight: BlockWeight) -> Tensor:
        return gemm.bf16_gemm(_values(operand), _values(weight.values))


Blocks = Fp8Blocks | Bf16Blocks


def norm_only(x: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
    """norm(x + added), BF16."""
    normed: Tensor = _AddNorm.apply(x, delta, norm.weight, norm.eps)  # type: ignore[no-untyped-call]
    return normed


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor | None, norm: Tensor, eps: float) -> Tensor:
        total, normed, inverse = fused.add_norm(x, delta, norm, eps)
        ctx.save_for_backward(total, norm, inverse)
        return normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_norm = fused.add_norm_backward(grad.contiguous(), None, *ctx.saved_tensors)
        # The gradient of what was added to the residual stream is the stream's own.
        return grad_x, grad_x if ctx.needs_input_grad[1] else None, grad_norm, None


def _codes(operand: Operand) -> Codes:
    assert not isinstance(operand, Tensor), "BF16 values in a block of codes"
    return operand


def _values(operand: Operand) -> Tensor:
    assert isinstance(operand, Tensor), "codes in a block of BF16"
    return operand
