"""What this machine knows of a training's MLflow run (tracking.json): where it is, what it holds, how it stands.

Neither MLflow nor torch is imported here: the record answers in microseconds, and during an outage, what would
otherwise be a request.
"""

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fp8core.errors import UserError
from fp8core.store import durable

RunOutcome = Literal["FINISHED", "FAILED", "KILLED"]
RECORD = "tracking.json"


class TrackingRecord(BaseModel):
    """The content of tracking.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    uri: str = Field(description="Tracking store or server.")
    experiment_id: str
    run_id: str
    published: int = Field(ge=-1, description="The last step that MLflow holds; -1: none.")
    models: int = Field(ge=-1, description="The last step whose checkpoint MLflow holds as a model; -1: none.")
    status: Literal["RUNNING"] | RunOutcome = Field(description="Of the training; RUNNING after a kill, too.")
    error: str | None = Field(description="Why it failed.")
    ended_ms: int | None = Field(description="Unix milliseconds; null while it runs.")
    told: bool = Field(description="Whether MLflow shows the status.")

    @classmethod
    def begun(cls, uri: str, experiment_id: str, run_id: str) -> "TrackingRecord":
        """Of an MLflow run that may hold nothing yet."""
        return cls(
            uri=uri,
            experiment_id=experiment_id,
            run_id=run_id,
            published=-1,
            models=-1,
            status="RUNNING",
            error=None,
            ended_ms=None,
            told=False,
        )

    def running(self) -> "TrackingRecord":
        """Of a training that goes on."""
        return self.changed(status="RUNNING", error=None, ended_ms=None, told=False)

    def ended(self, status: RunOutcome, error: str | None, ended_ms: int) -> "TrackingRecord":
        """Of a training that is over, which MLflow does not know yet."""
        return self.changed(status=status, error=error, ended_ms=ended_ms, told=False)

    def changed(self, **fields: Any) -> "TrackingRecord":
        """A copy with other values, checked."""
        return TrackingRecord.model_validate({**self.model_dump(), **fields})


class TrackingFile:
    """The record of the run that this process executes; every change is durable at once. Safe for threads."""

    def __init__(self, folder: Path, record: TrackingRecord) -> None:
        """Writes `record`. Raises UserError when the disk refuses, as every change does."""
        self._folder = folder
        self._lock = threading.Lock()
        write_record(folder, record)
        self._record = record

    @property
    def record(self) -> TrackingRecord:
        """The record as it is on disk."""
        return self._record

    def holds_step(self, step: int) -> None:
        """MLflow holds everything up to this step."""
        self._change(published=step)

    def holds_model(self, step: int) -> None:
        """MLflow holds the checkpoints up to this step as models."""
        self._change(models=step)

    def told(self) -> None:
        """MLflow shows the training's status."""
        self._change(told=True)

    def ended(self, status: RunOutcome, error: str | None) -> TrackingRecord:
        """The training is over."""
        return self._change(status=status, error=error, ended_ms=time.time_ns() // 1_000_000, told=False)

    def _change(self, **fields: Any) -> TrackingRecord:
        with self._lock:
            record = self._record.changed(**fields)
            write_record(self._folder, record)
            self._record = record
            return record


def read_record(folder: Path) -> TrackingRecord | None:
    """The record of a run's folder; None when it has none. Raises UserError when it is malformed."""
    path = folder / RECORD
    try:
        return TrackingRecord.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise UserError(f"{path}: not a record of an MLflow run: {error.errors()[0]['msg']}") from error


def write_record(folder: Path, record: TrackingRecord) -> None:
    """Write or replace the record, durably. Raises UserError."""
    durable.write_file(folder / RECORD, record.model_dump_json(indent=2).encode() + b"\n")


@contextmanager
def record_lock(folder: Path) -> Iterator[None]:
    """Waits for whoever marks the run as killed.

    Who marks it looks under this lock whether the run's own lock is free; who continues it has taken the run's own
    lock and passes through this one once. So nobody marks a run that has been continued.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        # A child that was forked meanwhile has a copy of the descriptor: closing ours would not be enough.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
