"""The order of Hopper's kernels against exact arithmetic, and the errors that the tables of numerics show."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.quantisation_errors import fused_multiply_add, gemm_error, hardware_gemm, quantise_tensor
from fp8core.numerics.e4m3 import GroupNotFinite, quantise_tiles


def grid(rows: int, columns: int, seed: int) -> Tensor:
    """E4M3 codes drawn uniformly, without NaN, as FP32 values."""
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return codes.view(torch.float8_e4m3fn).float().nan_to_num(0.0)


def scales(rows: int, k: int, rule: str, seed: int, block: int = 128) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-30, 12, (rows, math.ceil(k / block)), generator=generator)
    powers = torch.ldexp(torch.ones(exponents.shape), exponents)
    return powers if rule == "pow2" else powers * (1 + torch.rand(powers.shape, generator=generator))


def operands(k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(40, k, generator=generator), torch.randn(150, k, generator=generator)


@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    seed=st.integers(0, 2**31),
    rule=st.sampled_from(["pow2", "fp32"]),
)
@settings(max_examples=30)
def test_a_tensor_of_one_scale_is_one_tile(shape: tuple[int, int], seed: int, rule: str) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    found, scale = quantise_tensor(x, rule)
    expected, tiles = quantise_tiles(x, rule, max(shape))
    assert scale.shape == ()
    assert torch.equal(scale, tiles[0, 0])
    assert torch.equal(found, expected)
    assert torch.equal(quantise_tensor(x.t().reshape(-1, 1, shape[0]), rule)[0].view(shape[::-1]), expected.t())


def to_fp32(exact: Fraction) -> float:
    """Round to nearest even, by integers alone; normal numbers only."""
    if exact == 0:
        return 0.0
    size = abs(exact)
    exponent = math.floor(math.log2(size)) - 23
    exponent += (size >= Fraction(2) ** (exponent + 24)) - (size < Fraction(2) ** (exponent + 23))
    return math.copysign(float(round(size / Fraction(2) ** exponent) * Fraction(2) ** exponent), exact)


@given(
    a=st.floats(-1e6, 1e6, width=32),
    b=st.floats(-1e6, 1e6, width=32),
    c=st.floats(-1e9, 1e9, width=32),
)
@settings(max_examples=300)
def test_fused_multiply_add_rounds_once(a: float, b: float, c: float) -> None:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact and abs(exact) < Fraction(2) ** -126:
        return
    assert fused_multiply_add(*(torch.tensor([v]) for v in (a, b, c))).item() == to_fp32(exact)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("side", [1.0, -1.0])
def test_fused_multiply_add_where_fp64_alone_would_round_twice(side: float, sign: float) -> None:
    # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24 is a midpoint of FP32, and 2^-60 beside it is lost in FP64.
    factor, addend = torch.tensor([1 + 2.0**-12]), torch.tensor([side * 2.0**-60])
    product = factor.double() * factor.double()
    assert torch.equal(product + addend.double(), product)
    found = fused_multiply_add(sign * factor, factor, sign * addend).item()
    assert found == sign * (1 + 2.0**-11 + (2.0**-23 if side > 0 else 0.0))


def slow_hardware_gemm(left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor, block: int) -> Tensor:
    out = torch.empty(left.shape[0], right.shape[0])
    for i in range(left.shape[0]):
        for j in range(right.shape[0]):
            total = 0.0
            for b in range(left_scales.shape[1]):
                columns = slice(b * block, (b + 1) * block)
                pairs = zip(left[i, columns].tolist(), right[j, columns].tolist(), strict=True)
                partial = to_fp32(sum((Fraction(x) * Fraction(y) for x, y in pairs), Fraction(0)))
                factor = to_fp32(Fraction(left_scales[i, b].item()) * Fraction(right_scales[j, b].item()))
                total = to_fp32(Fraction(factor) * Fraction(partial) + Fraction(total))
            out[i, j] = total
    return out


@pytest.mark.parametrize("rule", ["pow2", "fp32"])
@pytest.mark.parametrize(("shape", "block"), [((4, 3, 384), 128), ((3, 5, 300), 128), ((4, 4, 200), 32)])
def test_hardware_gemm_is_one_fma_per_block(shape: tuple[int, int, int], block: int, rule: str) -> None:
    m, n, k = shape
    left, right = grid(m, k, 22), grid(n, k, 23)
    factors = scales(m, k, rule, 24, block), scales(n, k, rule, 25, block)
    product = hardware_gemm(left, factors[0], right, factors[1], block)
    assert product.dtype == torch.float32
    assert torch.equal(product, slow_hardware_gemm(left, factors[0], right, factors[1], block))


def test_hardware_gemm_adds_blocks_in_ascending_order() -> None:
    left, right = torch.zeros(2, 384), torch.ones(2, 384)
    left[:, [0, 128, 256]] = torch.tensor([1.0, 1.0, -1.0])
    left_scales = torch.tensor([[2.0**30, 1.0, 2.0**30], [1.0, 2.0**30, 2.0**30]])
    assert hardware_gemm(left, left_scales, right, torch.ones(2, 3)).tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("rule", ["pow2", "fp32"])
@pytest.mark.parametrize("k", [300, 1024])
def test_order_is_a_small_part_of_the_error(rule: str, k: int) -> None:
    error = gemm_error(*operands(k), rule)
    # Both operands lose about 2^-4 / sqrt(3) of an element's binade.
    assert 0.02 < error.exact < 0.06
    assert error.hardware == pytest.approx(error.exact, rel=1e-3)
    assert error.plain_fp32 == pytest.approx(error.exact, rel=1e-3)
    assert 0 < error.hardware_order < 2**-22
    assert 0 < error.plain_fp32_order < 2**-20
    assert error.bf16_differing < 1e-3


def test_operands_on_the_grid_have_no_error() -> None:
    left, right = grid(20, 256, 0), grid(140, 256, 1)
    for x in (left, right):
        x[:, ::128] = 448.0  # the amax of every group
    error = gemm_error(left, right, "pow2")
    assert error.exact == 0
    assert error.hardware == error.hardware_order < 2**-24


def test_an_operand_that_is_not_finite_is_refused() -> None:
    left, right = operands(128)
    left[3, 4] = torch.nan
    with pytest.raises(GroupNotFinite):
        gemm_error(left, right, "pow2")
