import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load, load_file, save, save_file

from fp8core.errors import UserError
from fp8core.models.safetensors_stream import (
    INDEX,
    WEIGHTS,
    StoredTensor,
    TensorSpec,
    read_folder,
    read_header,
    write_tensors,
)

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


def specs_of(tensors: dict[str, torch.Tensor]) -> list[TensorSpec]:
    names = {dtype: name for name, dtype in DTYPES.items()}
    return [TensorSpec(name, names[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]


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
        write_tensors(tmp_path / "file", [TensorSpec("x", "F32", (3,))], [("x", torch.zeros(2))])


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
