import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp8core.numerics import gemm
from fp8core.numerics.e4m3 import row_and_column_codes, row_codes, tile_codes
from fp8core.numerics.linear import StoredWeight, dgrad, fprop, load_weight, wgrad
from fp8core.numerics.recipe import RECIPES, Recipe

# M, N, K; K with and without a partial last block.
SHAPES = [(64, 48, 384), (5, 7, 300), (1, 130, 128), (9, 3, 17)]


def scales(rows: int, k: int, rule: str, seed: int, block: int = 128) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-30, 12, (rows, math.ceil(k / block)), generator=generator)
    powers = torch.ldexp(torch.ones(exponents.shape), exponents)
    return powers if rule == "pow2" else powers * (1 + torch.rand(powers.shape, generator=generator))


def dequantised(grid: Tensor, factors: Tensor, block: int = 128) -> Tensor:
    return grid.double() * factors.double().repeat_interleave(block, dim=1)[:, : grid.shape[1]]


def exact_block_gemm(left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor, block: int) -> Tensor:
    """Blocks as sums of int64 multiples of 2^-18, scaled and added in ascending order."""
    total = torch.zeros(left.shape[0], right.shape[0], dtype=torch.float64)
    left_units, right_units = ((grid.double() * 2**9).long() for grid in (left, right))
    for b in range(left_scales.shape[1]):
        columns = slice(b * block, (b + 1) * block)
        units = (left_units[:, None, columns] * right_units[None, :, columns]).sum(-1)
        scaled = units.double() * 2.0**-18 * left_scales[:, None, b].double() * right_scales[None, :, b].double()
        total = total + scaled
    return total


@pytest.mark.parametrize("rule", ["pow2", "fp32"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", [128, 32])
def test_block_gemm_sums_each_block_exactly(random_grid, shape: tuple[int, int, int], block: int, rule: str) -> None:
    m, n, k = shape
    left, right = random_grid(m, k, 1), random_grid(n, k, 2)
    factors = scales(m, k, rule, 3, block), scales(n, k, rule, 4, block)
    product = gemm.block_gemm(left, factors[0], right, factors[1], block)
    assert product.dtype == torch.float64
    assert torch.equal(product, exact_block_gemm(left, factors[0], right, factors[1], block))
    if rule == "pow2":
        scaled = gemm.scaled_gemm(dequantised(left, factors[0], block), dequantised(right, factors[1], block), block)
        assert torch.equal(scaled, product)


# Fixed-point operands


@given(k=st.integers(1, 2**20))
@settings(max_examples=200)
def test_alignment_bits_are_the_most_that_stay_exact(k: int) -> None:
    bits = gemm.alignment_bits(k)
    assert k * 2 ** (2 * bits) <= 2**53
    assert k == 1 or 2 ** math.ceil(math.log2(k)) * 2 ** (2 * (bits + 1)) > 2**53


@given(seed=st.integers(0, 2**31), bits=st.integers(8, 26), exponent=st.integers(-100, 100))
@settings(max_examples=30)
def test_aligned_rows_are_multiples_of_a_step_within_the_bound(seed: int, bits: int, exponent: int) -> None:
    x = torch.randn(5, 33, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    before = x.clone()
    aligned = gemm.align_rows(x, bits)
    amax = x.abs().amax(-1, keepdim=True)
    assert torch.equal(x, before)
    assert ((aligned - x).abs() <= 2.0**-bits * amax).all()
    step = torch.exp2(torch.floor(torch.log2(amax)) + 1 - bits)
    assert torch.equal(torch.round(aligned / step), aligned / step)
    assert (aligned.abs() / step <= 2.0**bits).all()


@pytest.mark.parametrize("k", [1, 2, 3, 128, 129, 4096, 4097])
def test_aligned_gemm_is_an_exact_integer_product(k: int) -> None:
    top = 2 ** gemm.alignment_bits(k)
    generator = torch.Generator().manual_seed(k)
    left, right = (torch.randint(top - 9, top + 1, (3, k), generator=generator) for _ in range(2))
    left[:, 0] = right[:, 0] = top - 1  # rows of top alone would be aligned one bit coarser
    left, right = left.clamp(max=top - 1), right.clamp(max=top - 1)
    expected = [[sum(a * b for a, b in zip(x, y, strict=True)) for y in right.tolist()] for x in left.tolist()]
    aligned = gemm.align_rows(right.double(), gemm.alignment_bits(k))
    assert torch.equal(aligned, right.double())
    assert [[int(value) for value in row] for row in gemm.aligned_gemm(left.double(), aligned).tolist()] == expected


def fp32(*shape: int, seed: int) -> Tensor:
    """FP32 values over 30 powers of two."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp2(30 * torch.rand(shape, generator=generator) - 15)


@pytest.mark.parametrize("k", [1, 32, 100, 576])
def test_sliced_gemm_is_nearer_to_the_product_of_fp32_values_than_fp32_can_tell(k: int) -> None:
    left, right = fp32(5, k, seed=1), fp32(7, k, seed=2)
    found = gemm.sliced_gemm(left, right)
    for i, row in enumerate(left.tolist()):
        for j, other in enumerate(right.tolist()):
            exact = sum((Fraction(a) * Fraction(b) for a, b in zip(row, other, strict=True)), Fraction(0))
            scale = max(map(abs, row)) * max(map(abs, other))
            assert abs(Fraction(found[i, j].item()) - exact) <= Fraction(k * scale) * Fraction(2) ** -40


def test_a_row_of_sliced_gemm_depends_on_no_batch_and_no_order() -> None:
    left, right = fp32(64, 300, seed=3), fp32(40, 300, seed=4)
    whole, order = gemm.sliced_gemm(left, right), torch.randperm(300, generator=torch.Generator().manual_seed(5))
    assert torch.equal(gemm.sliced_gemm(left[:, order], right[:, order]), whole)
    for i in range(64):
        assert torch.equal(gemm.sliced_gemm(left[i : i + 1], right), whole[i : i + 1])


sizes = st.integers(1, 300)


def drawn(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    outliers = torch.randn(rows, 1, generator=generator).exp()
    return (torch.randn(rows, columns, generator=generator) * outliers).bfloat16()


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@given(tokens=sizes, inputs=sizes, outputs=sizes, seed=st.integers(0, 1000))
@settings(max_examples=15)
def test_on_codes_the_three_gemms_are_those_of_the_reference(tokens, inputs, outputs, seed, recipe: Recipe) -> None:
    x, grad = drawn(tokens, inputs, seed), drawn(tokens, outputs, seed + 1)
    weight = tile_codes(drawn(outputs, inputs, seed + 2), recipe.weights)
    reference = load_weight([StoredWeight(*weight)])

    assert torch.equal(
        gemm.forward_gemm(row_codes(x, recipe.activations), weight).float(), fprop(x.float(), reference, recipe)
    )
    into_x = gemm.input_gradient_gemm(row_codes(grad, recipe.gradients), gemm.transpose(weight))
    columns = [row_and_column_codes(tensor, recipe.activations, recipe.tokens)[1] for tensor in (grad, x)]
    into_weight = gemm.weight_gradient_gemm(*columns)
    expected = dgrad(grad.float(), reference, recipe).bfloat16(), wgrad(grad.float(), x.float(), recipe)
    if recipe.weights.rule == "pow2":
        assert torch.equal(into_x, expected[0])
        assert torch.equal(into_weight, expected[1])
    # FP32 scales are multiplied in another order there, which may show in the last bit of what is rounded.
    assert torch.allclose(into_x.float(), expected[0].float(), rtol=2**-7, atol=1e-9)
    assert torch.allclose(into_weight, expected[1], rtol=1e-6, atol=1e-9)
