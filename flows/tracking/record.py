"""This machine's record of a training's MLflow run (tracking.json), and the mark of a training that was killed.

Neither MLflow nor torch is imported at the top: the record replaces requests and answers in microseconds, also during
an outage. SIGKILL leaves a training no moment to show its end in MLflow: another process does it. That is the next
training beside it (`mark_killed_siblings`), or the guardian, a small process that begins with the training:

    python -m flows.tracking.record FOLDER
"""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from flows.environment import bound_mlflow_requests, naming_store
from fp8core import durable
from fp8core.errors import StoredFileError, UserError, without_passwords
from fp8core.processes.end_with_parent import TiedProcess, running
from fp8core.store.layout import LEDGER, LOCK
from fp8core.store.lock import FolderIdentity, is_held, original_of

RunOutcome = Literal["FINISHED", "FAILED", "KILLED"]
RECORD = "tracking.json"
_WAIT = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if not os.read(0, 1):
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
_GOODBYE = b"\n"
_PATIENCE_SECONDS = 120
_ATTEMPTS = 10


class TrackingRecord(BaseModel):
    """The content of tracking.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    uri: str = Field(description="Tracking store or server, without its password (`store.store_of_folder`).")
    experiment_id: str
    run_id: str
    published: int = Field(ge=-1, description="The last step that MLflow holds; -1: none.")
    models: int = Field(ge=-1, description="The last step whose checkpoint MLflow holds as a model; -1: none.")
    status: Literal["RUNNING"] | RunOutcome = Field(description="Of the training; RUNNING after a kill, too.")
    error: str | None = Field(description="Why it failed.")
    ended_ms: int | None = Field(description="Unix milliseconds; null while it runs.")
    told: bool = Field(description="Whether MLflow shows the status.")
    place: FolderIdentity | None = Field(
        None, description="Where the folder lay when a process opened it last; null when an older version did."
    )
    training: str | None = Field(
        None, description="The tag that MLflow finds the run by; null: the `id` in run.json, as of all but copies."
    )

    @field_validator("uri", "error")
    @classmethod
    def _without_passwords(cls, text: str | None) -> str | None:
        return None if text is None else without_passwords(text)

    @property
    def lay_at(self) -> str | None:
        return None if self.place is None else self.place.path

    @classmethod
    def begun(cls, uri: str, experiment_id: str, run_id: str, training: str | None = None) -> "TrackingRecord":
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
            training=training,
        )

    def running(self) -> "TrackingRecord":
        return self.changed(status="RUNNING", error=None, ended_ms=None, told=False)

    def ended(self, status: RunOutcome, error: str | None, ended_ms: int) -> "TrackingRecord":
        """Of a training that is over, which MLflow does not show yet."""
        return self.changed(status=status, error=error, ended_ms=ended_ms, told=False)

    def changed(self, **fields: Any) -> "TrackingRecord":
        return TrackingRecord.model_validate({**self.model_dump(), **fields})


class TrackingFile:
    """The record of the run that this process executes; every change is durable at once. Thread-safe."""

    def __init__(self, folder: Path, record: TrackingRecord) -> None:
        """Writes `record`. Raises UserError when the disk refuses, as every change does."""
        self._folder = folder
        self._lock = threading.Lock()
        write_record(folder, record)
        self._record = record

    @property
    def record(self) -> TrackingRecord:
        return self._record

    def holds_step(self, step: int) -> None:
        self._change(published=step)

    def holds_model(self, step: int) -> None:
        self._change(models=step)

    def told(self) -> None:
        self._change(told=True)

    def ended(self, status: RunOutcome, error: str | None) -> TrackingRecord:
        return self._change(status=status, error=error, ended_ms=time.time_ns() // 1_000_000, told=False)

    def _change(self, **fields: Any) -> TrackingRecord:
        with self._lock:
            record = self._record.changed(**fields)
            write_record(self._folder, record)
            self._record = record
            return record


def read_record(folder: Path) -> TrackingRecord | None:
    """The record of a run's folder; None when it has none. Raises StoredFileError when it is malformed."""
    path = folder / RECORD
    try:
        return TrackingRecord.model_validate_json(durable.read_stored(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoredFileError(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise StoredFileError(f"{path}: not a record of an MLflow run: {error.errors()[0]['msg']}") from error


def write_record(folder: Path, record: TrackingRecord) -> None:
    """Write or replace the record, durably. Raises UserError."""
    durable.write_file(folder / RECORD, record.model_dump_json(indent=2).encode() + b"\n")


@contextmanager
def record_lock(folder: Path) -> Iterator[None]:
    """Waits for a process that marks the run as killed.

    A process that marks it checks under this lock that the run's own lock is free. A process that continues it has
    taken the run's own lock and passes through this one once. So a run that has been continued is never marked.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        # A child that was forked meanwhile has a copy of the descriptor: closing ours would not be enough.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def mark_killed(folder: Path, store: str | None = None) -> bool:
    """Set the MLflow run of a dead training to KILLED; returns True if MLflow was updated.

    Nothing happens when the training lives, ended by itself and reported it, never had an MLflow run or is a copy that
    no process continued. Nothing happens either when MLflow does not answer or has no such run. A training that ended
    by itself during an outage gets the status it ended with. Without `store` it is the one that the environment names,
    or one beside the folder. Raises UserError: tracking.json is malformed or cannot be written, or names another store
    (`store.store_of_folder`).
    """
    if not needs_marking(folder):
        return False
    # MLflow takes a second to import.
    from flows.tracking.store import STORE_ERRORS

    try:
        return tell(folder, store)
    except STORE_ERRORS:
        return False


def mark_killed_siblings(folder: Path, uri: str) -> None:
    """`mark_killed` for the runs beside a run's folder whose MLflow store is the same."""
    for path in sorted(folder.parent.glob(f"*/{RECORD}")):
        # Errors in another run's file do not concern this one.
        with suppress(UserError):
            record = read_record(path.parent)
            if record is not None and record.uri == without_passwords(uri) and path.parent != folder:
                mark_killed(path.parent, uri)


def needs_marking(folder: Path) -> bool:
    """True if a training is dead and MLflow may not show it; reads the disk only."""
    record = read_record(folder)
    return record is not None and not is_settled(record) and not is_held(folder / LOCK)


def tell(folder: Path, store: str | None = None) -> bool:
    """`mark_killed` of a folder that needs it, with MLflow's errors for the caller."""
    from flows.tracking.store import client_of_existing_store, store_of_folder

    with record_lock(folder):
        record = read_record(folder)
        if record is None or is_settled(record) or is_held(folder / LOCK):
            return False
        if record.place is not None and original_of(record.place, folder) is not None:
            return False  # The MLflow run is that of the folder that this one was copied from.
        client = client_of_existing_store(store_of_folder(record.uri, folder, record.lay_at, store))
        outcome = _outcome(record, folder)
        shown = client.get_run(record.run_id).info.status
        if shown == "RUNNING":
            client.set_terminated(record.run_id, outcome.status, outcome.ended_ms)
            shown = outcome.status
        write_record(folder, outcome.changed(status=shown, told=True))
        return True


def is_settled(record: TrackingRecord) -> bool:
    return record.status != "RUNNING" and record.told


def _outcome(record: TrackingRecord, folder: Path) -> TrackingRecord:
    """The end of the training; it was alive when it last wrote to its ledger."""
    if record.status != "RUNNING":
        return record
    return record.ended("KILLED", None, (folder / LEDGER).stat().st_mtime_ns // 1_000_000)


class Guardian:
    """Watches the training of a run's folder while the block lasts, and marks it when it could not do so itself.

    It waits, in a bare interpreter without any of our packages, until the training is gone. One that ended by itself
    has sent an exit message before; else this module runs next in that process, on the folder of the run.
    """

    def __init__(self, folder: Path, store: str | None = None) -> None:
        """`store` is the tracking store of the user's configuration; None: that of the environment."""
        self._job = running("flows.tracking.record", str(folder.absolute()))
        self._environment = None if store is None else naming_store(store)

    def __enter__(self) -> Self:
        arguments = ["-I", "-S", "-c", _WAIT, *self._job]
        self._process = TiedProcess(arguments, subprocess.DEVNULL, environment=self._environment)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.end(_GOODBYE)


if __name__ == "__main__":
    signal.alarm(_PATIENCE_SECONDS)  # A tracking server may never answer.
    bound_mlflow_requests()
    folder = Path(sys.argv[1])
    for _ in range(_ATTEMPTS):
        # The pipe of a dying process may close before its lock and its database do.
        if mark_killed(folder) or (record := read_record(folder)) is None or is_settled(record):
            break
        time.sleep(1)
