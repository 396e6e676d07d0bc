"""Content-addressed files of a run, named by the SHA-256 of their bytes, and the shards of its unfinished steps."""

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import save as encode_tensors
from torch import Tensor

from fp8core import durable
from fp8core.errors import StoredFileError
from fp8core.models.safetensors_files import FileTensors
from fp8core.store.json_text import Bytes, canonical_json, parse_model
from fp8core.store.layout import ARTIFACTS, shards_place
from fp8core.store.manifest import Content, StepManifest
from fp8core.store.tables import read_json, read_table, tensor_header

# Empty: safetensors writes metadata keys in random order; a single key keeps the bytes fixed.
_METADATA = {"fp8_grpo": "{}"}


class ArtifactError(StoredFileError):
    """A stored file that is missing, unreadable or changed."""


class Ref(BaseModel):
    """The reference that tasks pass to one another in place of data."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str = Field(description="What the content means: rollouts, rewards, scales, ...")
    digest: str = Field(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the file.")
    uri: str = Field(
        pattern=r"^artifacts/[0-9a-f]{2}/[0-9a-f]{64}\.(json|parquet|safetensors)$",
        description="Path relative to the run directory.",
    )
    size: Bytes = Field(description="Bytes of the file.")


def contents(artifacts: Mapping[str, Ref]) -> dict[str, Content]:
    return {name: Content(digest=ref.digest, size=ref.size) for name, ref in artifacts.items()}


def encode_table(table: pa.Table) -> bytes:
    """A table as parquet; equal rows give equal bytes, however they are split into chunks."""
    buffer = io.BytesIO()
    # Arrow's own schema would differ between lists that were built and lists that were read (the name of their items).
    pq.write_table(table.combine_chunks(), buffer, compression="zstd", store_schema=False)
    return buffer.getvalue()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except ArtifactError:
        raise
    except FileNotFoundError as error:
        raise ArtifactError(f"{path}: the file is missing") from error
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from error
    except StoredFileError as error:
        raise ArtifactError(str(error)) from error


def read_verified_bytes(path: Path, digest: str) -> bytes:
    with _reading(path):
        data = path.read_bytes()
    _check_digest(path, hashlib.sha256(data).hexdigest(), digest)
    return data


def _check_content(path: Path, digest: str) -> None:
    with _reading(path):
        actual = durable.file_digest(path)
    _check_digest(path, actual, digest)


def _check_digest(path: Path, actual: str, digest: str) -> None:
    if actual != digest:
        raise ArtifactError(f"{path}: content differs: SHA-256 {actual}, expected {digest}")


class ArtifactStore:
    """The artifacts of one run directory. Safe for threads."""

    def __init__(self, root: Path, origin: Path | None = None) -> None:
        """Missing files are read from the directory `origin`."""
        self._root = root
        self._origin = origin
        self._step_tables: dict[Ref, pa.Table | None] = {}
        """Tables that were put since `forget_tables`; None until a reader has parsed the file."""

    def path(self, ref: Ref) -> Path:
        own = self._root / ref.uri
        return own if self._origin is None or own.exists() else self._origin / ref.uri

    def is_intact(self, ref: Ref) -> bool:
        try:
            _check_content(self.path(ref), ref.digest)
        except ArtifactError:
            return False
        return True

    def put_back(self, ref: Ref, source: "ArtifactStore") -> None:
        file = source.path(ref)
        _check_content(file, ref.digest)
        durable.ensure_copy(self._root / ref.uri, file, ref.digest)

    def put_table(self, kind: str, table: pa.Table) -> Ref:
        ref = self._commit(kind, "parquet", encode_table(table))
        self._step_tables.setdefault(ref, None)
        return ref

    def get_table(self, ref: Ref, columns: Sequence[str] | None = None) -> pa.Table:
        """In the order of `columns`, without those that the table lacks. A table of this step is parsed once."""
        if ref not in self._step_tables:
            return _read_table(self._read(ref), ref.kind, self.path(ref), columns)
        table = self._step_tables.get(ref)
        if table is None:
            # Read back: a table that was built may have other types than the file gives to a process that resumes.
            table = _read_table(self._read(ref), ref.kind, self.path(ref))
            self._step_tables[ref] = table
        if columns is None:
            return table
        return table.select([name for name in dict.fromkeys(columns) if name in table.column_names])

    def forget_tables(self) -> None:
        """At the end of a step: its tables leave the memory."""
        self._step_tables.clear()

    def put_tensors(self, kind: str, tensors: Mapping[str, Tensor]) -> Ref:
        copies = {
            name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, tensor in sorted(tensors.items())
        }
        return self._commit(kind, "safetensors", encode_tensors(copies, _METADATA))

    def file_tensors(self, ref: Ref) -> FileTensors:
        """Read one at a time; the digest of the whole file is checked here."""
        path = self.path(ref)
        _check_content(path, ref.digest)
        with _reading(path):
            return FileTensors(dict(sorted(tensor_header(path).items())))

    def put_json(self, kind: str, value: Any) -> Ref:
        return self._commit(kind, "json", canonical_json(value, kind))

    def get_json(self, ref: Ref) -> Any:
        with _reading(self.path(ref)):
            return read_json(self._read(ref), ref.kind, self.path(ref))

    def get_manifest(self, ref: Ref) -> StepManifest:
        with _reading(self.path(ref)):
            return parse_model(self._read(ref), StepManifest, f"{self.path(ref)}: not of kind manifest")

    def shards(self, step: int) -> "RolloutShards":
        return RolloutShards(self._root / shards_place(step))

    def _commit(self, kind: str, extension: str, data: bytes) -> Ref:
        digest = hashlib.sha256(data).hexdigest()
        ref = Ref(kind=kind, digest=digest, uri=f"{ARTIFACTS}/{digest[:2]}/{digest}.{extension}", size=len(data))
        durable.ensure_file(self._root / ref.uri, data)
        return ref

    def _read(self, ref: Ref) -> bytes:
        return read_verified_bytes(self.path(ref), ref.digest)


class RolloutShards:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def append(self, table: pa.Table) -> None:
        buffer = io.BytesIO()
        # Half the time of an artifact: tokens and log-probs seldom repeat, and building a dictionary takes longest.
        pq.write_table(table, buffer, compression="zstd", use_dictionary=False, store_schema=False)
        data = buffer.getvalue()
        number = max((int(path.name.split("-")[0]) + 1 for path in self._shard_files()), default=0)
        durable.write_file(self._folder / f"{number:06d}-{hashlib.sha256(data).hexdigest()}.parquet", data)

    def read(self) -> pa.Table | None:
        """In the order of their `append`. A damaged shard is removed: what it held counts as unfinished."""
        tables = []
        for path in self._shard_files():
            try:
                tables.append(_read_table(read_verified_bytes(path, path.stem.split("-")[1]), "shards", path))
            except ArtifactError:
                path.unlink()
        return pa.concat_tables(tables) if tables else None

    def clear(self) -> None:
        for path in self._shard_files():
            path.unlink()
        if self._folder.is_dir():
            durable.sweep(self._folder)
            self._folder.rmdir()

    def _shard_files(self) -> list[Path]:
        return sorted(self._folder.glob("[0-9]*-*.parquet"))


def _read_table(data: bytes, kind: str, path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    with _reading(path):
        return read_table(pa.BufferReader(data), kind, path, columns)
