"""Linear layers with their three GEMMs in sight.

    fprop   Y  = X W^T     X in groups along `in`,       W in tiles
    dgrad   dX = dY W      dY in groups along `out`,     the same W tiles, transposed
    wgrad   dW = dY^T X    dY and X in groups along the tokens, quantised from the high-precision tensors

Every operand is E4M3 (DeepSeek-V3, arXiv 2412.19437, section 3.3). Values between layers are BF16, held in FP32."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fp8core.numerics.e4m3 import decode, quantise_columns, quantise_rows
from fp8core.numerics.gemm import block_gemm, scaled_gemm, sliced_gemm
from fp8core.numerics.recipe import TILE, Grouping, Recipe


@dataclass(frozen=True)
class StoredWeight:
    """Plain BF16 or FP32 [out, in], or E4M3 codes with `scales`, FP32 [ceil(out / tile rows), ceil(in / tile
    columns)]."""

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
    """Weights of linears that read the same input, stacked along `out`, ready to multiply.

    Attributes:
        values: [out, in], E4M3 codes for block FP8, else FP32.
        row_scales: FP32 [out, tiles along `in`], or None.
        dequantised: FP64 [out, in].
        master: FP32 [out, in] that receives the gradient, or None in inference."""

    values: Tensor
    row_scales: Tensor | None
    dequantised: Tensor
    master: Tensor | None

    @cached_property
    def grid(self) -> Tensor:
        """FP32 [out, in]; on the E4M3 grid for block FP8."""
        return self.values if self.row_scales is None else decode(self.values)


class LinearFormat:
    """By default with gradients that are FP32 products."""

    name: str

    def __call__(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """`x @ W^T`: [tokens, in] to [tokens, out], values of the format in FP32."""
        y: Tensor = _Linear.apply(x, weight.master, weight, self)  # type: ignore[no-untyped-call]
        return y

    def product(self, x: Tensor, weight: LinearWeight) -> Tensor:
        raise NotImplementedError

    def input_gradient(self, grad: Tensor, weight: LinearWeight) -> Tensor:
        return grad @ weight.grid

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        return grad.t() @ x


def load_weight(parts: list[StoredWeight]) -> LinearWeight:
    """Stack stored weights of equal inputs and tiles into one ready to multiply."""
    if all(part.scales is None for part in parts):
        plain = torch.cat([part.values.float() for part in parts])
        return LinearWeight(plain, None, plain.double(), master=None)
    row_scales = _stack([part.row_scales for part in parts])
    values = _stack([part.values for part in parts])
    dequantised = torch.empty(values.shape, dtype=torch.float64)
    # Pieces stay in the cache. Rows of a tile have the same scales, and those of one part begin at its own tile.
    first = 0
    (down, across) = parts[0].tile
    for part in parts:
        for start in range(0, part.values.shape[0], down):
            rows = slice(first + start, first + min(start + down, part.values.shape[0]))
            factors = row_scales[rows.start].double().repeat_interleave(across)[: values.shape[1]]
            torch.mul(decode(values[rows]), factors, out=dequantised[rows])
        first += part.values.shape[0]
    return LinearWeight(values, row_scales, dequantised, master=None)


def _stack(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def dequantise_rows(grid: Tensor, scales: Tensor, grouping: Grouping) -> Tensor:
    """FP64 values of a grid, FP32 [rows, columns], and scales, FP32 [rows, groups], exact under either rule."""
    (rows, columns), group = grid.shape, grouping.columns
    # Products with powers of two are exact in FP32; those with others need 28 bits.
    factors = scales.unsqueeze(-1) if grouping.rule == "pow2" else scales.unsqueeze(-1).double()
    if columns % group:
        padded = torch.nn.functional.pad(grid, (0, -columns % group))
        return (padded.view(rows, -1, group) * factors).view(rows, -1)[:, :columns].double()
    return (grid.view(rows, -1, group) * factors).view(rows, columns).double()


def fprop(x: Tensor, weight: LinearWeight, recipe: Recipe) -> Tensor:
    """Y = X W^T, BF16 values in FP32 [tokens, out]; a row depends on its own row of X alone."""
    assert weight.row_scales is not None
    groups = recipe.activations
    tiles = recipe.weights
    assert groups.columns == tiles.columns, "both operands have the same blocks of the contraction"
    rows = quantise_rows(x, groups)
    if tiles.rule == "pow2":
        product = _product(rows, groups, weight.dequantised)
    else:
        product = block_gemm(*rows, weight.grid, weight.row_scales, groups.columns)
    return product.to(torch.bfloat16).float()


def dgrad(grad: Tensor, weight: LinearWeight, recipe: Recipe) -> Tensor:
    """dX = dY W with dY in groups along `out`; FP32 [tokens, in]."""
    groups = recipe.gradients
    transposed = weight.dequantised.t()
    rows = quantise_rows(grad, groups)
    if recipe.weights.rule == "pow2":
        return _product(rows, groups, transposed).float()
    return scaled_gemm(dequantise_rows(*rows, groups), transposed, groups.columns).float()


def wgrad(grad: Tensor, x: Tensor, recipe: Recipe) -> Tensor:
    """dW = dY^T X with both operands in groups along the tokens, zero rows after the last; FP32 [out, in]."""
    left, right = (dequantise_rows(*quantise_columns(each, recipe.tokens), recipe.tokens) for each in (grad, x))
    return scaled_gemm(left, right, recipe.tokens.columns).float()


def _product(left: tuple[Tensor, Tensor], groups: Grouping, right: Tensor) -> Tensor:
    """left @ right^T, FP64, of a grid with its scales and of FP64 values whose scales are powers of two."""
    if groups.rule == "fp32":
        return block_gemm(*left, right, None, groups.columns)
    return scaled_gemm(dequantise_rows(*left, groups), right, groups.columns)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, master: Tensor | None, weight: LinearWeight, form: LinearFormat) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        ctx.form = form
        return form.product(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        grad_weight = ctx.form.weight_gradient(grad, x) if ctx.needs_input_grad[1] else None
        return ctx.form.input_gradient(grad, ctx.weight), grad_weight, None, None


class Bf16Linear(LinearFormat):
    """FP64 accumulation: another order changes a result with probability about 2^-40."""

    name = "bf16"

    def product(self, x: Tensor, weight: LinearWeight) -> Tensor:
        return (x.double() @ weight.dequantised.t()).to(torch.bfloat16).float()


class ExactFp32Linear(LinearFormat):
    """No order of summation shows: FP32 as a side of a contract."""

    name = "fp32"

    def product(self, x: Tensor, weight: LinearWeight) -> Tensor:
        return sliced_gemm(x, weight.grid).float()


class Fp32Linear(LinearFormat):
    """Products of `transformers`: FP32 accumulation, in an order that depends on the batch."""

    name = "fp32"

    def __call__(self, x: Tensor, weight: LinearWeight) -> Tensor:
        return torch.nn.functional.linear(x, weight.grid if weight.master is None else weight.master)


class Fp8ForwardLinear(LinearFormat):
    """Block FP8 forward; backward in FP32 from the dequantised weight and the unrounded input."""

    name = "fp8_block"

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def product(self, x: Tensor, weight: LinearWeight) -> Tensor:
        return fprop(x, weight, self.recipe)

    def input_gradient(self, grad: Tensor, weight: LinearWeight) -> Tensor:
        return grad @ weight.dequantised.float()


class Fp8BlockLinear(Fp8ForwardLinear):
    def input_gradient(self, grad: Tensor, weight: LinearWeight) -> Tensor:
        return dgrad(grad.contiguous(), weight, self.recipe)

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        return wgrad(grad.contiguous(), x, self.recipe)
