import json
import os
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor

from fp8core.errors import UserError
from fp8core.models.safetensors_stream import (
    INDEX,
    WEIGHTS,
    Conversion,
    Dequantised,
    Kept,
    Quantised,
    StoredSpec,
    StoredTensor,
    read_folder,
    read_header,
    write_tensors,
)
from fp8core.numerics.e4m3 import decode, encode, quantise_tiles
from fp8core.numerics.recipe import FP32, POW2, Grouping

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
tensors_drawn = st.dictionaries(
    st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=6).filter(lambda n: n != "__metadata__"),
    st.tuples(st.sampled_from(sorted(DTYPES)), shapes),
    min_size=1,
    max_size=6,
)


def filled(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 2 + 1).to(DTYPES[dtype]).view(shape)


def in_halves(tensors: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """All first halves, then all second halves: pieces of different tensors alternate."""
    flat = {name: tensor.reshape(-1) for name, tensor in tensors.items()}
    halves = [(name, values[: len(values) // 2]) for name, values in flat.items()]
    return halves + [(name, values[len(values) // 2 :]) for name, values in flat.items()]


def specs_of(tensors: dict[str, torch.Tensor]) -> list[StoredSpec]:
    names = {dtype: name for name, dtype in DTYPES.items()}
    return [StoredSpec(name, names[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]


def bytes_of(tensor: torch.Tensor) -> list[int]:
    return tensor.reshape(-1).view(torch.uint8).tolist()


def values_of(stored: StoredTensor, elements: int) -> torch.Tensor:
    chunks = [torch.empty(0, dtype=torch.uint8), *stored.chunks(elements)]
    return torch.cat(chunks).view(DTYPES[stored.spec.dtype]).view(stored.spec.shape)


@given(drawn=tensors_drawn)
def test_pieces_give_the_bytes_of_the_safetensors_library(tmp_path_factory, drawn):
    tensors = {name: filled(*drawn[name]) for name in drawn}
    path = tmp_path_factory.mktemp("written") / "file.safetensors"
    write_tensors(path, specs_of(tensors), in_halves(tensors))
    assert path.read_bytes() == save(tensors, metadata={"format": "pt"})
    for name, tensor in load(path.read_bytes()).items():
        assert (tensor.dtype, bytes_of(tensor)) == (tensors[name].dtype, bytes_of(tensors[name]))


@given(drawn=tensors_drawn, elements=st.integers(1, 7))
def test_files_of_the_library_are_read_in_chunks(tmp_path_factory, drawn, elements):
    tensors = {name: filled(*drawn[name]) for name in drawn}
    path = tmp_path_factory.mktemp("read") / "file.safetensors"
    save_file(tensors, path)
    stored = read_header(path)
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert bytes_of(values_of(stored[name], elements)) == bytes_of(tensor)
        assert stored[name].spec.shape == tensor.shape


def test_pieces_that_do_not_add_up_are_a_defect(tmp_path):
    with pytest.raises(AssertionError, match="add up"):
        write_tensors(tmp_path / "file", [StoredSpec("x", "F32", (3,))], [("x", torch.zeros(2))])


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    save_file({"a": torch.ones(3, 2), "b": torch.ones(5)}, tmp_path / WEIGHTS)
    return tmp_path / WEIGHTS


def with_header(path: Path, **changes: object) -> None:
    """Change entries of the header; None removes one."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = {**json.loads(content[8 : 8 + length]), **changes}
    text = json.dumps({name: entry for name, entry in header.items() if entry is not None}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-8]), "tensor b: the file ends within it, 8 bytes early"),
        (lambda path: path.write_bytes(path.read_bytes() + b"more"), "4 bytes after the last tensor"),
        (lambda path: path.write_bytes(b"\xff" * 99), "not a complete safetensors file: no header of the length"),
        (lambda path: path.write_bytes(b""), "not a complete safetensors file"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "is a pipe; only regular files are read"),
        (
            lambda path: path.write_bytes((2).to_bytes(8, "little") + b"{x"),
            "not a safetensors file: the header is not JSON",
        ),
        (
            lambda path: path.write_bytes((2).to_bytes(8, "little") + b"[]"),
            "not a safetensors file: the header is not an object",
        ),
        (lambda path: with_header(path, a=None), "tensor b: its bytes 24 to 44 do not fit"),
        (
            lambda path: with_header(path, b={"dtype": "F32", "shape": [4], "data_offsets": [24, 44]}),
            "tensor b: its bytes 24 to 44 do not fit",
        ),
        (
            lambda path: with_header(path, b={"dtype": "F31", "shape": [5], "data_offsets": [24, 44]}),
            "tensor b: a type, shape or place in the header is malformed or unknown",
        ),
        (lambda path: with_header(path, b=[]), "tensor b: a type, shape or place"),
    ],
)
def test_a_corrupt_file_is_refused_by_its_name_and_tensor(weights, spoil, message):
    spoil(weights)
    with pytest.raises(UserError) as refused:
        read_header(weights)
    assert str(refused.value).startswith(f"{weights}: {message}")
    assert "\n" not in str(refused.value)


def test_a_file_that_shrinks_after_its_header_was_read(weights):
    stored = read_header(weights)["b"]
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(UserError, match="tensor b: the file ends within it"):
        list(stored.chunks(2))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Two files and their index."""
    save_file({"a": torch.ones(3)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(4)}, tmp_path / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "two.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tmp_path


def test_an_index_leads_to_all_files(shards):
    stored = read_folder(shards)
    assert {name: tensor.file.name for name, tensor in stored.items()} == {
        "a": "one.safetensors",
        "b": "two.safetensors",
    }
    assert torch.equal(values_of(stored["b"], 3), torch.zeros(4))


def test_one_file_wins_over_an_index(shards):
    save_file({"c": torch.ones(3)}, shards / WEIGHTS)
    assert read_folder(shards).keys() == {"c"}


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "one.safetensors", "z": "two.safetensors"}, "two.safetensors: tensor z: the index"),
        ({"a": "two.safetensors", "b": "two.safetensors"}, "two.safetensors: tensor a: the index"),
        ({"a": "three.safetensors"}, "three.safetensors: cannot be read"),
        ({"a": "../one.safetensors"}, f"{INDEX}: weight_map: expected"),
        ({}, f"{INDEX}: weight_map: expected"),
        (["a"], f"{INDEX}: weight_map: expected"),
    ],
)
def test_an_index_that_is_wrong_is_refused(shards, weight_map, message):
    (shards / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError) as refused:
        read_folder(shards)
    assert message in str(refused.value)


def test_a_tensor_in_two_files_is_refused(shards):
    save_file({"a": torch.ones(3), "b": torch.ones(1)}, shards / "two.safetensors")
    with pytest.raises(UserError, match=r"two.safetensors: tensor a: expected once, found in one.safetensors as well"):
        read_folder(shards)


def test_a_folder_without_safetensors_is_refused(tmp_path):
    with pytest.raises(UserError, match="only safetensors weights are read"):
        read_folder(tmp_path)


def test_the_library_maps_what_is_written(tmp_path):
    tensors = {"odd": filled("F8_E4M3", (3, 5)), "scale": filled("F32", (1,)), "half": filled("BF16", (7,))}
    write_tensors(tmp_path / WEIGHTS, specs_of(tensors), list(tensors.items()))
    with safe_open(tmp_path / WEIGHTS, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    for name, tensor in load_file(tmp_path / WEIGHTS).items():
        assert bytes_of(tensor) == bytes_of(tensors[name])


TILES = [POW2.weights, FP32.weights]
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


def quantised(folder: Path, values: Tensor, tiles: Grouping) -> tuple[Tensor, Tensor]:
    both = result(Quantised(stored(folder, **{NAME: values})[NAME], tiles))
    return both[NAME], both[NAME + "_scale_inv"]


def dequantised(folder: Path, codes: Tensor, scales: Tensor) -> Tensor:
    both = stored(folder, w=codes, w_scale_inv=scales)
    return result(Dequantised(both["w"], both["w_scale_inv"]))["w"]


@pytest.mark.parametrize("tiles", TILES, ids=["pow2", "fp32"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_codes_and_scales_are_those_of_the_whole_matrix_in_bf16(tmp_path, shape, tiles, dtype):
    values = matrix(shape).clamp(-6e4, 6e4).to(dtype)
    grid, expected = quantise_tiles(values.bfloat16().float(), tiles)
    codes, scales = quantised(tmp_path, values, tiles)
    assert equal(codes, encode(grid))
    assert equal(scales, expected)


@pytest.mark.parametrize("tiles", TILES, ids=["pow2", "fp32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_dequantised_is_grid_times_scale_in_bf16(tmp_path, shape, tiles):
    codes, scales = quantised(tmp_path, matrix(shape).bfloat16(), tiles)
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
    codes, scales = quantised(folder, values.bfloat16(), POW2.weights)
    wide = dequantised(folder, codes, scales)
    again, scales_again = quantised(folder, wide, POW2.weights)
    assert equal(dequantised(folder, again, scales_again), wide)
    largest = tiles(decode(codes).abs()).amax(-1)
    assert torch.equal(scales_again, torch.where(largest == 224, scales / 2, scales))
    same = largest > 224
    assert torch.equal(tiles(again.view(torch.uint8))[same], tiles(codes.view(torch.uint8))[same])
    third, third_scales = quantised(folder, dequantised(folder, again, scales_again), POW2.weights)
    assert equal(third, again)
    assert equal(third_scales, scales_again)


def test_scales_in_bf16_are_read(tmp_path):
    codes, scales = quantised(tmp_path, matrix((1100, 300)).bfloat16(), POW2.weights)
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
    for conversion in (Quantised(tensor, POW2.weights), Kept(tensor, "BF16")):
        with pytest.raises(UserError, match=f"file.safetensors: tensor {NAME}: holds NaN or infinity in BF16"):
            result(conversion)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_are_not_positive_and_finite_are_refused(tmp_path, scale):
    codes, scales = quantised(tmp_path, matrix((1100, 1030)).bfloat16(), FP32.weights)
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
