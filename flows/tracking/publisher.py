"""A thread that mirrors a run's ledger to MLflow, beside the training, which never waits for it."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

from flows.tracking.backlog import Backlog
from flows.tracking.tracker import Outage
from fp8core.report.console import Console

# Pauses between attempts; the last one repeats.
RETRY_SECONDS = (1.0, 2.0, 5.0, 10.0)
# Longest wait of a finished training for a service that does not answer, and of one that failed or was stopped.
OUTAGE_PATIENCE_SECONDS, STOPPED_PATIENCE_SECONDS = 60.0, 5.0


class Publisher:
    """Brings MLflow up to date, from construction to `close` or `stop`."""

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
        failures, away = 0, False
        while True:
            self._news.wait()
            self._news.clear()
            last = self._closed.is_set()
            try:
                for _ in self._backlog.publish():
                    failures = 0
                    if self._stopped and time.monotonic() > self._deadline:
                        return
            except Outage as error:
                if not away:
                    away = True
                    self._console.note(f"MLflow does not answer ({error}); metrics stay in the ledger and follow")
                pause = RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)]
                failures += 1
                if last:
                    if self._stopped or time.monotonic() + pause > self._deadline:
                        return
                    time.sleep(pause)
                else:
                    self._closed.wait(pause)
                self._news.set()
                continue
            if away:
                away = False
                self._console.note(f"MLflow answers again; it has every step up to {self._backlog.published}")
            if last:
                return
