from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8core.numerics import e4m3
from fp8core.numerics.recipe import AMAX_FLOOR, FP32, GRADIENT_FLOOR, POW2, RECIPES, Recipe

RULES = ["pow2", "fp32"]
OPERANDS = {e4m3.quantise_rows: "activations", e4m3.quantise_columns: "tokens", e4m3.quantise_tiles: "weights"}
# The format's non-negative values in the order of their codes 0..126: subnormals m 2^-9, then (8 + m) 2^(e - 10).
GRID = [m * 2.0**-9 for m in range(8)] + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)][:-1]


def cast(x: Tensor) -> Tensor:
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)


def to_bytes(x: Tensor) -> Tensor:
    return e4m3.encode(e4m3.round_to_e4m3(x)).view(torch.uint8)


def random(rows: int, columns: int, seed: int) -> Tensor:
    """Normal values whose magnitudes differ by element, row and column, with zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(rows, 1, generator=generator) + torch.randn(1, columns, generator=generator)
    x = torch.randn(rows, columns, generator=generator) * torch.exp(4 * spread)
    return x * (torch.rand(rows, columns, generator=generator) > 0.1)


def float32_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def test_decode_is_the_format() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = e4m3.decode(codes)
    assert values.dtype == torch.float32
    assert values[:127].tolist() == GRID
    assert (-values[128:255]).tolist() == GRID
    assert values[128].signbit()
    assert values[[127, 255]].isnan().all()
    assert torch.equal(e4m3.decode(codes.view(2, 128).t())[:127, 0], values[:127])


@pytest.mark.parametrize("sign", [0, -(2**31)])
def test_rounds_as_the_saturated_cast_on_every_exponent(sign: int) -> None:
    # 128 leading mantissas, each with the trailing bits that decide ties and their neighbours, and some others.
    trailing = torch.tensor([0x0000, 0x0001, 0x1234, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    leading = torch.arange(0x0000, 0x8000) << 16
    x = float32_bits((leading[:, None] + trailing).flatten() + sign)
    assert x.isnan().any()
    assert x.isinf().any()
    assert torch.equal(to_bytes(x), cast(x))


def smallest_exponent(amax: Fraction) -> int:
    """The smallest k with 448 * 2^k >= amax, in integers."""
    k = (amax.numerator.bit_length() - amax.denominator.bit_length()) - 10
    while 448 * Fraction(2) ** k < amax:
        k += 1
    return k


def exact_pow2_scale(amax: float) -> float:
    return 2.0 ** smallest_exponent(Fraction(max(amax, float(np.float32(AMAX_FLOOR)))))


def test_pow2_scale_of_every_bfloat16_amax() -> None:
    amax = float32_bits(torch.arange(0x0000, 0x7F80) << 16)
    expected = [exact_pow2_scale(value) for value in amax.tolist()]
    assert e4m3.scale_from_amax(amax, "pow2").tolist() == expected


def test_pow2_scale_changes_exactly_above_448_times_a_power_of_two() -> None:
    exponents = torch.arange(-41, 120)
    powers = torch.ldexp(torch.ones(len(exponents)), exponents)
    edge = 448 * powers
    below, above = torch.nextafter(edge, torch.zeros(1)), torch.nextafter(edge, torch.full((1,), torch.inf))
    assert torch.equal(e4m3.scale_from_amax(edge, "pow2"), powers)
    assert torch.equal(e4m3.scale_from_amax(below, "pow2"), powers)
    assert torch.equal(e4m3.scale_from_amax(above, "pow2"), 2 * powers)


def test_fp32_scale_is_the_correctly_rounded_quotient() -> None:
    amax = float32_bits(torch.arange(0x2F00, 0x7F80) << 16 | 0x1357)
    assert amax.min() > AMAX_FLOOR
    assert e4m3.scale_from_amax(amax, "fp32").tolist() == (amax.numpy() / np.float32(448)).tolist()


@pytest.mark.parametrize(("rule", "floor"), [("pow2", 2.0**-42), ("fp32", float(np.float32(1e-10) / np.float32(448)))])
def test_amax_is_floored(rule, floor: float) -> None:
    small = torch.tensor([0.0, 1e-45, 1e-11, 1e-10])
    assert e4m3.scale_from_amax(small, rule).tolist() == [floor] * 4
    assert e4m3.scale_from_amax(torch.tensor(1.1e-10), rule).item() > floor
    assert e4m3.scale_from_amax(small, rule, GRADIENT_FLOOR)[:2].tolist() == [2.0**-126] * 2


@pytest.mark.parametrize("recipe", [POW2, FP32], ids=RULES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("quantise", OPERANDS)
def test_nothing_with_nan_or_infinity_is_quantised(quantise, value: float, recipe: Recipe) -> None:
    for position in ((0, 0), (129, 4), (64, 129)):
        x = torch.ones(130, 130)
        x[position] = value
        with pytest.raises(e4m3.GroupNotFinite, match="NaN or infinity"):
            quantise(x, getattr(recipe, OPERANDS[quantise]))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("shape", [(3, 128), (2, 300), (130, 5), (257, 130), (1, 1)])
def test_rows_columns_and_tiles_of_128(slow_quantise, shape: tuple[int, int], recipe: Recipe) -> None:
    x = random(*shape, seed=1)
    for ours, slow in (
        (e4m3.quantise_rows(x, recipe.activations), slow_quantise(x, recipe.activations.rule, 1, 128)),
        (
            e4m3.quantise_columns(x, recipe.tokens),
            tuple(part.t() for part in slow_quantise(x, recipe.tokens.rule, 128, 1, GRADIENT_FLOOR)),
        ),
        (e4m3.quantise_tiles(x, recipe.weights), slow_quantise(x, recipe.weights.rule, 128, 128)),
    ):
        assert ours[0].is_contiguous()
        assert torch.equal(e4m3.encode(ours[0]).view(torch.uint8), e4m3.encode(slow[0]).view(torch.uint8))
        assert torch.equal(ours[1], slow[1])


@pytest.mark.parametrize("quantise", OPERANDS)
def test_layout_in_memory_changes_nothing(quantise) -> None:
    x = random(256, 384, seed=5)
    strided, grouping = x.t().contiguous().t(), getattr(POW2, OPERANDS[quantise])
    for ours, expected in zip(quantise(strided, grouping), quantise(x, grouping), strict=True):
        assert torch.equal(ours, expected)


CPU = torch.device("cpu")


_ROWS_AND_COLUMNS = partial(e4m3.row_and_column_codes, columns=POW2.tokens)


@pytest.mark.parametrize("operation", [e4m3.row_codes, e4m3.tile_codes, _ROWS_AND_COLUMNS])
def test_a_reference_goes_on_where_the_caller_has_a_flag(operation) -> None:
    flag, x = e4m3.FiniteFlag(CPU), torch.ones(3, 130)
    operation(x, POW2.activations, flag=flag)
    flag.check()
    x[1, 2] = torch.inf
    operation(x, POW2.activations, flag=flag)
    with pytest.raises(e4m3.GroupNotFinite):
        flag.check()


def test_a_kernel_is_checked_at_once_unless_the_caller_does() -> None:
    with pytest.raises(e4m3.GroupNotFinite), e4m3.finite_check(CPU, None) as not_finite:
        not_finite.fill_(1)
    flag = e4m3.FiniteFlag(CPU)
    with e4m3.finite_check(CPU, flag) as not_finite:
        not_finite.fill_(1)
    with pytest.raises(e4m3.GroupNotFinite):
        flag.check()
