"""One training in this process, from opening its folder to its final status in MLflow, and the thread that shows it.

`open_session` yields the live parts. However the training ends, `open_session` publishes what is committed, frees the
folder's lock, and shows the outcome in MLflow.

The publisher mirrors the ledger to MLflow and to Prefect beside the training, which never waits for either. One thread
serves every destination, a piece of each in turn. A destination that is away or refuses gets its next attempt after a
pause of its own, so that the others are not held up. Meanwhile the ledger has everything.
"""

import hashlib
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

from flows.tracking.mlflow_backlog import MlflowBacklog
from flows.tracking.record import RunOutcome, TrackingFile, TrackingRecord, read_record, record_lock
from flows.tracking.store import (
    Lost,
    Outage,
    Refusal,
    is_server,
    prepare_store,
    refuse_strange_artifacts,
    resolve_tracking_uri,
    store_errors,
    store_of_folder,
)
from flows.tracking.tables import published_kinds
from flows.tracking.tracker import Tracker, ahead_of
from fp8core.config.run import RunConfig, resume_command
from fp8core.errors import UserError, first_line, without_passwords
from fp8core.kernels.compilation import KernelFolders
from fp8core.report.console import Console
from fp8core.report.summary import StepTiming
from fp8core.run.checks.settings import graph_of
from fp8core.run.context import RunContext
from fp8core.run.loop import TrainingPaused, next_step
from fp8core.run.open import open_directory, open_run, signing_key
from fp8core.run.recompute import recompute_kinds_if_damaged
from fp8core.store.ledger import START
from fp8core.store.lock import FolderIdentity, lies_at, original_of
from fp8core.store.run_directory import RunDirectory

# Pauses between attempts at a destination that is away or refuses; the last one repeats.
RETRY_SECONDS = (1.0, 2.0, 5.0, 10.0)
# Time for which a training that failed or was stopped goes on publishing.
STOPPED_PATIENCE_SECONDS = 5.0


class Destination(Protocol):
    name: str
    patience: float
    """Longest wait of a finished training, in seconds, while the service does not answer."""
    outage_note: str
    """Said on the console during an outage: what the service gets later. It follows "does not answer;"."""

    def publish(self) -> Iterator[None]:
        """Publishes what is missing, in order; yields after each piece. A repetition leaves nothing twice.

        Raises:
            Outage: a later attempt may succeed.
            Refusal: the service refuses a piece, which its operator may change.
            Abandoned: the rest is given up.
            UserError: the training must fail.
        """

    @property
    def idle_seconds(self) -> float | None:
        """Seconds after which there is something to publish, though nothing was committed; None: never."""

    def caught_up(self) -> str:
        """The content of the service by now, in words after "answers again"; may be empty."""


class Abandoned(Exception):
    """The wait for what is being published is over; the message is for the console."""


class _Line:
    def __init__(self, destination: Destination, console: Console) -> None:
        self.destination = destination
        self.over = False
        self.due = -math.inf
        """When the next attempt may begin (monotonic)."""
        self._woken = self._woken_again = self._final = False
        self._console = console
        self._work: Iterator[None] | None = None
        self._failures = 0
        self._away_since, self._lost_since = -math.inf, math.inf
        self._said = set[type[Exception]]()

    def wake(self) -> None:
        """There may be something to publish, also for an attempt that has begun and passed it by."""
        self._woken, self._woken_again = True, self._work is not None

    @property
    def ready(self) -> bool:
        return self._woken and not self.over and self.due <= time.monotonic()

    def advance(self, closed_at: float | None, patience: float | None) -> None:
        """Publish one piece.

        Args:
            closed_at: when the training ended (monotonic); None while it runs.
            patience: overrides the destination's.
        """
        if self._work is None:
            self._work, self._final = self.destination.publish(), closed_at is not None
        try:
            next(self._work)
            self._failures = 0
        except StopIteration:
            self._work, self.over = None, self._final
            self._woken, self._woken_again = self._woken_again, False
            self._say_that_it_is_back()
        except Abandoned as reason:
            self._console.note(str(reason))
            self.over = True
        except (Outage, Refusal) as error:
            self._work = None
            self._put_off(error, closed_at, self.destination.patience if patience is None else patience)

    def _put_off(self, error: Outage | Refusal, closed_at: float | None, patience: float) -> None:
        now = time.monotonic()
        if self._failures == 0:
            self._away_since = now
        if type(error) not in self._said:
            self._said.add(type(error))
            self._console.note(f"{self.destination.name} {error.shown}; {self.destination.outage_note}")
        self.due = now + RETRY_SECONDS[min(self._failures, len(RETRY_SECONDS) - 1)]
        self._failures += 1
        if closed_at is not None:
            since = max(self._away_since, closed_at)
            if isinstance(error, Lost):
                # It answers in between, and with its answers patience would begin anew.
                self._lost_since = min(self._lost_since, now)
                since = self._lost_since
            self.over = isinstance(error, Refusal) or self.due > since + patience

    def _say_that_it_is_back(self) -> None:
        if self._said:
            self._said.clear()
            self._console.note(f"{self.destination.name} answers again{self.destination.caught_up()}")


class Publisher:
    """The thread that serves the destinations of a run, from construction to `close`."""

    def __init__(self, console: Console, first: Destination) -> None:
        self._console = console
        self._lines = [_Line(first, console)]
        self._wake = threading.Event()
        self._abandoned = threading.Event()
        self._closed_at: float | None = None
        self._patience: float | None = None
        self._wake.set()  # An earlier process may have left something.
        self._life: Future[None] = ThreadPoolExecutor(1, "publisher").submit(self._follow)

    def add(self, destination: Destination) -> None:
        self._lines = [*self._lines, _Line(destination, self._console)]
        self._wake.set()

    def wake(self) -> None:
        """Something was committed. Raises UserError: the run cannot be published."""
        self._wake.set()
        if self._life.done():
            self._life.result()

    def check_patience(self) -> None:
        """Raises Abandoned. A report of thousands of steps takes longer than a stopped training may."""
        if self._abandoned.is_set():
            raise Abandoned("no report: it takes too long; `fp8-grpo report` makes it")

    def close(self) -> None:
        """Publish the rest, but wait for no destination longer than its patience. Raises as `wake`."""
        self._close(None)
        self._life.result()

    def stop(self) -> None:
        """Publish for a few seconds more; the user sees only the error that failed or stopped the training."""
        timer = threading.Timer(STOPPED_PATIENCE_SECONDS, self._abandoned.set)
        timer.start()
        try:
            self._close(0.0)
        finally:
            timer.cancel()

    def _close(self, patience: float | None) -> None:
        self._patience, self._closed_at = patience, time.monotonic()
        self._wake.set()
        try:
            self._life.exception()
        finally:
            self._abandoned.set()  # Ctrl-C ends the wait.
            self._wake.set()

    def _follow(self) -> None:
        closed_at = None
        while not self._abandoned.is_set() and not all(line.over for line in self._lines):
            if self._wake.is_set():
                self._wake.clear()
                for line in self._lines:
                    line.wake()
            if closed_at is None and (closed_at := self._closed_at) is not None:
                for line in self._lines:
                    line.due = closed_at
            ready = [line for line in self._lines if line.ready]
            for line in ready:
                line.advance(closed_at, self._patience)
            if not ready and not self._wake.wait(self._pause()):
                self._wake.set()  # A pause is over, or something is due without a commit.

    def _pause(self) -> float | None:
        """Seconds until a destination has work, unless something is committed before; None: until then."""
        now = time.monotonic()
        away = [line.due - now for line in self._lines if not line.over and line.due > now]
        idle = [seconds for line in self._lines if (seconds := line.destination.idle_seconds) is not None]
        return max(0.0, min([*away, *idle])) if away or idle else None


@contextmanager
def publishing(console: Console, first: Destination) -> Iterator[Publisher]:
    """A publisher while the block lasts; what is committed in it is published when it ends, unless a service is away.

    Raises UserError: the run cannot be published.
    """
    publisher = Publisher(console, first)
    try:
        yield publisher
    except BaseException:
        publisher.stop()
        raise
    publisher.close()


@dataclass
class Session:
    run: RunContext
    tracker: Tracker
    mlflow: MlflowBacklog
    publisher: Publisher
    timings: list[StepTiming] = field(default_factory=list)


def follow_ledger(session: Session) -> None:
    run = session.run
    for index in range(max(START, session.mlflow.published + 1), next_step(run)):
        recompute_kinds_if_damaged(run, index, published_kinds(run, index))
    session.mlflow.follow_ledger()
    session.publisher.wake()


@contextmanager
def open_session(
    config: RunConfig, name: str, console: Console, *, new_code: bool = False, kernels: KernelFolders | None = None
) -> Iterator[Session]:
    """Open a new or an existing run (arguments and errors: `run.open.open_directory` and `run.open.open_run`).

    A new run needs its tracking store from the start; one that MLflow has goes on without, and publishes later.
    MLflow shows a run that was opened and failed as FAILED, one that was stopped or paused as KILLED.
    """
    graph, key = graph_of(config), signing_key(config, name)
    with open_directory(config, name, new_code=new_code) as directory:
        tracker, file, news = _open_tracker(directory, config, name)
        console.header(name, {"folder": str(directory.path), "MLflow": tracker.uri})
        for line in news:
            console.note(line)
        try:
            with open_run(config, graph, directory, console, key, kernels) as run:
                mlflow = MlflowBacklog(run, tracker, file)
                with publishing(console, mlflow) as publisher:
                    try:
                        yield Session(run, tracker, mlflow, publisher)
                    except Exception as error:  # Others stop a training that is continued later; its user waits.
                        mlflow.add_report(publisher.check_patience, without_passwords(first_line(error)))
                        raise
        except BaseException as error:
            # Others: Ctrl-C, SIGTERM, a cancelled flow run.
            failed = isinstance(error, Exception) and not isinstance(error, TrainingPaused)
            with suppress(UserError):  # A full disk, say; `error` was first.
                _conclude(tracker, file, "FAILED" if failed else "KILLED", str(error) if failed else None)
            raise
        problem = _conclude(tracker, file, "FINISHED", None)
        if missing := _missing(directory, file):
            cure = f"{_restoration(tracker)}{resume_command(config, name)}"
            console.note(f"MLflow {problem or 'lacks them'}, {missing} will follow: {cure}")


def _open_tracker(directory: RunDirectory, config: RunConfig, name: str) -> tuple[Tracker, TrackingFile, list[str]]:
    """The MLflow run that this folder names, else the one that has its tag, else a new one; and notes for the console.

    Where no store is configured, the one that the folder names is used, if it may be (`store_of_folder`). A folder that
    is a copy gets an MLflow run of its own, linked to the first. So does one whose MLflow run went on elsewhere (a
    backup that was put back). Where the store lost the MLflow run, a new one gets everything.
    """
    with record_lock(directory.path):
        known = read_record(directory.path)
    described = directory.description()
    assert described is not None, "an open folder has its run.json"
    place, news = FolderIdentity.of(directory.path), list[str]()
    training = known.training if known is not None and known.training else described.id
    if config.tracking.uri is not None:
        uri = resolve_tracking_uri(config.tracking.uri, config.runs)
    elif known is not None:
        uri = store_of_folder(known.uri, directory.path, known.lay_at)
    else:
        uri = store_of_folder(described.tracking_uri, directory.path, None)

    def opened(training: str, copied_from: str | None = None) -> tuple[Tracker, TrackingRecord]:
        tracker = Tracker.open(uri, config.tracking.experiment, name, config.runs, training, copied_from)
        return tracker, TrackingRecord.begun(uri, tracker.experiment_id, tracker.run_id, training)

    def of_its_own(first: str, reason: str) -> tuple[Tracker, TrackingRecord]:
        # Of the same copy always the same, so that a killed process leaves no second one.
        marks = f"{first} {place.folder} {place.ledger} {place.host}"
        tracker, record = opened(hashlib.sha256(marks.encode()).hexdigest()[:32], first)
        news.append(f"{reason}: it gets an MLflow run of its own, {tracker.run_id} (copied_from {first})")
        return tracker, record

    original = original_of(known.place, directory.path) if known is not None and known.place is not None else None
    if known is not None and original is not None:
        tracker, record = of_its_own(known.run_id, f"this folder is a copy of {original}")
    elif known is not None and known.uri == without_passwords(uri):
        tracker, record = Tracker(uri, known.experiment_id, known.run_id), known.running()
    else:
        tracker, record = opened(training)
        if known is not None and is_server(uri):
            news.append(f"MLflow was at {known.uri}: now it is run {tracker.run_id} of {without_passwords(uri)}")
    with suppress(Outage), store_errors(uri):  # During an outage the publisher does this when it is over.
        # MLflow would make the tables of a lost store itself, and a kill would leave half of them.
        prepare_store(uri, config.runs)
        if not tracker.exists():
            lost, (tracker, record) = tracker.run_id, opened(training)
            news.append(f"MLflow has lost run {lost}: run {tracker.run_id} gets everything from step {START} on")
        while (reason := _of_another(directory, tracker, known)) is not None:
            tracker, record = of_its_own(tracker.run_id, reason)
        refuse_strange_artifacts(uri, tracker.client.get_run(tracker.run_id), config.tracking.uri)
        tracker.resume()
        record = record.changed(told=True)
    return tracker, TrackingFile(directory.path, record.changed(place=place)), news


def _of_another(directory: RunDirectory, tracker: Tracker, known: TrackingRecord | None) -> str | None:
    """Reason why an MLflow run is not this folder's, or None. Raises UserError: the folder's chain differs."""
    held = tracker.held()
    unmarked = known is None or known.place is None
    if unmarked and held.folder is not None and lies_at(held.folder, directory.path):
        return f"this folder is a copy of {held.folder}"
    return ahead_of(directory, tracker, held.head)


def _conclude(tracker: Tracker, file: TrackingFile, status: RunOutcome, error: str | None) -> str | None:
    """Record the end of the training, and show it in MLflow, or else when the run is opened again.

    Returns the reason why MLflow does not show it, in words, or None.
    """
    record = file.ended(status, error)
    assert record.ended_ms is not None, "it has ended"
    try:
        with store_errors(tracker.uri):
            tracker.finish(status, error, record.ended_ms)
        file.told()
    except (Outage, Refusal) as problem:
        return problem.shown
    return None


def _restoration(tracker: Tracker) -> str:
    deleted = None
    with suppress(Outage, Refusal), store_errors(tracker.uri):
        deleted = tracker.deleted()
    return "" if deleted is None else f"restore {deleted}, then "


def _missing(directory: RunDirectory, file: TrackingFile) -> str | None:
    last, published = directory.ledger.last_step(), file.record.published
    if last is not None and published < last:
        return f"steps {published + 1} to {last}" if published + 1 < last else f"step {last}"
    return None if file.record.told else "how the run ended"
