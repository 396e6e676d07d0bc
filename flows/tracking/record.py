"""The record of a training's MLflow run (tracking.json), and the mark of a training that was killed."""

from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from flows.tracking.tracker import RunOutcome
from fp8core import durable
from fp8core.errors import StoredFileError, UserError, without_passwords
from fp8core.store.layout import LEDGER, LOCK
from fp8core.store.lock import is_held

RECORD = "tracking.json"


class TrackingRecord(BaseModel):
    """The content of tracking.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    uri: str = Field(description="Tracking store or server, without its password.")
    experiment_id: str
    run_id: str
    published: int = Field(-1, ge=-1, description="The last step that MLflow holds; -1: none.")
    models: int = Field(-1, ge=-1, description="The last step whose checkpoint MLflow holds as a model; -1: none.")
    status: Literal["RUNNING"] | RunOutcome = Field("RUNNING", description="RUNNING after a kill, too.")
    error: str | None = Field(None, description="Why it failed.")
    ended_ms: int | None = Field(None, description="Unix milliseconds; null while it runs.")
    told: bool = Field(False, description="Whether MLflow shows the end.")

    @field_validator("uri", "error")
    @classmethod
    def _without_passwords(cls, text: str | None) -> str | None:
        return None if text is None else without_passwords(text)

    def changed(self, **fields: Any) -> "TrackingRecord":
        return TrackingRecord.model_validate({**self.model_dump(), **fields})


def read_record(folder: Path) -> TrackingRecord | None:
    """The record of a run's folder; None when it has none. Raises StoredFileError when it is malformed."""
    path = folder / RECORD
    try:
        return TrackingRecord.model_validate_json(path.read_bytes()) if path.is_file() else None
    except ValidationError as error:
        raise StoredFileError(f"{path}: not a record of an MLflow run: {error.errors()[0]['msg']}") from error


def write_record(folder: Path, record: TrackingRecord) -> None:
    durable.write_file(folder / RECORD, record.model_dump_json(indent=2).encode() + b"\n")


def change_record(folder: Path, **fields: Any) -> TrackingRecord:
    """Raises UserError: the disk refuses."""
    record = read_record(folder)
    assert record is not None, "an open run has its record"
    changed = record.changed(**fields)
    write_record(folder, changed)
    return changed


def mark_dead(runs: Path, uri: str) -> None:
    """Show in the store `uri` how trainings in the folders of `runs` ended that could not say it themselves.

    One whose process is gone was killed, at its last write to the ledger; one that ended in an outage has its outcome.
    """
    for path in sorted(runs.glob(f"*/{RECORD}")):
        with suppress(UserError, OSError):  # Errors in one run's file do not concern the others.
            folder = path.parent
            record = read_record(folder)
            if record is None or record.told or record.uri != without_passwords(uri):
                continue
            if not is_held(folder / LOCK):
                _mark(folder, record, uri)


def _mark(folder: Path, record: TrackingRecord, uri: str) -> None:
    # MLflow takes a second to import.
    from flows.tracking.store import STORE_ERRORS, existing_store

    if record.status == "RUNNING":
        record = record.changed(status="KILLED", ended_ms=(folder / LEDGER).stat().st_mtime_ns // 1_000_000)
    with suppress(*STORE_ERRORS):
        existing_store(uri).set_terminated(record.run_id, record.status, record.ended_ms)
        write_record(folder, record.changed(told=True))
