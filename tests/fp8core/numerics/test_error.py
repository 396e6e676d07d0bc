import pytest
import torch
from torch import Tensor

from fp8core.numerics.e4m3 import GroupNotFinite
from fp8core.numerics.error import gemm_error, relative_rms


def operands(k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(40, k, generator=generator), torch.randn(150, k, generator=generator)


def test_relative_rms_is_a_ratio_of_norms() -> None:
    reference = torch.tensor([[3.0, 4.0]])
    assert relative_rms(reference, reference) == 0
    assert relative_rms(torch.tensor([[3.0, 4.0 + 5.0]]), reference) == 1.0
    assert relative_rms(reference * 1e30 * (1 + 2**-10), reference * 1e30) == pytest.approx(2**-10, rel=1e-4)


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


def test_order_changes_a_few_bf16_roundings() -> None:
    generator = torch.Generator().manual_seed(2)
    left, right = torch.randn(512, 1024, generator=generator), torch.randn(512, 1024, generator=generator)
    assert 0 < gemm_error(left, right, "fp32").bf16_differing < 1e-3


def test_operands_on_the_grid_have_no_error(random_grid) -> None:
    left, right = random_grid(20, 256, 0), random_grid(140, 256, 1)
    for x in (left, right):
        x[:, ::128] = 448.0  # the amax of every group
    error = gemm_error(left, right, "pow2")
    assert error.exact == 0
    assert error.hardware == error.hardware_order < 2**-24


def test_smaller_groups_follow_outliers_better() -> None:
    left, right = operands(512, seed=1)
    left[:, 5] *= 1e4
    assert gemm_error(left, right, "fp32", 32).exact < gemm_error(left, right, "fp32", 128).exact


def test_an_operand_that_is_not_finite_is_refused() -> None:
    left, right = operands(128)
    left[3, 4] = torch.nan
    with pytest.raises(GroupNotFinite):
        gemm_error(left, right, "pow2")
