"""One training in this process, from opening its folder to its final status in MLflow."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from flows.tracking.backlog import Backlog
from flows.tracking.mlflow_tracker import MlflowTracker
from flows.tracking.publisher import Publisher
from flows.tracking.record import TrackingRecord, change_record, read_record, write_record
from flows.tracking.store import resolve_tracking_uri, store_of_folder
from flows.tracking.tracker import Outage, RunOutcome, Tracker
from fp8core.config.run import RunConfig, resume_command
from fp8core.errors import UserError, first_line, without_passwords
from fp8core.report.console import Console
from fp8core.run.context import RunContext
from fp8core.run.loop import TrainingPaused
from fp8core.run.open import open_directory, open_run
from fp8core.run.refusals import graph_of
from fp8core.store.run_directory import RunDirectory


@dataclass
class Session:
    run: RunContext
    tracker: MlflowTracker
    mlflow: Backlog
    publisher: Publisher
    overheads: list[float] = field(default_factory=list)
    """Milliseconds outside of tasks, of each step of this process."""


@contextmanager
def open_session(config: RunConfig, name: str, console: Console, *, new_code: bool = False) -> Iterator[Session]:
    """Open a new or an existing run (arguments and errors: `run.open.open_directory` and `run.open.open_run`).

    A new run needs its tracking store from the start; one that MLflow has goes on without, and publishes later.
    """
    graph = graph_of(config)
    with open_directory(config, name, new_code=new_code) as directory:
        tracker = _open_tracker(directory, config, name)
        console.header(name, {"folder": str(directory.path), "MLflow": without_passwords(tracker.uri)})
        try:
            with (
                open_run(config, graph, directory, console) as run,
                _published(run, tracker) as session,
            ):
                yield session
        except BaseException as error:
            # Others: Ctrl-C, SIGTERM, a cancelled flow run.
            failed = isinstance(error, Exception) and not isinstance(error, TrainingPaused)
            with suppress(UserError):  # A full disk, say; `error` was first.
                _conclude(directory.path, tracker, "FAILED" if failed else "KILLED", str(error) if failed else None)
            raise
        problem = _conclude(directory.path, tracker, "FINISHED", None)
        if missing := _missing(directory):
            console.note(f"{problem or 'MLflow lacks them'}; {missing} will follow: {resume_command(config, name)}")


@contextmanager
def _published(run: RunContext, tracker: MlflowTracker) -> Iterator[Session]:
    mlflow = Backlog(run, tracker)
    session = Session(run, tracker, mlflow, Publisher(mlflow, run.console))
    try:
        yield session
    except BaseException as error:
        if isinstance(error, Exception):  # Others stop a training that is continued later; its user waits.
            mlflow.add_report(without_passwords(first_line(error)))
        session.publisher.stop()
        raise
    session.publisher.close()


def _open_tracker(directory: RunDirectory, config: RunConfig, name: str) -> MlflowTracker:
    """The MLflow run that this folder names, else a new one, in the configured store, else the folder's own."""
    folder, described, known = directory.path.absolute(), directory.description(), read_record(directory.path)
    assert described is not None, "an open folder has its run.json"
    if config.tracking.uri is not None:
        uri = resolve_tracking_uri(config.tracking.uri, config.runs)
    else:
        uri = store_of_folder(described.tracking_uri if known is None else known.uri, folder)
    shown, known_run = without_passwords(uri), None if known is None else known.run_id
    try:
        tracker = MlflowTracker.open(config, uri, name, described.id, folder, known_run)
    except Outage as error:
        if known is None or known.uri != shown:
            raise UserError(str(error)) from error
        # The publisher goes on when it is over.
        tracker = MlflowTracker(uri, known.experiment_id, known.run_id, config.tracking.system_metrics)
    if known is None or tracker.run_id != known.run_id:
        known = TrackingRecord(uri=uri, experiment_id=tracker.experiment_id, run_id=tracker.run_id)
    write_record(folder, known.changed(uri=uri, status="RUNNING", error=None, ended_ms=None, told=False))
    return tracker


def _conclude(folder: Path, tracker: Tracker, status: RunOutcome, error: str | None) -> str | None:
    """Record the end of the training, and show it in MLflow; returns the reason why MLflow does not show it."""
    ended_ms = time.time_ns() // 1_000_000
    change_record(folder, status=status, error=error, ended_ms=ended_ms, told=False)
    try:
        tracker.end(status, error, ended_ms)
    except Outage as problem:
        return str(problem)
    change_record(folder, told=True)
    return None


def _missing(directory: RunDirectory) -> str | None:
    last, record = directory.ledger.last_step(), change_record(directory.path)
    published = record.published
    if last is not None and published < last:
        return f"steps {published + 1} to {last}" if published + 1 < last else f"step {last}"
    return None if record.told else "how the run ended"
