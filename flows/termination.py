"""SIGTERM stops a training between two steps: the step it came in is committed first."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether this process was asked to stop; a training looks at it between steps."""

    def __init__(self) -> None:
        self.requested = False

    def carry_out(self) -> None:
        """Stop now, by whoever handled SIGTERM before us. Prefect raises, reports the flow run and passes it on."""
        signal.raise_signal(signal.SIGTERM)
        # Somebody had chosen to ignore it; we were asked all the same.
        sys.exit(128 + signal.SIGTERM)


@contextmanager
def stop_on_sigterm() -> Iterator[StopRequest]:
    """While the block lasts, the first SIGTERM is a request; a second one does what it would do without the block.

    Only a process's main thread may handle signals: in any other one SIGTERM does what it does.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, frame: FrameType | None) -> None:
        request.requested = True
        signal.signal(number, before)

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield request
    finally:
        if not request.requested:
            signal.signal(signal.SIGTERM, before)
