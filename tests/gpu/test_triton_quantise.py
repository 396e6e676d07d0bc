import pytest
import torch
from torch import Tensor

from fp8core.numerics import e4m3
from fp8core.numerics.block_codes import FiniteFlag, row_and_column_codes, row_codes, tile_codes
from fp8core.numerics.e4m3 import GroupNotFinite, decode, encode, quantise_columns, quantise_rows, quantise_tiles

pytestmark = pytest.mark.gpu

RULES = ["pow2", "fp32"]
DTYPES = [torch.bfloat16, torch.float32]


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], name: str) -> None:
    codes, scales = found
    assert codes.is_contiguous(), name
    assert torch.equal(codes.cpu().view(torch.uint8), encode(expected[0].cpu()).view(torch.uint8)), name
    assert torch.equal(scales.cpu(), expected[1].cpu()), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_kernels_give_the_bytes_of_the_reference(device, kernel_cases, dtype: torch.dtype, rule: str) -> None:
    for case in kernel_cases.cases(dtype):
        reference, x = case.x.float(), case.x.to(device)
        rows, columns = row_and_column_codes(x, rule)
        assert_same(row_codes(x, rule), quantise_rows(reference, rule), case.name)
        assert_same(rows, quantise_rows(reference, rule), case.name)
        assert_same(columns, quantise_columns(reference, rule), case.name)
        assert_same(tile_codes(x, rule), quantise_tiles(reference, rule), case.name)


@pytest.mark.parametrize("rule", RULES)
def test_the_reference_gives_the_same_bytes_on_a_gpu(device, kernel_cases, rule: str) -> None:
    for case in kernel_cases.cases(torch.float32):
        for quantise in (quantise_rows, quantise_columns, quantise_tiles):
            grid, scales = quantise(case.x.to(device), rule)
            assert_same((encode(grid), scales), quantise(case.x, rule), case.name)


def test_scales_of_every_bfloat16_amax(device) -> None:
    # One amax in a row: all of them from one launch.
    amax = (torch.arange(0, 0x7F80, dtype=torch.int32) << 16).view(torch.float32)[:, None]
    for rule in RULES:
        found = row_codes(amax.bfloat16().to(device), rule)[1]
        assert torch.equal(found.cpu(), e4m3.scale_from_amax(amax, rule))


@pytest.mark.parametrize("codes_of", [row_codes, row_and_column_codes, tile_codes])
@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_with_nan_or_infinity_is_quantised(device, codes_of, value: float, dtype: torch.dtype) -> None:
    for position in ((0, 0), (129, 4), (64, 129), (127, 127), (66, 17)):
        x = torch.ones(130, 130, dtype=dtype, device=device)
        x[position] = value
        for rule in RULES:
            with pytest.raises(GroupNotFinite, match="NaN or infinity"):
                codes_of(x, rule)


def test_a_flag_remembers_until_it_is_asked(device) -> None:
    flag = FiniteFlag(device)
    good = torch.ones(4, 4, device=device)
    row_codes(good * torch.inf, "pow2", flag)
    row_codes(good, "pow2", flag)
    with pytest.raises(GroupNotFinite):
        flag.check()
    clean = FiniteFlag(device)
    tile_codes(good, "fp32", clean)
    clean.check()


@pytest.mark.parametrize("codes_of", [row_codes, tile_codes])
def test_layout_in_memory_changes_nothing(device, codes_of) -> None:
    x = torch.randn(256, 384, generator=torch.Generator().manual_seed(5)).bfloat16().to(device)
    strided = x.t().contiguous().t()
    for found, expected in zip(codes_of(strided, "pow2"), codes_of(x, "pow2"), strict=True):
        assert torch.equal(found.float(), expected.float())


def test_scales_lie_as_block_scaled_gemms_read_them(device) -> None:
    x = torch.randn(256, 512, device=device).bfloat16()
    (_, rows), (codes, columns) = row_and_column_codes(x, "pow2")
    assert (rows.shape, rows.stride()) == ((256, 4), (1, 256))
    assert (columns.shape, columns.stride()) == ((512, 2), (1, 512))
    assert codes.shape == (512, 256)
    padded = row_codes(x[:9], "pow2")[1]
    assert (padded.shape, padded.stride()) == ((9, 4), (1, 12))


def test_decode_is_the_same_on_a_gpu(device) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert torch.equal(decode(codes.to(device)).cpu().nan_to_num(7.0), decode(codes).nan_to_num(7.0))
