"""Finished prompt groups of the step that is being generated, durable one by one.

Each shard is a parquet file `<number>-<SHA-256>.parquet`. When the step's whole table is committed the shards go.
"""

import hashlib
from pathlib import Path

import pyarrow as pa

from fp8core.store import durable
from fp8core.store.artifacts import ArtifactError, decode_table, encode_table, read_checked


class RolloutShards:
    """The shards of one folder; one writer."""

    def __init__(self, folder: Path) -> None:
        """Creates nothing before the first `append`."""
        self._folder = folder

    def append(self, table: pa.Table) -> None:
        """Adds the rows of a table; they are on disk when this returns. Raises UserError when the disk refuses."""
        data = encode_table(table)
        committed = self._committed()
        number = int(committed[-1].name.split("-")[0]) + 1 if committed else 0
        durable.write_file(self._folder / f"{number:06d}-{hashlib.sha256(data).hexdigest()}.parquet", data)

    def read(self) -> pa.Table | None:
        """The rows of all shards in the order of their `append`, None when there is no shard.

        Raises ArtifactError for a damaged shard; removing the file makes the engine generate its groups again.
        """
        tables = [self._load(path) for path in self._committed()]
        return pa.concat_tables(tables) if tables else None

    def clear(self) -> None:
        """Removes the shards and their folder."""
        for path in self._committed():
            path.unlink()
        if self._folder.is_dir():
            durable.sweep(self._folder)
            self._folder.rmdir()

    def _committed(self) -> list[Path]:
        return sorted(self._folder.glob("[0-9]*-*.parquet"))

    @staticmethod
    def _load(path: Path) -> pa.Table:
        try:
            return decode_table(read_checked(path, path.stem.split("-")[1]))
        except ArtifactError as error:
            raise ArtifactError(f"{error}; remove it to generate its completions again") from error
