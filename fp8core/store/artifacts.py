"""Content-addressed files of a run: tables (parquet), tensors (safetensors) and JSON.

A file is named by the SHA-256 of its bytes, and the same content gives the same bytes, so that a step that is redone
can be compared by digests. Files are written once and never changed; whatever is read is checked first.
"""

import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import load as decode_tensors
from safetensors.torch import save as encode_tensors
from torch import Tensor

from fp8core.errors import UserError
from fp8core.store import durable
from fp8core.store.stopwatch import storing
from fp8core.store.tombstones import read_tombstones

_FOLDER = "artifacts"
# safetensors writes several metadata keys in random order; one key that holds all of them keeps the bytes fixed.
_METADATA_KEY = "fp8_grpo"


class ArtifactError(UserError):
    """A stored file that is missing, cannot be read, or is not what was written."""


class Ref(BaseModel):
    """What tasks pass to one another in place of data."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str = Field(min_length=1, description="What the content means: rollouts, rewards, scales, ...")
    digest: str = Field(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the file.")
    uri: str = Field(
        pattern=r"^artifacts/[0-9a-f]{2}/[0-9a-f]{64}\.[a-z]+$", description="Path relative to the run directory."
    )
    size: int = Field(ge=0, description="Bytes of the file.")


def encode_table(table: pa.Table) -> bytes:
    """A table as parquet; equal for equal rows, however they were split into chunks and wherever they came from."""
    buffer = io.BytesIO()
    # Arrow's own schema would tell apart lists that were built from lists that were read, by the name of their items.
    pq.write_table(table.combine_chunks(), buffer, compression="zstd", store_schema=False)
    return buffer.getvalue()


def decode_table(data: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """The table of `encode_table`, or those of some columns that it has."""
    # Threads would take new memory each, and columns are decoded within milliseconds.
    return pq.ParquetFile(pa.BufferReader(data)).read(columns=columns, use_threads=False)


def _refuse_non_json(value: Any, where: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where} is {value}: JSON has no such number")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where}: the key {key!r} is not a string")
            _refuse_non_json(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _refuse_non_json(item, f"{where}[{i}]")


def canonical_json(value: Any, name: str) -> bytes:
    """JSON with one spelling for one value: sorted keys, no spaces, ASCII.

    Raises UserError for NaN and infinities, which names the path of keys that starts with `name`; TypeError for what
    JSON cannot hold.
    """
    _refuse_non_json(value, name)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def read_checked(path: Path, digest: str, size: int | None = None) -> bytes:
    """The bytes of a file of known SHA-256 (and size). Raises ArtifactError, which says what is wrong."""
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ArtifactError(f"{path}: the file is missing") from error
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from error
    if size is not None and len(data) < size:
        raise ArtifactError(f"{path}: truncated: {len(data)} of {size} bytes")
    found = hashlib.sha256(data).hexdigest()
    if found != digest or (size is not None and len(data) != size):
        expected = digest if size is None else f"{digest} of {size} bytes"
        raise ArtifactError(f"{path}: content differs: SHA-256 {found} of {len(data)} bytes, expected {expected}")
    return data


class ArtifactStore:
    """The artifacts of one run directory. Safe for threads; whole contents are held in memory while they pass."""

    def __init__(self, root: Path, origin: Path | None = None) -> None:
        """`root` is the run directory; nothing is created before the first put.

        Files that `root` lacks are read from `origin`, another run's directory, which is never written to.
        """
        self._root = root
        self._origin = origin

    def path(self, ref: Ref) -> Path:
        """Where the file of a reference is."""
        return self._holder(ref) / ref.uri

    def damage(self, ref: Ref) -> ArtifactError | None:
        """What is wrong with the file of a reference; None when it is whole."""
        try:
            self._read(ref, Path(ref.uri).suffix.removeprefix("."))
        except ArtifactError as error:
            return error
        return None

    @storing()
    def put_back(self, ref: Ref, source: "ArtifactStore") -> None:
        """Replaces a damaged or missing file by that of another store. Raises ArtifactError; UserError (the disk)."""
        durable.ensure_file(self._root / ref.uri, source._read(ref, Path(ref.uri).suffix.removeprefix(".")))

    @storing()
    def put_table(self, kind: str, table: pa.Table) -> Ref:
        """Stores a table as parquet (zstd). Raises UserError when the disk refuses."""
        return self._commit(kind, "parquet", encode_table(table))

    @storing()
    def get_table(self, ref: Ref, columns: Sequence[str] | None = None) -> pa.Table:
        """A stored table, or those of some columns that it has; the whole file is checked. Raises ArtifactError."""
        return decode_table(self._read(ref, "parquet"), columns)

    @storing()
    def put_tensors(self, kind: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Ref:
        """Stores named tensors, of any device and strides, as safetensors. Raises UserError when the disk refuses."""
        copies = {
            name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, tensor in sorted(tensors.items())
        }
        header = {_METADATA_KEY: canonical_json(dict(metadata or {}), "metadata").decode()}
        return self._commit(kind, "safetensors", encode_tensors(copies, header))

    @storing()
    def get_tensors(self, ref: Ref) -> dict[str, Tensor]:
        """Stored tensors, on the CPU, sorted by name. Raises ArtifactError."""
        return dict(sorted(decode_tensors(self._read(ref, "safetensors")).items()))

    @storing()
    def get_metadata(self, ref: Ref) -> dict[str, str]:
        """The metadata stored with tensors. Raises ArtifactError."""
        data = self._read(ref, "safetensors")
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        metadata: dict[str, str] = json.loads(header["__metadata__"][_METADATA_KEY])
        return metadata

    @storing()
    def put_json(self, kind: str, value: Any) -> Ref:
        """Stores a value as canonical JSON. Raises UserError: NaN or infinity (with its key), the disk."""
        return self._commit(kind, "json", canonical_json(value, kind))

    @storing()
    def get_json(self, ref: Ref) -> Any:
        """A stored JSON value. Raises ArtifactError."""
        return json.loads(self._read(ref, "json"))

    def digest_json(self, value: Any) -> str:
        """The digest that `put_json` would name a value by."""
        return hashlib.sha256(canonical_json(value, "value")).hexdigest()

    def sweep(self) -> list[Path]:
        """Removes what killed writers left behind, and returns it; only before anything is put."""
        return durable.sweep(self._root / _FOLDER)

    def _commit(self, kind: str, extension: str, data: bytes) -> Ref:
        digest = hashlib.sha256(data).hexdigest()
        ref = Ref(kind=kind, digest=digest, uri=f"{_FOLDER}/{digest[:2]}/{digest}.{extension}", size=len(data))
        durable.ensure_file(self._root / ref.uri, data)
        return ref

    def _holder(self, ref: Ref) -> Path:
        """The folder that the file of a reference is read from."""
        return self._root if self._origin is None or (self._root / ref.uri).exists() else self._origin

    def _read(self, ref: Ref, extension: str) -> bytes:
        path = self.path(ref)
        if path.suffix != f".{extension}":
            raise ArtifactError(f"{path}: the {ref.kind} artifact is not a {extension} file")
        if not path.exists() and (tombstone := read_tombstones(self._holder(ref)).get(ref.digest)) is not None:
            raise ArtifactError(f"{path}: removed by gc on {tombstone.when} ({tombstone.reason})")
        return read_checked(path, ref.digest, ref.size)
