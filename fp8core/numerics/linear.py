"""Linear layers with their three GEMMs in sight.

    fprop   Y  = X W^T     X in groups along `in`,       W in tiles
    dgrad   dX = dY W      dY in groups along `out`,     the same W tiles, transposed
    wgrad   dW = dY^T X    dY and X in groups along the tokens, quantised from the high-precision tensors

A `recipe.Recipe` has the groups and tiles, and the rule of their scales.

Every operand is E4M3, forward and backward (DeepSeek-V3, arXiv 2412.19437, section 3.3). Values between layers are
BF16, held in FP32. A weight arrives quantised: the trainer quantises it once per update and ships those bytes.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from fp8core.numerics.e4m3 import decode, quantise_columns, quantise_rows
from fp8core.numerics.gemm import block_gemm, row_peak, row_spans, scaled_gemm, sliced_gemm, spanned_gemm
from fp8core.numerics.recipe import TILE, Grouping, Recipe


@dataclass(frozen=True)
class StoredWeight:
    """A weight as it is stored and shipped: E4M3 codes with tile scales, or a plain BF16 or FP32 tensor.

    Attributes:
        values: [out, in]; float8_e4m3fn when `scales` is set.
        scales: FP32 [ceil(out / tile rows), ceil(in / tile columns)] (`weight_scale_inv`), or None.
        tile: its rows and columns.
    """

    values: Tensor
    scales: Tensor | None = None
    tile: tuple[int, int] = (TILE, TILE)

    @property
    def row_scales(self) -> Tensor:
        """FP32 [out, tiles along `in`]."""
        assert self.scales is not None, "block-FP8 and plain weights cannot be stacked"
        return self.scales.repeat_interleave(self.tile[0], dim=0)[: self.values.shape[0]]


@dataclass(frozen=True)
class LinearWeight:
    """Weights of one or several linears that read the same input, stacked along `out`, ready to multiply.

    Attributes:
        values: [out, in], E4M3 codes for block FP8, else FP32.
        row_scales: FP32 [out, tiles along `in`], or None where there are no scales.
        dequantised: FP64 [out, in].
        master: FP32 [out, in] that receives the gradient, or None in inference.
    """

    values: Tensor
    row_scales: Tensor | None
    dequantised: Tensor
    master: Tensor | None

    @cached_property
    def grid(self) -> Tensor:
        """FP32 [out, in], on the E4M3 grid for block FP8, else the values themselves."""
        return self.values if self.row_scales is None else decode(self.values)

    @cached_property
    def peak(self) -> float:
        assert self.row_scales is not None, "no codes have no last bit"
        return row_peak(self.row_scales)

    @cached_property
    def transposed_peak(self) -> float:
        assert self.row_scales is not None, "no codes have no last bit"
        return row_peak(self.row_scales.t())


class LinearFormat(Protocol):
    name: str

    def __call__(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """`x @ W^T`: [tokens, in] to [tokens, out], values of the format in FP32."""
        ...


def load_weight(parts: list[StoredWeight]) -> LinearWeight:
    """Stack stored weights that share their input (q, k, v; gate, up) into one ready to multiply, without a master.

    `parts` have equal `in` and equal tiles.
    """
    if all(part.scales is None for part in parts):
        plain = torch.cat([part.values.float() for part in parts])
        return LinearWeight(plain, None, plain.double(), master=None)
    row_scales, values = _stacked([part.row_scales for part in parts]), _stacked([part.values for part in parts])
    dequantised = torch.empty(values.shape, dtype=torch.float64)
    # Pieces stay in the cache. Rows of a tile have the same scales, and those of one part begin at its own tile.
    first, (down, across) = 0, parts[0].tile
    for part in parts:
        for start in range(0, part.values.shape[0], down):
            rows = slice(first + start, first + min(start + down, part.values.shape[0]))
            factors = row_scales[rows.start].double().repeat_interleave(across)[: values.shape[1]]
            torch.mul(decode(values[rows]), factors, out=dequantised[rows])
        first += part.values.shape[0]
    return LinearWeight(values, row_scales, dequantised, master=None)


def _stacked(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def dequantise_rows(grid: Tensor, scales: Tensor, grouping: Grouping) -> Tensor:
    """FP64 values of a tensor quantised in groups of one row, exact under either rule.

    Args:
        grid: FP32 [rows, columns].
        scales: FP32 [rows, groups].
        grouping: `pow2` multiplies in FP32, where that is exact below 2^128 (magnitudes from 248 * 2^120 round up to
            it and become infinite); `fp32` needs 28 bits and multiplies in FP64.
    """
    (rows, columns), group = grid.shape, grouping.columns
    factors = scales.unsqueeze(-1) if grouping.rule == "pow2" else scales.unsqueeze(-1).double()
    if columns % group:
        padded = torch.nn.functional.pad(grid, (0, -columns % group))
        return (padded.view(rows, -1, group) * factors).view(rows, -1)[:, :columns].double()
    return (grid.view(rows, -1, group) * factors).view(rows, columns).double()


def fprop(x: Tensor, weight: LinearWeight, recipe: Recipe) -> Tensor:
    """Y = X W^T in block FP8; returns BF16 values in FP32, [tokens, out].

    A row of the result depends on its own row of X alone: every block is exact, and blocks are added in their order.
    """
    assert weight.row_scales is not None
    groups, tiles = recipe.activations, recipe.weights
    assert groups.columns == tiles.columns, "both operands have the same blocks of the contraction"
    rows = quantise_rows(x, groups)
    if tiles.rule == "pow2":
        product = _product(rows, groups, weight.dequantised, weight.peak)
    else:
        product = block_gemm(*rows, weight.grid, weight.row_scales, groups.columns)
    return product.to(torch.bfloat16).float()


def dgrad(grad: Tensor, weight: LinearWeight, recipe: Recipe) -> Tensor:
    """dX = dY W with dY in groups along `out`; FP32 [tokens, in]."""
    groups, transposed = recipe.gradients, weight.dequantised.t()
    rows = quantise_rows(grad, groups)
    if recipe.weights.rule == "pow2":
        return _product(rows, groups, transposed, weight.transposed_peak).float()
    return scaled_gemm(dequantise_rows(*rows, groups), transposed, groups.columns).float()


def wgrad(grad: Tensor, x: Tensor, recipe: Recipe) -> Tensor:
    """dW = dY^T X with both operands in groups along the tokens; FP32 [out, in].

    A token count that is no multiple of a group's behaves as if zero rows followed.
    """
    groups = recipe.tokens
    left, (x_grid, x_scales) = quantise_columns(grad, groups), quantise_columns(x, groups)
    right = dequantise_rows(x_grid, x_scales, groups)
    if groups.rule == "pow2":
        return _product(left, groups, right, row_peak(x_scales)).float()
    return scaled_gemm(dequantise_rows(*left, groups), right, groups.columns).float()


def _product(left: tuple[Tensor, Tensor], groups: Grouping, right: Tensor, peak: float) -> Tensor:
    """left @ right^T, FP64: blocks are exact and added in their order.

    `left` is a grid with its scales, `right` FP64 values of codes whose scales are powers of two, `peak` their
    `gemm.row_peak`.
    """
    grid, scales = left
    if groups.rule == "fp32":
        return block_gemm(grid, scales, right, None, groups.columns)
    spans = row_spans(grid, scales, groups.columns)
    return spanned_gemm(dequantise_rows(grid, scales, groups), right, spans, peak, groups.columns)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, master: Tensor | None, weight: LinearWeight, recipe: Recipe) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.recipe = weight, recipe
        return fprop(x, weight, recipe)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        grad = grad.contiguous()
        grad_weight = wgrad(grad, x, ctx.recipe) if ctx.needs_input_grad[1] else None
        return dgrad(grad, ctx.weight, ctx.recipe), grad_weight, None, None


class _Fp8ForwardLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, master: Tensor | None, weight: LinearWeight, recipe: Recipe) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return fprop(x, weight, recipe)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        grad_weight = grad.t() @ x if ctx.needs_input_grad[1] else None
        return grad @ ctx.weight.dequantised.float(), grad_weight, None, None


class _Bf16Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, master: Tensor | None, weight: LinearWeight) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return (x.double() @ weight.dequantised.t()).to(torch.bfloat16).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (x,) = ctx.saved_tensors
        grad_weight = grad.t() @ x if ctx.needs_input_grad[1] else None
        return grad @ ctx.weight.grid, grad_weight, None


class _ExactFp32Linear(_Bf16Linear):
    """The backward is that of BF16: FP32 products of the gradient with the weight and the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, master: Tensor | None, weight: LinearWeight) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return sliced_gemm(x, weight.grid).float()


class Fp8BlockLinear:
    """Block FP8 in all three GEMMs."""

    name = "fp8_block"

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def __call__(self, x: Tensor, weight: LinearWeight) -> Tensor:
        y: Tensor = _Fp8Linear.apply(x, weight.master, weight, self.recipe)  # type: ignore[no-untyped-call]
        return y


class Fp8ForwardLinear:
    """Block FP8 forward; backward from the dequantised weight and the high-precision input, in FP32."""

    name = "fp8_block"

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def __call__(self, x: Tensor, weight: LinearWeight) -> Tensor:
        y: Tensor = _Fp8ForwardLinear.apply(x, weight.master, weight, self.recipe)  # type: ignore[no-untyped-call]
        return y


class Bf16Linear:
    """BF16 operands and output. FP64 accumulation: order changes a result with probability about 2^-40."""

    name = "bf16"

    def __call__(self, x: Tensor, weight: LinearWeight) -> Tensor:
        y: Tensor = _Bf16Linear.apply(x, weight.master, weight)  # type: ignore[no-untyped-call]
        return y


class ExactFp32Linear:
    """FP32 operands and output, accumulated so that no order of summation shows: FP32 as a side of a contract."""

    name = "fp32"

    def __call__(self, x: Tensor, weight: LinearWeight) -> Tensor:
        y: Tensor = _ExactFp32Linear.apply(x, weight.master, weight)  # type: ignore[no-untyped-call]
        return y


class Fp32Linear:
    """Products of `transformers` with FP32 weights: FP32 accumulation, in an order that depends on the batch."""

    name = "fp32"

    def __call__(self, x: Tensor, weight: LinearWeight) -> Tensor:
        return torch.nn.functional.linear(x, weight.grid if weight.master is None else weight.master)
