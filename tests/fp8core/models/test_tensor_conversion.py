from collections import defaultdict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from fp8core.errors import UserError
from fp8core.models.safetensors_stream import StoredTensor, read_header
from fp8core.models.tensor_conversion import Conversion, Dequantised, Kept, Quantised
from fp8core.numerics.e4m3 import ScaleRule, decode, encode, quantise_tiles

RULES: list[ScaleRule] = ["pow2", "fp32"]
NAME = "model.layers.0.mlp.up_proj.weight"
TORCH = {"F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}

# The last two come in several chunks, the very last with a rest of a tile in its last one.
SHAPES = [(1, 1), (128, 128), (127, 129), (300, 70), (1024, 1024), (1100, 1030)]


def matrix(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Values over many orders of magnitude, tiles of zeros and of next to nothing among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * torch.exp(2 * torch.randn(shape, generator=generator))
    values[: shape[0] // 3, : shape[1] // 3] *= 1e-12
    values[-130:, -130:] = 0
    return values


def stored(folder: Path, **tensors: Tensor) -> dict[str, StoredTensor]:
    save_file(tensors, folder / "file.safetensors")
    return read_header(folder / "file.safetensors")


def result(conversion: Conversion) -> dict[str, Tensor]:
    pieces = defaultdict(list)
    for name, values in conversion.pieces():
        pieces[name].append(values.reshape(-1).view(torch.uint8))
    specs = {spec.name: spec for spec in conversion.results}
    assert specs.keys() == pieces.keys()
    return {n: torch.cat(pieces[n]).view(TORCH[spec.dtype]).view(spec.shape) for n, spec in specs.items()}


def equal(left: Tensor, right: Tensor) -> bool:
    assert left.dtype == right.dtype
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def quantised(folder: Path, values: Tensor, rule: ScaleRule) -> tuple[Tensor, Tensor]:
    both = result(Quantised(stored(folder, **{NAME: values})[NAME], rule))
    return both[NAME], both[NAME + "_scale_inv"]


def dequantised(folder: Path, codes: Tensor, scales: Tensor) -> Tensor:
    both = stored(folder, w=codes, w_scale_inv=scales)
    return result(Dequantised(both["w"], both["w_scale_inv"]))["w"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_codes_and_scales_are_those_of_the_whole_matrix_in_bf16(tmp_path, shape, rule, dtype):
    values = matrix(shape).clamp(-6e4, 6e4).to(dtype)
    grid, expected = quantise_tiles(values.bfloat16().float(), rule)
    codes, scales = quantised(tmp_path, values, rule)
    assert equal(codes, encode(grid))
    assert equal(scales, expected)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_dequantised_is_grid_times_scale_in_bf16(tmp_path, shape, rule):
    codes, scales = quantised(tmp_path, matrix(shape).bfloat16(), rule)
    factors = scales.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    assert equal(dequantised(tmp_path, codes, scales), (codes.float() * factors).bfloat16())


def tiles(matrix_of_tiles: Tensor) -> Tensor:
    """[m * 128, n * 128] to [m, n, 128 * 128]."""
    rows, columns = matrix_of_tiles.shape
    return matrix_of_tiles.view(rows // 128, 128, columns // 128, 128).transpose(1, 2).flatten(2)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), deviation=st.floats(0, 3))
def test_power_of_two_scales_survive_a_round_trip(tmp_path_factory, seed, deviation):
    """Same values always; same bytes but where a tile's largest code is 224, which half the scale expresses as 448."""
    folder = tmp_path_factory.mktemp("round_trip")
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(256, 256, generator=generator) * torch.exp(
        deviation * torch.randn(256, 256, generator=generator)
    )
    codes, scales = quantised(folder, values.bfloat16(), "pow2")
    wide = dequantised(folder, codes, scales)
    again, scales_again = quantised(folder, wide, "pow2")
    assert equal(dequantised(folder, again, scales_again), wide)
    largest = tiles(decode(codes).abs()).amax(-1)
    assert torch.equal(scales_again, torch.where(largest == 224, scales / 2, scales))
    same = largest > 224
    assert torch.equal(tiles(again.view(torch.uint8))[same], tiles(codes.view(torch.uint8))[same])
    third, third_scales = quantised(folder, dequantised(folder, again, scales_again), "pow2")
    assert equal(third, again)
    assert equal(third_scales, scales_again)


def test_scales_in_bf16_are_read(tmp_path):
    codes, scales = quantised(tmp_path, matrix((1100, 300)).bfloat16(), "pow2")
    assert equal(dequantised(tmp_path, codes, scales.bfloat16()), dequantised(tmp_path, codes, scales))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_kept_is_narrowed_to_bf16(tmp_path, dtype):
    values = matrix((600, 1000)).clamp(-6e4, 6e4).to(dtype)
    kept = result(Kept(stored(tmp_path, w=values)["w"], "BF16"))
    assert equal(kept["w"], values.bfloat16())


@pytest.mark.parametrize("values", [torch.tensor([-7, 2**40]), torch.tensor([1.5, 1e-30])])
def test_what_is_kept_in_its_own_type_is_not_touched(tmp_path, values):
    tensor = stored(tmp_path, w=values)["w"]
    assert equal(result(Kept(tensor, tensor.spec.dtype))["w"], values)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3.4e38])
def test_values_that_are_not_finite_in_bf16_are_refused(tmp_path, value):
    values = torch.ones(1100, 1030)
    values[-1, -1] = value
    tensor = stored(tmp_path, **{NAME: values})[NAME]
    for conversion in (Quantised(tensor, "pow2"), Kept(tensor, "BF16")):
        with pytest.raises(UserError, match=f"file.safetensors: tensor {NAME}: holds NaN or infinity in BF16"):
            result(conversion)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_are_not_positive_and_finite_are_refused(tmp_path, scale):
    codes, scales = quantised(tmp_path, matrix((1100, 1030)).bfloat16(), "fp32")
    scales[-1, -1] = scale
    with pytest.raises(UserError, match=r"tensor w_scale_inv: a scale is not positive and finite"):
        dequantised(tmp_path, codes, scales)


@pytest.mark.parametrize(("code", "scale"), [(0x7F, 1.0), (0xFF, 1.0), (0x7E, 2.0**120)])
def test_codes_without_a_value_in_bf16_are_refused(tmp_path, code, scale):
    codes = torch.zeros(130, 130, dtype=torch.uint8)
    codes[129, 129] = code
    with pytest.raises(UserError, match="tensor w: holds NaN, or values beyond BF16"):
        dequantised(tmp_path, codes.view(torch.float8_e4m3fn), torch.full((2, 2), scale))


@pytest.mark.parametrize(
    ("shape", "scales"),
    [((130, 130), torch.ones(2, 1)), ((130, 130), torch.ones(2, 2, dtype=torch.int32)), ((0, 130), torch.ones(0, 2))],
)
def test_scales_of_another_shape_or_type_are_refused(tmp_path, shape, scales):
    with pytest.raises(UserError, match=r"tensor w_scale_inv: expected floating-point \[\d, 2\] for weights"):
        dequantised(tmp_path, torch.zeros(shape).to(torch.float8_e4m3fn), scales)
