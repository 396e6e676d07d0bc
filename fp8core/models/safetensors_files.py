"""safetensors files of a checkpoint: their headers, single tensors, and rows that many processes write into one file.

The library cannot write a part of a file, so `create_file` lays one out alike
(https://github.com/huggingface/safetensors, README)."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fp8core.errors import UserError
from fp8core.user_files import read_json_object

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Bytes of one element, in the library's order of types.
_ITEM_SIZES = {
    **{"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1},
    **{"I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "C64": 8, "F64": 8, "I64": 8, "U64": 8},
}
_RANKS = {dtype: rank for rank, dtype in enumerate(_ITEM_SIZES)}


@dataclass(frozen=True)
class StoredSpec:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.elements * _ITEM_SIZES[self.dtype]


@dataclass(frozen=True)
class StoredTensor:
    file: Path
    spec: StoredSpec

    def error(self, problem: str) -> UserError:
        return UserError(f"{self.file}: tensor {self.spec.name}: {problem}")

    def whole(self) -> Tensor:
        """Raises UserError: the file cannot be read."""
        with _reading(self.file) as handle:
            tensor: Tensor = handle.get_tensor(self.spec.name)
        return tensor

    def rows(self, first: int, count: int) -> Tensor:
        """Raises UserError: the file cannot be read."""
        with _reading(self.file) as handle:
            part: Tensor = handle.get_slice(self.spec.name)[first : first + count]
        return part


class TensorSource(Mapping[str, Tensor]):
    """Tensors that are made when they are asked for. Its pickle is small, and gives the same tensors elsewhere.

    A model of 8 billion parameters is 32 GB in FP32: too much to hand from one process to another."""


class FileTensors(TensorSource):
    """Tensors that are read in their files; another process must see these at the same paths."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        # The other process has a working directory of its own.
        self._stored = {name: replace(place, file=place.file.absolute()) for name, place in tensors.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._stored[name].whole()

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


@lru_cache(maxsize=16)
def _open(file: Path, inode: int, modified_ns: int, size: int) -> Any:
    """A file's handle; opening one for each tensor would read a header of thousands of tensors as often."""
    return safe_open(file, framework="pt")


@contextmanager
def _reading(file: Path) -> Iterator[Any]:
    try:
        status = file.stat()
        yield _open(file, status.st_ino, status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise UserError(f"{file}: not a complete safetensors file: {error}") from error


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, whose bytes are all accounted for. Raises UserError: naming the file."""
    with _reading(file) as handle:
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 - it is no mapping
        specs = [StoredSpec(name, part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()]
    return {spec.name: StoredTensor(file, spec) for spec in sorted(specs, key=_file_order)}


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint, in one file or in those that its index names.
    Raises UserError: naming the file, and the tensor where it is one that is wrong."""
    single = folder / WEIGHTS
    index = folder / INDEX
    if single.is_file():
        return read_header(single)
    if not index.is_file():
        raise UserError(f"{folder}: neither {WEIGHTS} nor {INDEX}; only safetensors weights are read")
    weight_map = read_json_object(index).get("weight_map")
    files = weight_map.values() if isinstance(weight_map, dict) else ()
    if not files or not all(isinstance(file, str) and Path(file).name == file for file in files):
        raise UserError(f"{index}: weight_map: expected an object from tensors to files of this folder")
    assert isinstance(weight_map, dict)
    headers = {file: read_header(folder / file) for file in sorted(set(files))}
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise UserError(f"{folder / file}: tensor {name}: the index {INDEX} says it is here, and it is not")
    return {name: tensor for file, header in headers.items() for name, tensor in header.items()}


def _file_order(spec: StoredSpec) -> tuple[int, str]:
    """Sorts tensors as they lie in a file: a wide type never follows a narrow one, so all are aligned."""
    return -_RANKS[spec.dtype], spec.name


def create_file(path: Path, specs: Sequence[StoredSpec]) -> None:
    """Write the header of a file, which has its size; `write_rows` fills it. Raises OSError."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for spec in sorted(specs, key=_file_order):
        place = [position, position + spec.size]
        entries[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": place}
        position += spec.size
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)


def write_rows(path: Path, rows: Iterable[tuple[str, int, Tensor]]) -> None:
    """Write rows of tensors, each with the row at which it begins, into a file that `create_file` made, durably.
    Raises OSError."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
        for name, first, values in rows:
            data = values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            begin, _ = entries[name]["data_offsets"]
            file.seek(8 + length + begin + first * math.prod(entries[name]["shape"][1:]) * values.itemsize)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
