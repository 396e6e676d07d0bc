"""SIGTERM stops a training when its step, or part of step 0, is committed. Ctrl-C stops it at once."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from types import FrameType
from typing import NoReturn


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


Handler = Callable[[int, FrameType | None], object]
"""What Python calls for a signal."""
TOLD = "fp8-grpo: SIGTERM: it stops after this step, or after this part of a start; a second SIGTERM stops it at once\n"
_STDERR = 2
_IMPORTS = "importlib._bootstrap"


class StopRequest:
    """Record of a request to stop this process; a training checks it between steps."""

    def __init__(self) -> None:
        self.requested = False
        self.keeps_nothing = False

    @contextmanager
    def without_wait(self) -> Iterator[None]:
        """While the block lasts, a request is carried out at once: what the block makes is kept at its end alone."""
        self.keeps_nothing = True
        if self.requested:
            self.carry_out()
        try:
            yield
        finally:
            self.keeps_nothing = False

    def carry_out(self) -> None:
        """Stop now, through the previous handler of SIGTERM. Prefect raises, reports the flow run and passes it on."""
        signal.raise_signal(signal.SIGTERM)
        # The previous handler ignores it, but the request stands.
        sys.exit(ExitCode.TERMINATED)


class Interrupt:
    def __init__(self) -> None:
        self.came = False

    def check(self) -> None:
        """Raises KeyboardInterrupt when it came, and was suppressed."""
        if self.came:
            raise KeyboardInterrupt


def leave(reason: str | Callable[[], str]) -> Handler:
    """A handler of Ctrl-C that ends the process where it stands: for a block that has nothing to close."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        with suppress(OSError):
            text = reason if isinstance(reason, str) else reason()
            os.write(_STDERR, f"fp8-grpo: {text}\n".encode())
        os._exit(128 + number)

    return end


def leave_import(number: int, frame: FrameType | None) -> None:
    """Handler of Ctrl-C: within an import it ends the process, elsewhere it raises KeyboardInterrupt.

    Libraries make other errors of an exception in an import, print it, or take it for a package that is missing.
    """
    outer = frame
    while outer is not None:
        if outer.f_globals.get("__name__") == _IMPORTS:
            leave("interrupted")(number, frame)
        outer = outer.f_back
    signal.default_int_handler(number, frame)


@contextmanager
def keep_interrupt(act: Handler = signal.default_int_handler) -> Iterator[Interrupt]:
    """While the block lasts, `act` handles Ctrl-C, and an error that replaces KeyboardInterrupt becomes it again.

    Prefect's engine passes KeyboardInterrupt on, with two exceptions. One that comes while a task run is made becomes
    an error of the engine's own; one that comes in a destructor is gone. Where Ctrl-C is ignored, it stays ignored.
    """
    interrupt, before = Interrupt(), signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield interrupt
        return

    def note(number: int, frame: FrameType | None) -> None:
        interrupt.came = True
        act(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    except Exception as error:
        if interrupt.came:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def stop_on_sigterm() -> Iterator[StopRequest]:
    """While the block lasts, the first SIGTERM is a request; a second one has the same effect as without the block.

    A line on stderr reports it, because a step may take minutes. Within `StopRequest.without_wait` the first one acts.
    Only a process's main thread may handle signals: in any other one SIGTERM keeps its effect.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, frame: FrameType | None) -> None:
        request.requested = True
        signal.signal(number, before)
        if request.keeps_nothing:
            request.carry_out()
        with suppress(OSError):  # Nobody may be there to read it.
            # A handler may come into a write of Python's own stream, which cannot be entered twice.
            os.write(_STDERR, TOLD.encode())

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield request
    finally:
        if not request.requested:
            signal.signal(signal.SIGTERM, before)
