"""Finished prompt groups of the step that is being generated, durable one by one.

Each shard is a parquet file `<number>-<SHA-256>.parquet`. When the step's whole table is committed the shards go.
"""

import hashlib
import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from fp8core.store import durable
from fp8core.store.artifacts import ArtifactError, decode_table, read_checked
from fp8core.store.stopwatch import storing


class RolloutShards:
    """The shards of one folder; one writer."""

    def __init__(self, folder: Path) -> None:
        """Creates nothing before the first `append`."""
        self._folder = folder

    @storing()
    def append(self, table: pa.Table) -> None:
        """Adds the rows of a table; they are on disk when this returns. Raises UserError when the disk refuses."""
        data = _encode(table)
        committed = self._committed()
        number = int(committed[-1].name.split("-")[0]) + 1 if committed else 0
        durable.write_file(self._folder / f"{number:06d}-{hashlib.sha256(data).hexdigest()}.parquet", data)

    @storing()
    def read(self) -> pa.Table | None:
        """The rows of all shards in the order of their `append`, None when there is no shard.

        Raises ArtifactError for a damaged shard.
        """
        tables = [decode_table(_checked(path)) for path in self._committed()]
        return pa.concat_tables(tables) if tables else None

    def discard_damaged(self) -> list[ArtifactError]:
        """Removes damaged shards, so that their groups count as unfinished; returns what was wrong with each."""
        found = []
        for path in self._committed():
            try:
                _checked(path)
            except ArtifactError as error:
                path.unlink()
                found.append(error)
        return found

    @storing()
    def clear(self) -> None:
        """Removes the shards and their folder."""
        for path in self._committed():
            path.unlink()
        if self._folder.is_dir():
            durable.sweep(self._folder)
            self._folder.rmdir()

    def _committed(self) -> list[Path]:
        return sorted(self._folder.glob("[0-9]*-*.parquet"))


def _encode(table: pa.Table) -> bytes:
    """A table as parquet, in half the time of an artifact: a shard lives briefly, and is compared with nothing."""
    buffer = io.BytesIO()
    # Hardly a token or log-prob occurs often enough for a dictionary, and looking takes longest.
    pq.write_table(table, buffer, compression="zstd", use_dictionary=False, store_schema=False)
    return buffer.getvalue()


def _checked(path: Path) -> bytes:
    return read_checked(path, path.stem.split("-")[1])
