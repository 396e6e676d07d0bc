"""The files that gc removed from a run: one JSON line each, durable before the file goes (`tombstones.jsonl`).

An entry explains a file that is missing, and nothing about one that is there. gc may have been killed before the
removal, or a step that was computed again may have stored the file once more.
"""

from collections.abc import Collection
from io import FileIO
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fp8core.durable import append_durably, read_lines, sole_file, sync_path, unwritable, whole_end
from fp8core.errors import StoredFileError
from fp8core.store.json_text import Bytes, StepNumber, mistake
from fp8core.store.layout import DELETION_LOG


class Deletion(BaseModel):
    """A removed artifact, or the removed folder of a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str = Field(
        max_length=128, description="SHA-256 of the artifact; of a checkpoint, its folder's; empty for the rest of one."
    )
    uri: str = Field(max_length=4096, description="Path relative to the run directory.")
    kind: str = Field(
        max_length=200, description="Kind of the artifact; `checkpoint`; `orphan` for what no ledger line named."
    )
    size: Bytes = Field(description="Bytes.")
    step: StepNumber | None = Field(description="The step that made it; null for an orphan, and for a rest.")
    reason: str = Field(max_length=4096, description="Why it went.")
    when: str = Field(max_length=64, description="ISO 8601, UTC.")


def read_deletions(folder: Path) -> dict[str, Deletion]:
    """The deletions in a run's folder by digest, the newest of each; empty when nothing was ever removed.

    Raises UserError: the file cannot be read, or a line is malformed (file:line).
    """
    path = folder / DELETION_LOG
    try:
        lines = read_lines(path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StoredFileError(f"cannot read {path}: {error.strerror}") from error
    deletions = (_parse(line, f"{path}:{number}") for number, line in enumerate(lines, start=1))
    return {deletion.digest: deletion for deletion in deletions}


def _parse(line: bytes, place: str) -> Deletion:
    try:
        return Deletion.model_validate_json(line)
    except ValidationError as error:
        raise StoredFileError(f"{place}: not a deletion: {mistake(error)}") from error


def log_deletions(folder: Path, deletions: Collection[Deletion]) -> None:
    """Append deletions durably, before the files are removed. Only for the holder of the run's lock.

    Raises UserError when the disk refuses; then none is added.
    """
    path = folder / DELETION_LOG
    lines = b"".join(deletion.model_dump_json().encode() + b"\n" for deletion in deletions)
    try:
        with FileIO(path, "a+", opener=sole_file) as file:
            sync_path(folder)
            file.truncate(whole_end(file))
            append_durably(file, lines)
    except OSError as error:
        raise unwritable(path, error) from error
