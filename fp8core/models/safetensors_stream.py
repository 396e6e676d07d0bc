"""safetensors files read and written in pieces, so that no tensor has to fit in memory.

A file is an eight-byte little-endian header length, a JSON header (type, shape and place of every tensor), and the
tensors' bytes without gaps (https://github.com/huggingface/safetensors, README). Files are laid out as that library
lays them out, wide types first and then by name, so the same tensors give the same bytes.

A `Conversion` turns one tensor from BF16 to block FP8 or back, some rows of tiles at a time.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic_core import from_json
from torch import Tensor

from fp8core.errors import UserError
from fp8core.models.tensor_source import TensorSource
from fp8core.models.weights import SCALE_SUFFIX
from fp8core.numerics.e4m3 import GroupNotFinite, decode, encode, quantise_tiles
from fp8core.numerics.recipe import TILE, Grouping
from fp8core.user_files import open_input, read_json_object

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

# Bytes of one element, in the library's order of types.
ITEM_SIZES = {
    **{"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1},
    **{"I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "C64": 8, "F64": 8, "I64": 8, "U64": 8},
}
_RANKS = {dtype: rank for rank, dtype in enumerate(ITEM_SIZES)}
_LARGEST_HEADER = 100_000_000


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
        return self.elements * ITEM_SIZES[self.dtype]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, its bytes `offset` from the beginning."""

    file: Path
    spec: StoredSpec
    offset: int

    def refused(self, problem: str) -> UserError:
        return _refused(self.file, self.spec.name, problem)

    def absolute(self) -> "StoredTensor":
        """The same, for a process with another working directory."""
        return replace(self, file=self.file.absolute())

    def whole(self) -> Tensor:
        """The tensor, in its stored type (errors: `rows`)."""
        return self.rows(0, self.spec.shape[0])

    def chunks(self, elements: int) -> Iterator[Tensor]:
        """The bytes in order, uint8, those of `elements` values at a time (the last may be fewer).
        Raises UserError: the file cannot be read, or ends early."""
        step = elements * ITEM_SIZES[self.spec.dtype]
        try:
            with open_input(self.file) as file:
                file.seek(self.offset)
                for start in range(0, self.spec.size, step):
                    buffer = bytearray(min(step, self.spec.size - start))
                    if file.readinto(buffer) != len(buffer):
                        raise self.refused("the file ends within it")
                    yield torch.frombuffer(buffer, dtype=torch.uint8)
        except OSError as error:
            raise self.refused(f"cannot be read: {error.strerror}") from error

    def rows(self, first: int, count: int) -> Tensor:
        """Consecutive rows, in the stored type. Raises UserError: the file cannot be read, or ends early."""
        row = StoredSpec(self.spec.name, self.spec.dtype, self.spec.shape[1:])
        part = replace(row, shape=(count, *row.shape))
        place = StoredTensor(self.file, part, self.offset + first * row.size)
        data = next(place.chunks(part.elements)) if part.elements else torch.empty(0, dtype=torch.uint8)
        return data.view(FLOATS[part.dtype]).view(part.shape)


class FileTensors(TensorSource):
    """Tensors that are read in their files; another process must see these at the same paths."""

    def __init__(self, stored: Mapping[str, "StoredTensor | Dequantised"]) -> None:
        # The other process has a working directory of its own.
        self._stored = {name: place.absolute() for name, place in stored.items()}

    def __getitem__(self, name: str) -> Tensor:
        """Raises UserError: the file cannot be read, or holds codes without a value."""
        return self._stored[name].whole()

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint, in one file or in those that its index names.
    Raises UserError: naming the file, and the tensor where it is one that is wrong."""
    single, index = folder / WEIGHTS, folder / INDEX
    if single.is_file():
        return read_header(single)
    if not index.is_file():
        raise UserError(f"{folder}: neither {WEIGHTS} nor {INDEX}; only safetensors weights are read")
    weight_map = _weight_map(index)
    stored: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())):
        for name, tensor in read_header(folder / file).items():
            if name in stored:
                raise tensor.refused(f"expected once, found in {stored[name].file.name} as well")
            stored[name] = tensor
    for name, file in weight_map.items():
        if name not in stored or stored[name].file.name != file:
            raise _refused(folder / file, name, f"the index {INDEX} says it is here, and it is not")
    return stored


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, in the order of their bytes; all bytes of the file are accounted for.
    Raises UserError: naming the file, and the tensor where it is one that is wrong."""
    content, begin, size = _header(file)
    content.pop("__metadata__", None)
    places = {name: _place(file, name, entry) for name, entry in content.items()}
    stored: dict[str, StoredTensor] = {}
    position = begin
    for name, (spec, start, stop) in sorted(places.items(), key=lambda item: item[1][1:]):
        if begin + start != position or stop - start != spec.size:
            raise _refused(file, name, f"its bytes {start} to {stop} do not fit its shape or the tensor before it")
        position = begin + stop
        if position > size:
            raise _refused(file, name, f"the file ends within it, {position - size} bytes early")
        stored[name] = StoredTensor(file, spec, begin + start)
    if position != size:
        raise UserError(f"{file}: {size - position} bytes after the last tensor")
    return stored


def file_order(spec: StoredSpec) -> tuple[int, str]:
    """Sorts tensors as they lie in a file: a wide type never follows a narrow one, so all are aligned."""
    return -_RANKS[spec.dtype], spec.name


def write_tensors(path: Path, specs: Sequence[StoredSpec], pieces: Iterable[tuple[str, Tensor]]) -> None:
    """Write a new file, durably; pieces of different tensors may alternate. Raises OSError."""
    header, places = _layout(specs)
    with path.open("xb") as file:
        file.write(header)
        for name, values in pieces:
            start, stop = places[name]
            data = values.contiguous().view(-1).view(torch.uint8).numpy().data
            places[name] = start + data.nbytes, stop
            file.seek(start)
            file.write(data)
        assert all(start == stop for start, stop in places.values()), "pieces do not add up to the tensors"
        file.flush()
        os.fsync(file.fileno())


def create_file(path: Path, specs: Sequence[StoredSpec]) -> None:
    """Write the header of a file, which has its size; `write_rows` fills it. Raises OSError."""
    header, places = _layout(specs)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(max(stop for _, stop in places.values()))


def write_rows(path: Path, rows: Iterable[tuple[str, int, Tensor]]) -> None:
    """Write rows of tensors, each with the row at which it begins, into a file that `create_file` made, durably.

    Others may write other rows of it. Raises OSError.
    """
    stored = read_header(path)
    with path.open("r+b") as file:
        for name, first, values in rows:
            data = values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            place = stored[name]
            file.seek(place.offset + first * math.prod(place.spec.shape[1:]) * values.itemsize)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _layout(specs: Sequence[StoredSpec]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The header, and where each tensor begins and ends in the file."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for spec in sorted(specs, key=file_order):
        place = [position, position + spec.size]
        entries[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": place}
        position += spec.size
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    ends = {spec.name: entries[spec.name]["data_offsets"] for spec in specs}
    return len(text).to_bytes(8, "little") + text, {name: (begin + a, begin + b) for name, (a, b) in ends.items()}


def _header(file: Path) -> tuple[dict[str, Any], int, int]:
    """The JSON header, where the tensors begin, and the size of the file."""
    try:
        with open_input(file) as handle:
            size = os.fstat(handle.fileno()).st_size
            length = int.from_bytes(handle.read(8), "little")
            if size < 8 or length > min(size - 8, _LARGEST_HEADER):
                raise UserError(f"{file}: not a complete safetensors file: no header of the length it states")
            content = from_json(handle.read(length), allow_inf_nan=False)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{file}: not a safetensors file: the header is not JSON") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: not a safetensors file: the header is not an object")
    return content, 8 + length, size


def _place(file: Path, name: str, entry: object) -> tuple[StoredSpec, int, int]:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(stop)]} if (
            dtype in ITEM_SIZES and all(isinstance(side, int) and 0 <= side < 1 << 62 for side in shape)
        ):
            return StoredSpec(name, dtype, tuple(shape)), start, stop
    raise _refused(
        file, name, f"a type, shape or place in the header is malformed or unknown: {json.dumps(entry)[:200]}"
    )


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json_object(index).get("weight_map")
    files = weight_map.values() if isinstance(weight_map, dict) else ()
    if not files or not all(isinstance(file, str) and Path(file).name == file for file in files):
        raise UserError(f"{index}: weight_map: expected an object from tensors to files of this folder")
    return dict(weight_map or {})


def _refused(file: Path, name: str, problem: str) -> UserError:
    return UserError(f"{file}: tensor {name}: {problem}")


FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
INTEGERS = ("BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64")

# 2 MiB of FP32: a processor's cache holds it.
_CHUNK_ELEMENTS = 1 << 19


class Conversion(Protocol):
    """One tensor of the source on its way into the target."""

    @property
    def stored(self) -> StoredTensor: ...

    @property
    def results(self) -> tuple[StoredSpec, ...]: ...

    def pieces(self) -> Iterator[tuple[str, Tensor]]:
        """Consecutive parts of the results, by name; a UserError names a tensor that cannot be converted."""
        ...


@dataclass(frozen=True)
class Quantised:
    """A matrix to E4M3 codes and the scales of its tiles, by rows of tiles."""

    stored: StoredTensor
    tiles: Grouping

    @property
    def results(self) -> tuple[StoredSpec, ...]:
        name, shape = self.stored.spec.name, self.stored.spec.shape
        return StoredSpec(name, "F8_E4M3", shape), StoredSpec(name + SCALE_SUFFIX, "F32", _tiles(shape))

    def pieces(self) -> Iterator[tuple[str, Tensor]]:
        codes, scales = (spec.name for spec in self.results)
        columns = self.stored.spec.shape[1]
        for chunk in self.stored.chunks(_rows(columns) * columns):
            values = chunk.view(FLOATS[self.stored.spec.dtype]).view(-1, columns)
            try:
                grid, tile_scales = quantise_tiles(values.bfloat16().float(), self.tiles)
            except GroupNotFinite as error:
                raise self.stored.refused("holds NaN or infinity in BF16") from error
            yield codes, encode(grid)
            yield scales, tile_scales


@dataclass(frozen=True)
class Dequantised:
    """E4M3 codes and their scales to a matrix in BF16, by rows of tiles."""

    stored: StoredTensor
    scales: StoredTensor

    def __post_init__(self) -> None:
        shape, tiles, scales = self.stored.spec.shape, _tiles(self.stored.spec.shape), self.scales.spec
        if len(shape) != 2 or 0 in shape or scales.shape != tiles or scales.dtype not in FLOATS:
            raise self.scales.refused(
                f"expected floating-point {list(tiles)} for weights {list(shape)}, found {scales.dtype} "
                f"{list(scales.shape)}"
            )

    @property
    def results(self) -> tuple[StoredSpec, ...]:
        return (StoredSpec(self.stored.spec.name, "BF16", self.stored.spec.shape),)

    def absolute(self) -> "Dequantised":
        return Dequantised(self.stored.absolute(), self.scales.absolute())

    def whole(self) -> Tensor:
        """The matrix. Raises UserError: the file cannot be read, or holds codes without a value."""
        return torch.cat([part for _, part in self.pieces()])

    def pieces(self) -> Iterator[tuple[str, Tensor]]:
        columns = self.stored.spec.shape[1]
        rows = _rows(columns)
        for scales, chunk in zip(self._scales(rows), self.stored.chunks(rows * columns), strict=True):
            grid = decode(chunk).view(-1, columns)
            by_row = scales.repeat_interleave(TILE, dim=0)[: len(grid)]
            values = (grid * by_row.repeat_interleave(TILE, dim=1)[:, :columns]).bfloat16()
            if not _is_finite(values):
                raise self.stored.refused("holds NaN, or values beyond BF16")
            yield self.stored.spec.name, values

    def _scales(self, rows: int) -> Iterator[Tensor]:
        """FP32 scales of `rows` rows of the matrix at a time."""
        per_row = self.scales.spec.shape[1]
        for chunk in self.scales.chunks(rows // TILE * per_row):
            scales = chunk.view(FLOATS[self.scales.spec.dtype]).float()
            if not bool(((scales > 0) & (scales < float("inf"))).all()):
                raise self.scales.refused("a scale is not positive and finite")
            yield scales.view(-1, per_row)


@dataclass(frozen=True)
class Kept:
    """A tensor that is not quantised, in its own type or narrowed to BF16."""

    stored: StoredTensor
    dtype: str

    @property
    def results(self) -> tuple[StoredSpec, ...]:
        return (StoredSpec(self.stored.spec.name, self.dtype, self.stored.spec.shape),)

    def pieces(self) -> Iterator[tuple[str, Tensor]]:
        for chunk in self.stored.chunks(_CHUNK_ELEMENTS):
            if self.stored.spec.dtype in INTEGERS:
                yield self.stored.spec.name, chunk
                continue
            values = chunk.view(FLOATS[self.stored.spec.dtype]).to(FLOATS[self.dtype])
            if not _is_finite(values):
                raise self.stored.refused(f"holds NaN or infinity in {self.dtype}")
            yield self.stored.spec.name, values


def _is_finite(values: Tensor) -> bool:
    # The maximum of anything with NaN is NaN; `isfinite` of every element takes many times as long in BF16.
    return bool(values.abs().amax().isfinite())


def _tiles(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-side // TILE) for side in shape)


def _rows(columns: int) -> int:
    """Rows of a chunk: whole tiles."""
    return max(1, _CHUNK_ELEMENTS // (columns * TILE)) * TILE
