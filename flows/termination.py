"""SIGTERM stops a training when its step is committed. Ctrl-C stops it at once."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from types import FrameType


class ExitCode(IntEnum):
    """The exit codes of all commands (docs/reference/cli.md)."""

    DONE = 0
    FAILED = 1  # Or a stored file is damaged, or a comparison found a difference.
    MISTAKE = 2  # The user's, found before any work.
    PAUSED = 3  # By a bound of `alignment.stop`.
    UNDECIDED = 4  # NOT ENOUGH DATA: neither a pass nor an error.
    INTERRUPTED = 128 + signal.SIGINT
    UNREAD = 128 + signal.SIGPIPE  # Nobody reads standard output any more.
    TERMINATED = 128 + signal.SIGTERM


STOP_MESSAGE = "fp8-grpo: SIGTERM: it stops after this step; a second SIGTERM stops it at once\n"
_STDERR = 2


class StopRequest:
    def __init__(self) -> None:
        self.is_set = False

    def carry_out(self) -> None:
        """Stop now, through the previous handler of SIGTERM. Prefect raises, reports the flow run and passes it on."""
        signal.raise_signal(signal.SIGTERM)
        # The previous handler ignores it, but the request stands.
        sys.exit(ExitCode.TERMINATED)


@contextmanager
def stop_on_sigterm() -> Iterator[StopRequest]:
    """While the block lasts, the first SIGTERM is a request, told on stderr; a second one has its effect.

    Only a process's main thread may handle signals: in any other one SIGTERM keeps its effect.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, frame: FrameType | None) -> None:
        request.is_set = True
        signal.signal(number, before)
        with suppress(OSError):  # Nobody may be there to read it.
            # A handler may come into a write of Python's own stream, which cannot be entered twice.
            os.write(_STDERR, STOP_MESSAGE.encode())

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield request
    finally:
        if not request.is_set:
            signal.signal(signal.SIGTERM, before)
