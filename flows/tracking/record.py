"""The record of a training in tracking services (tracking.json), and the mark of a training that was killed."""

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fp8core import durable
from fp8core.errors import StoredFileError, UserError, without_passwords
from fp8core.store.layout import LEDGER, LOCK
from fp8core.store.lock import has_owner

RECORD = "tracking.json"
RunOutcome = Literal["FINISHED", "FAILED", "KILLED"]


class ServiceRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    uri: str = Field(description="Store, server or folder, without its password.")
    experiment_id: str = Field("", description="MLflow's experiment or W&B's project.")
    # It becomes a part of globs and of printed commands, and may be a stranger's.
    run_id: str = Field("", pattern=r"^[\w.-]*$")
    published: int = Field(-1, ge=-1, description="The last step that the service holds; -1: none.")
    models: int = Field(-1, ge=-1, description="The last step whose checkpoint the service holds; -1: none.")
    told: bool = Field(False, description="Whether the service shows the end.")

    @field_validator("uri")
    @classmethod
    def _without_passwords(cls, uri: str) -> str:
        return without_passwords(uri)


class TrackingRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    services: dict[str, ServiceRecord] = Field(default_factory=dict, description="By name in `tracking.services`.")
    status: Literal["RUNNING"] | RunOutcome = Field("RUNNING", description="RUNNING after a kill, too.")
    error: str | None = Field(None, description="Why it failed.")
    ended_ms: int | None = Field(None, description="Unix milliseconds; null while it runs.")

    @field_validator("error")
    @classmethod
    def _without_passwords(cls, text: str | None) -> str | None:
        return None if text is None else without_passwords(text)

    @property
    def mlflow(self) -> ServiceRecord | None:
        return self.services.get("mlflow")

    def changed(self, **fields: Any) -> "TrackingRecord":
        return TrackingRecord.model_validate({**self.model_dump(), **fields})

    def with_service(self, service: str, **fields: Any) -> "TrackingRecord":
        services = self.model_dump()["services"]
        return self.changed(services={**services, service: {**services.get(service, {}), **fields}})


def read_record(folder: Path) -> TrackingRecord | None:
    """The record of a run's folder; None when it has none. Raises StoredFileError when it is malformed."""
    path = folder / RECORD
    try:
        return TrackingRecord.model_validate_json(path.read_bytes()) if path.is_file() else None
    except ValidationError as error:
        raise StoredFileError(f"{path}: not a record of tracked runs: {error.errors()[0]['msg']}") from error


def write_record(folder: Path, record: TrackingRecord) -> None:
    durable.write_file(folder / RECORD, record.model_dump_json(indent=2).encode() + b"\n")


class RecordFile:
    """tracking.json of an open run: one thread for each service changes it. Every change may raise UserError."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self.record = read_record(folder) or TrackingRecord()

    def change(self, **fields: Any) -> None:
        with self._lock:
            self._write(self.record.changed(**fields))

    def change_service(self, service: str, **fields: Any) -> None:
        with self._lock:
            self._write(self.record.with_service(service, **fields))

    def _write(self, record: TrackingRecord) -> None:
        write_record(self._folder, record)
        self.record = record


def mark_dead(runs: Path, uri: str) -> None:
    """Show in MLflow's store `uri` how trainings in the folders of `runs` ended that could not say it themselves.

    One whose process is gone was killed, at its last write to the ledger; one that ended in an outage has its outcome.
    """
    for path in sorted(runs.glob(f"*/{RECORD}")):
        with suppress(UserError, OSError):  # Errors in one run's file do not concern the others.
            folder = path.parent
            record = read_record(folder)
            service = None if record is None else record.mlflow
            if record is None or service is None or service.told or service.uri != without_passwords(uri):
                continue
            if not has_owner(folder / LOCK):
                _mark(folder, record, service.run_id, uri)


def _mark(folder: Path, record: TrackingRecord, run_id: str, uri: str) -> None:
    # MLflow takes a second to import.
    from flows.tracking.store import STORE_ERRORS, existing_store

    if record.status == "RUNNING":
        record = record.changed(status="KILLED", ended_ms=(folder / LEDGER).stat().st_mtime_ns // 1_000_000)
    with suppress(*STORE_ERRORS):
        existing_store(uri).set_terminated(run_id, record.status, record.ended_ms)
        write_record(folder, record.with_service("mlflow", told=True))
