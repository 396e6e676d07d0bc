from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fp8core.numerics.e4m3 import encode, quantise_tiles
from fp8core.numerics.linear import (
    Bf16Linear,
    ExactFp32Linear,
    Fp8BlockLinear,
    Fp8ForwardLinear,
    Fp32Linear,
    LinearWeight,
    StoredWeight,
    dgrad,
    fprop,
    load_weight,
    wgrad,
)
from fp8core.numerics.recipe import POW2, RECIPES, Grouping, Recipe

# Tokens, in, out: whole groups and partial ones.
SHAPES = [(128, 128, 256), (300, 200, 130), (1, 40, 5)]

Quantised = Callable[..., Tensor]


def random(rows: int, columns: int, seed: int) -> Tensor:
    """BF16 values of magnitudes that differ by row and column, as between layers, held in FP32."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(rows, 1, generator=generator) + torch.randn(1, columns, generator=generator)
    return (torch.randn(rows, columns, generator=generator) * spread.exp()).bfloat16().float()


def stored_fp8(master: Tensor, recipe: Recipe) -> StoredWeight:
    grid, factors = quantise_tiles(master.bfloat16().float(), recipe.weights)
    return StoredWeight(encode(grid), factors, (recipe.weights.rows, recipe.weights.columns))


def to_bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


@pytest.fixture(scope="session")
def quantised(slow_quantise) -> Quantised:
    """(x, grouping) to the FP64 values that the quantised tensor stands for."""

    def dequantise(x: Tensor, grouping: Grouping) -> Tensor:
        grid, factors = slow_quantise(x, grouping.rule, grouping.rows, grouping.columns, grouping.floor)
        wide = factors.double().repeat_interleave(grouping.rows, 0).repeat_interleave(grouping.columns, 1)
        return grid.double() * wide[: x.shape[0], : x.shape[1]]

    return dequantise


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("sizes", [(128, 256), (100, 60, 300)])
def test_stacked_weights_equal_separate_ones(sizes: tuple[int, ...], recipe: Recipe) -> None:
    masters = [random(size, 200, seed) * 10.0**seed for seed, size in enumerate(sizes)]
    parts = [stored_fp8(master, recipe) for master in masters]
    x, grad = random(140, 200, 10), random(140, sum(sizes), 11)
    separate = torch.cat([fprop(x, load_weight([part]), recipe) for part in parts], dim=1)
    assert torch.equal(fprop(x, load_weight(parts), recipe), separate)
    separate = torch.cat([wgrad(part, x, recipe) for part in grad.split(sizes, dim=1)])
    assert torch.equal(wgrad(grad, x, recipe), separate)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("exponent", [30, 60, 90])
def test_a_small_gradient_is_as_exact_as_a_large_one(exponent: int, recipe: Recipe) -> None:
    """A loss that is a power of two smaller has gradients that are, and no digit fewer."""
    weight, x, grad = load_weight([stored_fp8(random(96, 200, 8), recipe)]), random(140, 200, 9), random(140, 96, 10)
    factor = 2.0**exponent
    assert torch.equal(dgrad(grad / factor, weight, recipe) * factor, dgrad(grad, weight, recipe))
    for small in ((grad / factor, x), (grad, x / factor)):
        assert torch.equal(wgrad(*small, recipe) * factor, wgrad(grad, x, recipe))


# Formats, each against the autograd of an explicit model


def explicit_fp8(quantised: Quantised, x: Tensor, tiles: Tensor, grad: Tensor, recipe: Recipe) -> tuple[Tensor, ...]:
    """Y from quantised operands; dX and dW by autograd of plain products, each with its own quantised gradient."""
    row_x, column_x = (
        values.requires_grad_() for values in (quantised(x, recipe.activations), quantised(x.t(), recipe.tokens).t())
    )
    leaf = tiles.clone().requires_grad_()
    y = row_x @ leaf.t()
    (grad_x,) = torch.autograd.grad(y, row_x, quantised(grad, recipe.gradients))
    (grad_weight,) = torch.autograd.grad(column_x @ leaf.t(), leaf, quantised(grad.t(), recipe.tokens).t())
    return to_bf16(y.detach()), grad_x.float(), grad_weight.float()


def explicit_plain(x: Tensor, weight: Tensor, grad: Tensor, rounding: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    """Y = X W^T of FP64 operands and its autograd; the rounding of Y passes the gradient through."""
    leaves = x.double().requires_grad_(), weight.double().requires_grad_()
    y = leaves[0] @ leaves[1].t()
    return rounding(y.detach()), *torch.autograd.grad(y, leaves, grad.double())


def run(form, x: Tensor, weight: LinearWeight, master: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    leaf = x.clone().requires_grad_()
    y = form(leaf, weight)
    assert y.dtype == torch.float32
    return y.detach(), *torch.autograd.grad(y, [leaf, master], grad)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_block_linear(quantised, shape: tuple[int, int, int], recipe: Recipe) -> None:
    tokens, inputs, outputs = shape
    x, grad = random(tokens, inputs, 12), random(tokens, outputs, 13)
    master = random(outputs, inputs, 14).requires_grad_()
    weight = replace(load_weight([stored_fp8(master.detach(), recipe)]), master=master)
    expected = explicit_fp8(quantised, x, quantised(master.detach(), recipe.weights), grad, recipe)
    for upstream in (grad, grad.t().contiguous().t()):
        found = run(Fp8BlockLinear(recipe), x, weight, master, upstream)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_forward_linear(quantised, shape: tuple[int, int, int], recipe: Recipe) -> None:
    tokens, inputs, outputs = shape
    x, grad = random(tokens, inputs, 15), random(tokens, outputs, 16)
    master = random(outputs, inputs, 17).requires_grad_()
    weight = replace(load_weight([stored_fp8(master.detach(), recipe)]), master=master)
    tiles = quantised(master.detach(), recipe.weights)
    y, grad_x, grad_weight = run(Fp8ForwardLinear(recipe), x, weight, master, grad)
    assert torch.equal(y, to_bf16(quantised(x, recipe.activations) @ tiles.t()))
    _, explicit_x, explicit_weight = explicit_plain(x, tiles, grad, to_bf16)
    assert_close_sums(grad_x, explicit_x, grad, tiles)
    assert_close_sums(grad_weight, explicit_weight, grad.t(), x)


@pytest.mark.parametrize(
    ("form", "rounding"), [(Bf16Linear(), to_bf16), (Fp32Linear(), Tensor.float), (ExactFp32Linear(), Tensor.float)]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_plain_linears(form, rounding, shape: tuple[int, int, int]) -> None:
    tokens, inputs, outputs = shape
    x, grad = random(tokens, inputs, 18), random(tokens, outputs, 19)
    master = random(outputs, inputs, 20).requires_grad_()
    weight = replace(load_weight([StoredWeight(master.detach().clone())]), master=master)
    expected = explicit_plain(x, master.detach(), grad, rounding)
    y, grad_x, grad_weight = run(form, x, weight, master, grad)
    if form.name == "bf16":
        assert torch.equal(y, expected[0])
    else:
        assert_close_sums(y, expected[0].double(), x, master.detach().t())
    assert_close_sums(grad_x, expected[1], grad, master.detach())
    assert_close_sums(grad_weight, expected[2], grad.t(), x)


def assert_close_sums(product: Tensor, expected: Tensor, left: Tensor, right: Tensor) -> None:
    """FP32 accumulation of `left @ right`: the error of each of K sums is at most 2^-24 of the sum of magnitudes."""
    bound = left.shape[1] * 2.0**-23 * (left.double().abs() @ right.double().abs())
    assert ((product.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize(
    "form", [Fp8BlockLinear(POW2), Fp8ForwardLinear(POW2), Bf16Linear(), Fp32Linear(), ExactFp32Linear()]
)
def test_a_frozen_weight_passes_the_gradient_on(form) -> None:
    master = random(64, 128, 23)
    part = stored_fp8(master, POW2) if form.name == "fp8_block" else StoredWeight(master)
    x, grad = random(5, 128, 24).requires_grad_(), random(5, 64, 25)
    (frozen,) = torch.autograd.grad(form(x, load_weight([part])), x, grad)
    trained = replace(load_weight([part]), master=master.clone().requires_grad_())
    assert torch.equal(frozen, torch.autograd.grad(form(x, trained), x, grad)[0])
