import pytest
import torch

from fp8core.numerics.block_codes import FiniteFlag, launched, row_and_column_codes, row_codes, tile_codes
from fp8core.numerics.e4m3 import GroupNotFinite, encode, quantise_columns, quantise_rows, quantise_tiles
from fp8core.numerics.kernel_choice import has_kernels

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rule", ["pow2", "fp32"])
def test_on_a_cpu_codes_are_those_of_the_reference(dtype: torch.dtype, rule: str) -> None:
    x = torch.randn(130, 200, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert not has_kernels(x)
    rows, columns = row_and_column_codes(x, rule)
    for (codes, scales), quantise in (
        (row_codes(x, rule), quantise_rows),
        (rows, quantise_rows),
        (columns, quantise_columns),
        (tile_codes(x, rule), quantise_tiles),
    ):
        grid, expected = quantise(x.float(), rule)
        assert codes.dtype == torch.float8_e4m3fn
        assert torch.equal(codes.view(torch.uint8), encode(grid).view(torch.uint8))
        assert torch.equal(scales, expected)


@pytest.mark.parametrize("codes_of", [row_codes, row_and_column_codes, tile_codes])
def test_the_reference_refuses_at_once_with_and_without_a_flag(codes_of) -> None:
    for flag in (None, FiniteFlag(CPU)):
        with pytest.raises(GroupNotFinite):
            codes_of(torch.tensor([[1.0, torch.inf]]), "pow2", flag)


def test_a_flag_raises_once_it_is_set() -> None:
    flag = FiniteFlag(CPU)
    flag.check()
    flag.not_finite.fill_(1)
    with pytest.raises(GroupNotFinite, match="NaN or infinity"):
        flag.check()


def test_a_kernel_is_checked_at_once_unless_the_caller_does() -> None:
    def kernel(not_finite: torch.Tensor) -> str:
        not_finite.fill_(1)
        return "codes"

    with pytest.raises(GroupNotFinite):
        launched(kernel, CPU, None)
    flag = FiniteFlag(CPU)
    assert launched(kernel, CPU, flag) == "codes"
    with pytest.raises(GroupNotFinite):
        flag.check()
