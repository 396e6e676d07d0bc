"""Write a training to MLflow beside the training, which never waits for it.

A thread follows the ledger: it publishes everything that is committed and not published yet, in order, and then moves
the cursor in tracking.json. Requests to an MLflow that does not answer are repeated until it does; meanwhile the ledger
has everything. A permanent refusal by MLflow fails the training at its next commit.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from itertools import takewhile

from mlflow.entities import Metric
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.utils.validation import MAX_METRICS_PER_BATCH

from flows.tracking.anchor import refuse_other_chain
from flows.tracking.publish import (
    publish_bound,
    publish_checkpoint,
    publish_description,
    publish_exactness,
    publish_report,
    publish_result,
    publish_step,
)
from flows.tracking.record import TrackingFile, mark_killed_siblings
from flows.tracking.store import Outage, store_errors
from flows.tracking.tracker import Tracker
from fp8core.run.context import RunContext
from fp8core.store.ledger import BoundEntry

# Pauses between attempts during an outage; the last one repeats.
RETRY_SECONDS = (1.0, 2.0, 5.0, 10.0)
# Longest wait of a finished training for an MLflow that does not answer.
OUTAGE_PATIENCE_SECONDS = 60.0
# Time for which a training that failed or was stopped goes on publishing.
STOPPED_PATIENCE_SECONDS = 5.0


class Abandoned(Exception):
    """The wait for what is being published is over."""


class Backlog:
    """A run's data to publish: ledger entries beyond the cursor, and pieces that are published once."""

    def __init__(self, run: RunContext, tracker: Tracker, file: TrackingFile) -> None:
        self._run = run
        self._tracker = tracker
        self._file = file
        self._load = system_load(run, tracker)
        self._sound = False
        self._bound: BoundEntry | None = None
        self._last: deque[Callable[[], None]] = deque()
        self._once: deque[Callable[[], None]] = deque(
            [
                lambda: publish_description(run, tracker),
                lambda: mark_killed_siblings(run.directory.path, tracker.uri),
            ]
        )

    @property
    def published(self) -> int:
        """The last step that MLflow holds; -1: none."""
        return self._file.record.published

    def follow_ledger(self) -> None:
        """The files of committed steps can be read from now on."""
        self._once.append(lambda: publish_exactness(self._run, self._tracker))
        self._sound = True

    def add_report(self, on_step: Callable[[], None]) -> None:
        """The training failed or was paused: its report follows what is committed (`on_step`: `publish_report`)."""
        self._last.append(lambda: publish_report(self._run, self._tracker, on_step))

    def add_result(self) -> None:
        """Picture, summary and report are in the run's folder."""
        self._once.append(lambda: publish_result(self._run, self._tracker))

    def publish(self) -> Iterator[None]:
        """Publishes what is missing, in order; yields after each piece. Raises MLflow's errors, and UserError."""
        if not self._file.record.told:
            refuse_other_chain(self._run.directory, self._tracker)
            self._tracker.resume()
            self._file.told()
            yield
        yield from _work_through(self._once)
        if self._sound:
            yield from self._publish_committed()
        yield from _work_through(self._last)
        if self._load is not None:
            self._load.publish(self._tracker)

    def _publish_committed(self) -> Iterator[None]:
        ledger = self._run.directory.ledger
        while ledger.step(step := self.published + 1) is not None:
            publish_step(self._run, self._tracker, step)
            self._file.holds_step(step)
            yield
        crossed = ledger.last_bound()
        if crossed is not None and crossed != self._bound:
            publish_bound(self._tracker, crossed)
            self._bound = crossed
            yield
        held = self._file.record.models
        for entry in reversed(list(takewhile(lambda entry: entry.step > held, ledger.newest_checkpoints()))):
            publish_checkpoint(self._run, self._tracker, entry)
            self._file.holds_model(entry.step)
            yield

    @property
    def idle_seconds(self) -> float | None:
        """Seconds without work, unless something is committed."""
        return None if self._load is None else self._load.interval

    def sample(self) -> None:
        """Sample the machine's load when that is due."""
        if self._load is not None:
            self._load.sample()


def _work_through(pieces: deque[Callable[[], None]]) -> Iterator[None]:
    """Publishes the pieces that are published once; one that fails stays in the queue."""
    while pieces:
        pieces[0]()
        pieces.popleft()
        yield


class Publisher:
    """The thread that works off a run's backlog, from construction to `close`."""

    def __init__(self, run: RunContext, tracker: Tracker, file: TrackingFile) -> None:
        self._console = run.console
        self._uri = tracker.uri
        self._backlog = Backlog(run, tracker, file)
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._abandoned = threading.Event()
        self._patience = 0.0
        self._closed_at = math.inf
        self._away_since = -math.inf
        self._failures = 0
        self._said_so = False
        self._wake.set()  # An earlier process may have left something.
        self._life: Future[None] = ThreadPoolExecutor(1, "publisher").submit(self._follow)

    def wake(self) -> None:
        """Something was committed. Raises UserError: MLflow refused something published before."""
        self._wake.set()
        if self._life.done():
            self._life.result()

    def follow_ledger(self) -> None:
        """A restored run has repaired what it will publish: steps follow from now on. Raises as `wake`."""
        self._backlog.follow_ledger()
        self.wake()

    @property
    def published(self) -> int:
        """The last step that MLflow holds; -1: none."""
        return self._backlog.published

    def add_result(self) -> None:
        """The training is done: picture, summary and report are in the folder. Raises as `wake`."""
        self._backlog.add_result()
        self.wake()

    def add_report(self) -> None:
        """The training failed or was paused: MLflow gets a report of what is committed, when it has all the rest."""
        self._backlog.add_report(self._check_patience)

    def close(self) -> None:
        """Publish the rest, but wait no longer than OUTAGE_PATIENCE_SECONDS for an MLflow that does not answer.

        Raises:
            UserError: MLflow refuses something for good.
        """
        self._close(OUTAGE_PATIENCE_SECONDS)
        self._life.result()

    def stop(self) -> None:
        """Publish for a few seconds more; the user sees only the error that failed or stopped the training."""
        timer = threading.Timer(STOPPED_PATIENCE_SECONDS, self._abandoned.set)
        timer.start()
        try:
            self._close(0.0)
        finally:
            timer.cancel()

    def _close(self, patience: float) -> None:
        self._patience, self._closed_at = patience, time.monotonic()
        self._closing.set()
        self._wake.set()
        try:
            self._life.exception()
        finally:
            self._abandoned.set()  # Ctrl-C ends the wait.

    def _follow(self) -> None:
        while not self._abandoned.is_set():
            self._wake.wait(self._backlog.idle_seconds)
            self._wake.clear()
            last_round = self._closing.is_set()
            try:
                with store_errors(self._uri):
                    self._work_off()
            except Abandoned:
                self._console.note("no report: it takes too long; `fp8-grpo report` makes it")
                return
            except Outage:
                if not self._wait_out():
                    return
                self._wake.set()
            else:
                self._say_that_it_is_back()
                if last_round:
                    return

    def _work_off(self) -> None:
        self._backlog.sample()
        for _ in self._backlog.publish():
            self._backlog.sample()
            self._failures = 0
            if self._abandoned.is_set():
                return

    def _check_patience(self) -> None:
        """Raises Abandoned. A report of thousands of steps takes longer than a stopped training may."""
        if self._abandoned.is_set():
            raise Abandoned

    def _wait_out(self) -> bool:
        """Pause before the next attempt; False when there shall be none."""
        now = time.monotonic()
        if self._failures == 0:
            self._away_since = now
        if not self._said_so:
            self._said_so = True
            self._console.note("MLflow does not answer; metrics stay in the ledger and follow")
        pause = RETRY_SECONDS[min(self._failures, len(RETRY_SECONDS) - 1)]
        self._failures += 1
        if not self._closing.is_set():
            self._closing.wait(pause)
            return True
        left = max(self._away_since, self._closed_at) + self._patience - now
        return left > 0 and not self._abandoned.wait(min(pause, left))

    def _say_that_it_is_back(self) -> None:
        if self._said_so:
            self._said_so = False
            self._console.note(f"MLflow answers again; it has every step up to {self._backlog.published}")


@contextmanager
def publishing(run: RunContext, tracker: Tracker, file: TrackingFile) -> Iterator[Publisher]:
    """A publisher while the block lasts; what is committed in it is published when it ends, unless MLflow is away.

    Raises:
        UserError: MLflow refuses something for good.
    """
    publisher = Publisher(run, tracker, file)
    try:
        yield publisher
    except BaseException as error:
        if isinstance(error, Exception):  # Others stop a training that is continued later, while its user waits.
            publisher.add_report()
        publisher.stop()
        raise
    publisher.close()


# A day's worth at MLflow's interval of ten seconds; then the oldest go.
_WAITING_SAMPLES = 8640


def system_load(run: RunContext, tracker: Tracker) -> "SystemLoad | None":
    """The samples of this process; None where the configuration turns them off."""
    if not run.config.tracking.system_metrics:
        return None
    description = run.directory.description()
    assert description is not None, "an open run has its run.json"
    return SystemLoad(tracker, description.created)


class SystemLoad:
    """Samples of one process. Their step is the training's age in seconds, which no two processes share."""

    def __init__(self, tracker: Tracker, created: str) -> None:
        """`created` is the ISO time in run.json."""
        self._monitor = SystemMetricsMonitor(tracker.run_id, tracking_uri=tracker.uri)
        self._created = datetime.fromisoformat(created).timestamp()
        self._waiting: deque[list[Metric]] = deque(maxlen=_WAITING_SAMPLES)
        self._collect()  # The first sample of a CPU's load is void: the load is measured since the sample before.
        self._due = time.monotonic() + self.interval

    @property
    def interval(self) -> float:
        """Seconds between samples: MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL, else MLflow's default; one at least."""
        return max(1.0, self._monitor.sampling_interval)

    def sample(self) -> None:
        """Take a sample when one is due."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + self.interval
        values, now = self._collect(), time.time()
        rows = [
            Metric(f"system/{key}", value, int(1000 * now), int(now - self._created)) for key, value in values.items()
        ]
        self._waiting.append(rows)

    def publish(self, tracker: Tracker) -> None:
        """Send what waits, as many samples a request as MLflow takes; sent samples are dropped after the answer."""
        while self._waiting:
            count = max(1, MAX_METRICS_PER_BATCH // max(1, len(self._waiting[0])))
            batch = [self._waiting[i] for i in range(min(count, len(self._waiting)))]
            tracker.log_metrics([row for rows in batch for row in rows])
            for _ in batch:
                self._waiting.popleft()

    def _collect(self) -> dict[str, float]:
        self._monitor.collect_metrics()
        values: dict[str, float] = self._monitor.aggregate_metrics()
        for part in self._monitor.monitors:
            part.clear_metrics()
        return values
