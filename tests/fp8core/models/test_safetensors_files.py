"""Files of the safetensors library read, and laid out for processes that write rows of them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from fp8core.errors import UserError
from fp8core.models.safetensors_files import (
    INDEX,
    WEIGHTS,
    StoredSpec,
    create_file,
    read_folder,
    read_header,
    write_rows,
)

TENSORS = {
    "b": torch.arange(6.0).view(2, 3),
    "a": torch.arange(8).to(torch.bfloat16).view(4, 2),
    "codes": torch.arange(5).to(torch.float8_e4m3fn),
    "ids": torch.tensor([2**40]),
    "naïve": torch.tensor(3.0),
    "empty": torch.empty(0, 4),
}
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.int64: "I64"}


def raw(tensor: torch.Tensor) -> list[int]:
    return tensor.reshape(-1).view(torch.uint8).tolist()


def test_rows_that_many_write_give_the_bytes_of_the_library(tmp_path):
    tensors = {name: tensor for name, tensor in TENSORS.items() if tensor.dim()}
    path = tmp_path / WEIGHTS
    create_file(path, [StoredSpec(name, NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()])
    write_rows(path, [(name, 1, tensor[1:]) for name, tensor in tensors.items()])
    write_rows(path, [(name, 0, tensor[:1]) for name, tensor in tensors.items()])
    assert path.read_bytes() == save(tensors, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-8]),
        lambda path: path.write_bytes(path.read_bytes() + b"more"),
        lambda path: path.write_bytes(path.read_bytes().replace(b"F32", b"F31")),
        lambda path: path.write_bytes(b"\xff" * 99),
        lambda path: path.write_bytes(b""),
        lambda path: path.unlink(),
    ],
    ids=["cut", "longer", "type", "header", "empty", "missing"],
)
def test_a_damaged_file_is_one_line_with_its_name(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    path = tmp_path / WEIGHTS
    save_file(TENSORS, path)
    spoil(path)
    with pytest.raises(UserError) as refused:
        read_header(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("weight_map", "line"),
    [
        ({"a": "one.safetensors", "b": "two.safetensors"}, None),
        ({"a": "one.safetensors", "z": "two.safetensors"}, "two.safetensors: tensor z: the index"),
        ({"a": "two.safetensors", "b": "two.safetensors"}, "two.safetensors: tensor a: the index"),
        ({"a": "three.safetensors"}, "three.safetensors: "),
        ({"a": "../one.safetensors"}, f"{INDEX}: weight_map: expected"),
        (["a"], f"{INDEX}: weight_map: expected"),
        (..., "only safetensors weights are read"),
    ],
)
def test_an_index_leads_to_all_files_or_is_refused(tmp_path, weight_map, line):
    save_file({"a": torch.ones(3)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(4)}, tmp_path / "two.safetensors")
    if weight_map is not ...:
        (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    if line is None:
        assert {name: tensor.file.name for name, tensor in read_folder(tmp_path).items()} == weight_map
        return
    with pytest.raises(UserError) as refused:
        read_folder(tmp_path)
    assert line in str(refused.value)
