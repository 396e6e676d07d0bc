"""What was removed from a run on purpose: one JSON line a file, durable before the file goes (`tombstones.jsonl`).

A file that is there is there, whatever a tombstone says: its remover may have been killed, or a redo may have made it
again. A tombstone explains a file that is missing.
"""

from collections.abc import Collection
from io import FileIO
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fp8core.errors import UserError
from fp8core.store.durable import sync_path
from fp8core.store.lines import append_durably, lines_forward, whole_end

_FILE = "tombstones.jsonl"


class Tombstone(BaseModel):
    """A removed artifact, or the removed folder of a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str = Field(description="SHA-256 of the artifact; of a checkpoint, that of its folder.")
    uri: str = Field(description="Path relative to the run directory.")
    kind: str = Field(description="Kind of the artifact; `checkpoint`; `orphan` for what no ledger line named.")
    size: int = Field(ge=0, description="Bytes.")
    step: int | None = Field(description="The step that made it; null for an orphan.")
    reason: str = Field(description="Why it went.")
    when: str = Field(description="ISO 8601, UTC.")


def read_tombstones(folder: Path) -> dict[str, Tombstone]:
    """The tombstones in a run's folder by digest, the newest of each; empty when nothing was ever removed.

    Raises UserError: the file cannot be read, or a line is malformed (file:line).
    """
    path = folder / _FILE
    if not path.exists():
        return {}
    try:
        with FileIO(path) as file:
            lines = [line for _, line in lines_forward(file, 0, whole_end(file))]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    found = (_parse(path, number, line) for number, line in enumerate(lines, start=1))
    return {tombstone.digest: tombstone for tombstone in found}


def bury(folder: Path, tombstones: Collection[Tombstone]) -> None:
    """Appends tombstones, durably; what they name may be removed afterwards. Only for the holder of the run's lock.

    Raises UserError when the disk refuses; then none is added.
    """
    path = folder / _FILE
    lines = b"".join(tombstone.model_dump_json().encode() + b"\n" for tombstone in tombstones)
    try:
        with FileIO(path, "a+") as file:
            sync_path(folder)
            file.truncate(whole_end(file))
            append_durably(file, lines)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _parse(path: Path, number: int, line: bytes) -> Tombstone:
    try:
        return Tombstone.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(["tombstone", *(str(part) for part in first["loc"])])
        raise UserError(f"{path}:{number}: not a {place}: {first['msg']}") from error
