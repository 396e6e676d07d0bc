"""What Triton's interpreter cannot show: hard quotients in bulk, layouts, offsets beyond 2^31, addresses."""

import pytest
import torch
from torch import Tensor

from fp8core.numerics import e4m3
from fp8core.numerics.fingerprint import fingerprint, fingerprints
from fp8core.numerics.fused import add_norm_row_codes, swiglu, swiglu_codes
from fp8core.numerics.recipe import FP32_ACTIVATIONS, POW2, RECIPES, Recipe

pytestmark = pytest.mark.parametrize("device", [pytest.param("gpu", marks=pytest.mark.gpu)], indirect=True)

EPS = 1e-6
BOTH = FP32_ACTIVATIONS.activations, FP32_ACTIVATIONS.tokens


def assert_same(found: e4m3.Codes, expected: e4m3.Codes, name: str = "") -> None:
    assert found[0].is_contiguous(), name
    assert torch.equal(found[0].cpu().view(torch.uint8), expected[0].cpu().view(torch.uint8)), name
    assert torch.equal(found[1].cpu(), expected[1].cpu()), name


def encoded(quantised: tuple[Tensor, Tensor]) -> e4m3.Codes:
    return e4m3.encode(quantised[0]), quantised[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_hard_matrices_have_the_bytes_of_the_reference(
    device, kernel_cases, dtype: torch.dtype, recipe: Recipe
) -> None:
    for case in kernel_cases.cases(dtype):
        wide, x = case.x.float(), case.x.to(device)
        rows, columns = e4m3.row_and_column_codes(x, recipe.activations, recipe.tokens)
        for found, quantise, grouping in (
            (e4m3.row_codes(x, recipe.activations), e4m3.quantise_rows, recipe.activations),
            (rows, e4m3.quantise_rows, recipe.activations),
            (columns, e4m3.quantise_columns, recipe.tokens),
            (e4m3.tile_codes(x, recipe.weights), e4m3.quantise_tiles, recipe.weights),
        ):
            expected = encoded(quantise(wide, grouping))
            assert_same(found, expected, case.name)
            # The reference has the same bytes on a GPU.
            assert_same(encoded(quantise(wide.to(device), grouping)), expected, case.name)


def test_scales_lie_as_block_scaled_gemms_read_them(device) -> None:
    x = torch.randn(256, 512, device=device).bfloat16()
    (_, rows), (codes, columns) = e4m3.row_and_column_codes(x, *BOTH)
    assert (rows.shape, rows.stride()) == ((256, 4), (1, 256))
    assert (columns.shape, columns.stride()) == ((512, 2), (1, 512))
    assert codes.shape == (512, 256)
    padded = e4m3.row_codes(x[:9], POW2.activations)[1]
    assert (padded.shape, padded.stride()) == ((9, 4), (1, 12))


def test_a_row_is_the_same_alone_and_among_others(device) -> None:
    x, added = (
        torch.randn(300, 4096, generator=torch.Generator().manual_seed(i)).bfloat16().to(device) for i in (1, 2)
    )
    weight = torch.linspace(0.5, 1.5, 4096, device=device).bfloat16().float()
    _total, (codes, scales) = add_norm_row_codes(x, added, weight, EPS, FP32_ACTIVATIONS.activations)
    for part in (slice(0, 1), slice(17, 18), slice(299, 300)):
        _total, alone = add_norm_row_codes(x[part], added[part], weight, EPS, FP32_ACTIVATIONS.activations)
        assert_same(alone, (codes[part], scales[part]))


def test_a_full_batch_of_swiglu(device) -> None:
    """Offsets beyond 2^31 elements."""
    gate_up = torch.randn(65_536 + 3, 2 * 17_408, device=device, dtype=torch.bfloat16)
    rows, _columns = swiglu_codes(gate_up, *BOTH)
    assert_same(rows, e4m3.row_codes(swiglu(gate_up), BOTH[0]))


# Fingerprints

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]
DTYPES += [torch.uint8, torch.int32, torch.int64, torch.bool]
# Bytes: about a word, about a block of 8 KiB, about a program of 512 KiB, and several programs.
BLOCK, PROGRAM = 1 << 13, 1 << 19
LENGTHS = [*range(18), BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 8, 3 * BLOCK + 5, PROGRAM - 8, PROGRAM - 1, PROGRAM]
LENGTHS += [PROGRAM + 1, PROGRAM + 8, PROGRAM + BLOCK, PROGRAM + BLOCK + 3, 3 * PROGRAM + 77, 7 * PROGRAM]


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_lengths_about_words_blocks_and_programs_in_one_launch(device) -> None:
    tensors = [noise(length, seed=length) for length in LENGTHS]
    assert fingerprints([tensor.to(device) for tensor in tensors]) == [fingerprint(tensor) for tensor in tensors]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_strides_and_offsets(device, dtype: torch.dtype) -> None:
    whole = (torch.randn(37, 91, generator=torch.Generator().manual_seed(2)) * 100).to(dtype)

    def views(x: Tensor) -> list[Tensor]:
        flat = x.view(-1)
        return [x, x.t(), x[:, ::2], x[3:9, 5:], flat[1:], flat[3:], flat[::3], x[0, 0], x[:0]]

    assert fingerprints(views(whole.to(device))) == [fingerprint(view) for view in views(whole)]


def test_more_than_four_gigabytes(device) -> None:
    # Offsets of bytes and words beyond 2^32.
    tensor = torch.zeros((1 << 32) + 4096, dtype=torch.uint8, device=device)
    tensor[-1], tensor[1 << 31], tensor[12345] = 1, 2, 3
    assert fingerprint(tensor) == fingerprint(tensor.cpu())
