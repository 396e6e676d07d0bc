"""Mirror a training's ledger to MLflow and to Prefect, beside the training, which never waits for either.

One thread serves every destination, a piece of each in turn. A destination that is away or refuses gets its next
attempt after a pause of its own, so that the others are not held up. Meanwhile the ledger has everything.
"""

import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol

from flows.tracking.store import Outage, Refusal
from fp8core.report.console import Console

# Pauses between attempts at a destination that is away or refuses; the last one repeats.
RETRY_SECONDS = (1.0, 2.0, 5.0, 10.0)
# Time for which a training that failed or was stopped goes on publishing.
STOPPED_PATIENCE_SECONDS = 5.0


class Destination(Protocol):
    """A service that shows a training."""

    name: str
    patience: float
    """Longest wait of a finished training, in seconds, while the service does not answer."""
    follows: str
    """The content that the service gets later, in words after "does not answer;"."""

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
    """The state of one destination."""

    def __init__(self, destination: Destination, console: Console) -> None:
        self.destination = destination
        self.over = False
        self.due = -math.inf
        """When the next attempt may begin (monotonic)."""
        self._woken = self._woken_again = self._final = False
        self._console = console
        self._work: Iterator[None] | None = None
        self._failures = 0
        self._away_since = -math.inf
        self._said = set[type[Exception]]()

    def wake(self) -> None:
        """There may be something to publish, also for an attempt that has begun and passed it by."""
        self._woken, self._woken_again = True, self._work is not None

    @property
    def ready(self) -> bool:
        """True if there may be something to publish, and it is time to."""
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
            self._console.note(f"{self.destination.name} {error.shown}; {self.destination.follows}")
        self.due = now + RETRY_SECONDS[min(self._failures, len(RETRY_SECONDS) - 1)]
        self._failures += 1
        if closed_at is not None:
            self.over = isinstance(error, Refusal) or self.due > max(self._away_since, closed_at) + patience

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
        """Serve another destination, too."""
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

    Raises:
        UserError: the run cannot be published.
    """
    publisher = Publisher(console, first)
    try:
        yield publisher
    except BaseException:
        publisher.stop()
        raise
    publisher.close()
