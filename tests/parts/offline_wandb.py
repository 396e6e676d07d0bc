"""What W&B's offline mode wrote for a run: records of its transaction log, in the format of LevelDB's logs."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from waiting import wait_for
from wandb.proto import wandb_internal_pb2

_MAGIC, _BLOCK, _HEADER = 7, 32768, 7
_FULL, _LAST = 1, 4


class OfflineRun:
    """All that the processes of one training left below its folder, as `wandb sync` would send it."""

    def __init__(self, folder: Path) -> None:
        self.folders = sorted((folder / "wandb").glob("offline-run-*"))
        # W&B's own process writes the last of them after a run's `finish`.
        wait_for(lambda: len(self.exit_codes) == len(self.folders))

    @property
    def records(self) -> list[Any]:
        return [record for each in self.folders for file in each.glob("*.wandb") for record in _records(file)]

    @property
    def ids(self) -> set[str]:
        return {record.run.run_id for record in self.records if record.WhichOneof("record_type") == "run"}

    @property
    def exit_codes(self) -> list[int]:
        return [record.exit.exit_code for record in self.records if record.WhichOneof("record_type") == "exit"]

    def rows(self) -> list[dict[str, Any]]:
        return [_values(record.history.item) for record in self.records if record.history.item]

    def steps(self) -> list[dict[str, Any]]:
        return [row for row in self.rows() if any(name.startswith(("core/", "detail/")) for name in row)]

    def summary(self) -> dict[str, Any]:
        changes = (_values(record.summary.update) for record in self.records)
        return {name: value for values in changes for name, value in values.items()}

    def config(self) -> dict[str, Any]:
        """The newest value of each section."""
        changes = [record.run.config.update for record in self.records]
        changes += [record.config.update for record in self.records]
        return {name: value for update in changes for name, value in _values(update).items()}

    def tags(self) -> list[str]:
        return list([record.run.tags for record in self.records if record.run.tags][-1])

    def artifacts(self) -> dict[str, str]:
        return {record.artifact.name: record.artifact.type for record in self.records if record.artifact.name}

    def tables(self) -> dict[str, dict[str, Any]]:
        """Name -> the newest table."""
        return {
            file.name.rsplit("_", 2)[0]: json.loads(file.read_text())
            for folder in self.folders
            for file in folder.glob("files/media/table/*.json")
        }

    def files(self) -> set[str]:
        return {
            file.relative_to(folder / "files" / "training").as_posix()
            for folder in self.folders
            for file in folder.glob("files/training/**/*")
            if file.is_file()
        }


def _values(items: Any) -> dict[str, Any]:
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def _records(file: Path) -> Iterator[Any]:
    content, at, parts = file.read_bytes(), _MAGIC, b""
    while at + _HEADER <= len(content):
        if (left := _BLOCK - at % _BLOCK) < _HEADER:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        at += _HEADER
        if at + size > len(content):
            return  # It is being written.
        parts += content[at : at + size]
        at += size
        if kind in (_FULL, _LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record
