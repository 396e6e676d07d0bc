"""One training in this process, from opening its folder to its final status in MLflow."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from flows.tracking.backlog import Backlog
from flows.tracking.mlflow_tracker import MlflowTracker
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

# Pause between attempts.
RETRY_SECONDS = 2.0
# Longest wait of a finished training for a service that does not answer, and of one that failed or was stopped.
OUTAGE_PATIENCE_SECONDS, STOPPED_PATIENCE_SECONDS = 60.0, 5.0


class Publisher:
    """A thread that mirrors a run's ledger to MLflow until `close` or `stop`; the training never waits for it."""

    def __init__(self, backlog: Backlog, console: Console) -> None:
        self._backlog, self._console = backlog, console
        self._news, self._closed = threading.Event(), threading.Event()
        self._deadline = float("inf")
        """Time (monotonic) of the last attempt after the training ended."""
        self._stopped = False
        self._news.set()  # An earlier process may have left something.
        self._life: Future[None] = ThreadPoolExecutor(1, "publisher").submit(self._follow)

    def wake(self) -> None:
        """Something was committed. Raises UserError: the run cannot be published."""
        self._news.set()
        if self._life.done():
            self._life.result()

    def close(self) -> None:
        """Publish the rest, but wait for the service no longer than its patience. Raises as `wake`."""
        self._end(OUTAGE_PATIENCE_SECONDS)
        self._life.result()

    def stop(self) -> None:
        """Publish for a few seconds more; the user sees only the error that failed or stopped the training."""
        self._stopped = True
        self._end(STOPPED_PATIENCE_SECONDS)

    def _end(self, patience: float) -> None:
        self._deadline = time.monotonic() + patience
        self._closed.set()
        self._news.set()
        try:
            self._life.exception()
        except BaseException:  # Ctrl-C ends the wait.
            self._stopped, self._deadline = True, 0.0
            raise

    def _follow(self) -> None:
        away = False
        while True:
            self._news.wait()
            self._news.clear()
            last = self._closed.is_set()
            try:
                for _ in self._backlog.publish():
                    if self._stopped and time.monotonic() > self._deadline:
                        return
            except Outage as error:
                if not away:
                    away = True
                    self._console.note(f"MLflow does not answer ({error}); metrics stay in the ledger and follow")
                if last and (self._stopped or time.monotonic() + RETRY_SECONDS > self._deadline):
                    return
                # A training that ends is heard of during the pause.
                (time.sleep if last else self._closed.wait)(RETRY_SECONDS)
                self._news.set()
                continue
            if away:
                away = False
                self._console.note(f"MLflow answers again; it has every step up to {self._backlog.published}")
            if last:
                return


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
        console.section(
            f"fp8-grpo run {name}", [], {"folder": str(directory.path), "MLflow": without_passwords(tracker.uri)}
        )
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
