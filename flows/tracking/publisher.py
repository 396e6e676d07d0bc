"""Threads that mirror a run's ledger to its services, beside the training, which never waits for one.

Each service has a thread of its own. One that is away or refuses gets its next attempt after a pause. Meanwhile the
ledger has everything.
"""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from flows.tracking.tracker import Outage, Refusal
from fp8core.report.console import Console

# Pauses between attempts at a service that is away or refuses; the last one repeats.
RETRY_SECONDS = (1.0, 2.0, 5.0, 10.0)
# Time for which a training that failed or was stopped goes on publishing.
STOPPED_PATIENCE_SECONDS = 5.0


class Destination(Protocol):
    name: str
    patience: float
    """Longest wait of a finished training, in seconds, while the service does not answer."""
    outage_note: str
    """Said on the console during an outage: what the service gets later."""

    def publish(self) -> Iterator[None]:
        """Publishes what is missing, in order; yields after each piece. A repetition leaves nothing twice.

        Raises:
            Outage: a later attempt may succeed.
            Refusal: the service refuses a piece, which its operator may change.
            UserError: the training must fail.
        """

    def caught_up(self) -> str:
        """The content of the service by now, in words after "answers again"; may be empty."""


class Publisher:
    """Brings one service up to date, from construction to `close` or `stop`."""

    def __init__(self, destination: Destination, console: Console) -> None:
        self._destination, self._console = destination, console
        self._news, self._closed = threading.Event(), threading.Event()
        self._deadline = float("inf")
        """Time (monotonic) of the last attempt after the training ended."""
        self._stopped = False
        self._news.set()  # An earlier process may have left something.
        self._life: Future[None] = ThreadPoolExecutor(1, f"publisher-{destination.name}").submit(self._follow)

    def wake(self) -> None:
        """Something was committed. Raises UserError: the run cannot be published."""
        self._news.set()
        if self._life.done():
            self._life.result()

    def close(self) -> None:
        """Publish the rest, but wait for the service no longer than its patience. Raises as `wake`."""
        self._end(self._destination.patience)
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
        failures, said = 0, set[type[Exception]]()
        while True:
            self._news.wait()
            self._news.clear()
            last = self._closed.is_set()
            try:
                for _ in self._destination.publish():
                    failures = 0
                    if self._stopped and time.monotonic() > self._deadline:
                        return
            except (Outage, Refusal) as error:
                if type(error) not in said:
                    said.add(type(error))
                    does = "does not answer" if isinstance(error, Outage) else "refuses a request"
                    self._console.note(f"{self._destination.name} {does} ({error}); {self._destination.outage_note}")
                pause = RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)]
                failures += 1
                if last:
                    # Time does not change a refusal.
                    if self._stopped or isinstance(error, Refusal) or time.monotonic() + pause > self._deadline:
                        return
                    time.sleep(pause)
                else:
                    self._closed.wait(pause)
                self._news.set()
                continue
            if said:
                said.clear()
                self._console.note(f"{self._destination.name} answers again{self._destination.caught_up()}")
            if last:
                return
