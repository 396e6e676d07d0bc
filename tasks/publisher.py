"""Write a training to MLflow beside the training, which never waits for it.

A thread follows the ledger: whatever is committed and not published yet it publishes, in order, and then moves the
cursor in tracking.json. An MLflow that does not answer is asked again until it does; meanwhile the ledger has
everything. What MLflow refuses for good fails the training at its next commit.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import takewhile

from fp8core.store.ledger import BoundEntry
from fp8core.workers.live import LiveRun
from tasks.logged_models import publish_checkpoint
from tasks.mark_killed import mark_killed_siblings
from tasks.outage import Outage, store_errors
from tasks.publish import (
    publish_bound,
    publish_description,
    publish_exactness,
    publish_report,
    publish_result,
    publish_step,
)
from tasks.system_load import system_load
from tasks.tracking import Tracker
from tasks.tracking_record import TrackingFile

# Pauses between attempts during an outage; the last one repeats.
RETRY_SECONDS = (1.0, 2.0, 5.0, 10.0)
# How long a finished training waits for an MLflow that does not answer.
OUTAGE_PATIENCE_SECONDS = 60.0
# How long a training that failed or was stopped goes on publishing.
STOPPED_PATIENCE_SECONDS = 5.0


class Abandoned(Exception):
    """Nobody waits any longer for what is being published."""


class Backlog:
    """What is to be published of a run: what its ledger holds beyond the cursor, and what is published once."""

    def __init__(self, run: LiveRun, tracker: Tracker, file: TrackingFile) -> None:
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
        """How long nothing is to be done, unless something is committed."""
        return None if self._load is None else self._load.interval

    def sample(self) -> None:
        """Look at the machine's load when that is due."""
        if self._load is not None:
            self._load.sample()


def _work_through(pieces: deque[Callable[[], None]]) -> Iterator[None]:
    """Does what is published once; what fails stays to be done."""
    while pieces:
        pieces[0]()
        pieces.popleft()
        yield


class Publisher:
    """The thread that works off a run's backlog, from construction to `close`."""

    def __init__(self, run: LiveRun, tracker: Tracker, file: TrackingFile) -> None:
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
        """Something was committed. Raises UserError: what was published before, MLflow refused."""
        self._wake.set()
        if self._life.done():
            self._life.result()

    def follow_ledger(self) -> None:
        """A restored run has made sound what it will publish: steps follow from now on. Raises as `wake`."""
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
        """Publish for a few seconds more; what failed or stopped the training is what its user is told."""
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
            self._abandoned.set()  # Ctrl-C: whoever waits here does not want to.

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
def publishing(run: LiveRun, tracker: Tracker, file: TrackingFile) -> Iterator[Publisher]:
    """A publisher while the block lasts; what is committed in it is published when it ends, unless MLflow is away.

    Raises:
        UserError: MLflow refuses something for good.
    """
    publisher = Publisher(run, tracker, file)
    try:
        yield publisher
    except BaseException as error:
        if isinstance(error, Exception):  # Others stop a training that will go on, and whose user waits.
            publisher.add_report()
        publisher.stop()
        raise
    publisher.close()
