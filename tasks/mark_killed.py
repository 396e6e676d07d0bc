"""Show in MLflow that a training was killed: SIGKILL leaves its process no moment to say so itself.

Cheap for a process that only waits: torch is never imported, MLflow only when there is something to say.
"""

from contextlib import suppress
from pathlib import Path

from fp8core.errors import UserError
from fp8core.store.lock import is_held
from tasks.tracking_record import RECORD, TrackingRecord, read_record, record_lock, write_record

_LOCK = "lock"
_LEDGER = "ledger.jsonl"


def mark_killed(folder: Path) -> bool:
    """Set the MLflow run of a dead training to KILLED; returns whether MLflow was told.

    Nothing happens when the training lives, ended by itself and said so, or never had an MLflow run, and when MLflow
    does not answer or has no such run. A training that ended by itself during an outage gets the status it ended with.

    Args:
        folder: the run's folder.

    Raises:
        UserError: tracking.json is malformed or cannot be written.
    """
    if not needs_marking(folder):
        return False
    # MLflow takes a second to import.
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        return tell(folder)
    except (MlflowException, SQLAlchemyError, OSError):
        return False


def mark_killed_siblings(folder: Path, uri: str) -> None:
    """`mark_killed` for the runs beside a run's folder whose MLflow store is the same."""
    for path in sorted(folder.parent.glob(f"*/{RECORD}")):
        # What is wrong with another run's file is no concern of this one.
        with suppress(UserError):
            record = read_record(path.parent)
            if record is not None and record.uri == uri and path.parent != folder:
                mark_killed(path.parent)


def needs_marking(folder: Path) -> bool:
    """Whether a training is dead and MLflow may not know; asks the disk only."""
    record = read_record(folder)
    return record is not None and not _settled(record) and not is_held(folder / _LOCK)


def tell(folder: Path) -> bool:
    """`mark_killed` of a folder that needs it, with MLflow's errors for the caller."""
    from tasks.tracking_store import client_of_existing_store

    with record_lock(folder):
        record = read_record(folder)
        if record is None or _settled(record) or is_held(folder / _LOCK):
            return False
        client = client_of_existing_store(record.uri)
        outcome = _outcome(record, folder)
        shown = client.get_run(record.run_id).info.status
        if shown == "RUNNING":
            client.set_terminated(record.run_id, outcome.status, outcome.ended_ms)
            shown = outcome.status
        write_record(folder, outcome.changed(status=shown, told=True))
        return True


def _settled(record: TrackingRecord) -> bool:
    return record.status != "RUNNING" and record.told


def _outcome(record: TrackingRecord, folder: Path) -> TrackingRecord:
    """How the training ended; it was alive when it last wrote to its ledger."""
    if record.status != "RUNNING":
        return record
    return record.ended("KILLED", None, (folder / _LEDGER).stat().st_mtime_ns // 1_000_000)
