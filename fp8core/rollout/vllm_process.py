"""One of several engines, as this process sees it: a child process (`vllm_child`), what it is asked, and its end."""

import os
import signal
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fp8core.errors import UserError
from fp8core.rollout.vllm_child import Answer, Failure, Request

_ROOT = str(Path(__file__).parents[2])
_BOOT = (
    "import sys; sys.path[:] = sys.argv[3:]; from fp8core.rollout.vllm_child import serve; "
    "serve(int(sys.argv[1]), int(sys.argv[2]) if sys.argv[2] else None)"
)
# More than vLLM's own patience with its process (`VllmEngine.close`).
_PATIENCE_SECONDS = 20.0
_POLL_SECONDS = 0.02


class EngineProcessError(RuntimeError):
    """A process of an engine failed or ended; the message names it and holds what it said."""


class EngineProcess:
    """A fresh Python interpreter that holds one engine.

    It leads a session and process group of its own: Ctrl-C does not reach it, and vLLM's process ends with it.
    """

    def __init__(self, name: str, gpu: int | None) -> None:
        """Start it; `name` is for messages, `gpu` as `vllm_child.serve` has it."""
        self.name, self._asked = name, -1
        ours, theirs = Pipe()
        with theirs:
            arguments = [str(theirs.fileno()), "" if gpu is None else str(gpu)]
            paths = [_ROOT, *(path for path in sys.path if path != _ROOT)]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, *arguments, *paths],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.pipe: Connection[Request, Answer] = ours
        _held.add(self)

    def ask(self, method: str, *arguments: Any) -> int:
        """Send a request, and give up what was asked before; returns its number."""
        self._asked += 1
        # A process that is gone is noticed when it is read from.
        with suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send(Request(self._asked, method, arguments))
        return self._asked

    def receive(self, number: int) -> Answer:
        """The next answer to the request with that number, when it comes.

        Raises:
            EngineProcessError: the process failed, or is gone.
            UserError, UpdateError, ValueError: as the engine raised it.
        """
        assert number == self._asked, "something else was asked meanwhile"
        while True:
            try:
                answer = self.pipe.recv()
            # In the middle of an answer, the end is another error than between two.
            except (EOFError, OSError):
                raise EngineProcessError(f"{self.name} ended with exit code {self.end()}") from None
            if answer.kind == "failed" and answer.number == number:
                raise self._error(answer.content)
            if answer.number == number:
                return answer

    def end(self, patience: float = _PATIENCE_SECONDS) -> int:
        """Wait so many seconds for its end, then kill it, and vLLM's process with it; returns its exit code."""
        if self._process.returncode is None:
            deadline = time.monotonic() + patience
            while not self._is_over() and time.monotonic() < deadline:
                self._discard_answers(_POLL_SECONDS)
            # Until it is reaped, its number belongs to nobody else.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def _is_over(self) -> bool:
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _discard_answers(self, seconds: float) -> None:
        """Who wants to say something would not hear that it shall end."""
        try:
            while self.pipe.poll(seconds):
                self.pipe.recv_bytes()
        except (EOFError, OSError):
            time.sleep(seconds)

    def close_copy(self) -> None:
        """Close the connection in a process that only has a copy of it."""
        self.pipe.close()

    def _error(self, failure: Failure) -> Exception:
        if failure.error is None:
            last = failure.text.strip().rpartition("\n")[2]
            return EngineProcessError(f"{self.name} failed: {last}\n{failure.text}")
        if isinstance(failure.error, UserError):
            return failure.error
        return type(failure.error)(f"{self.name}: {failure.error}")


_held: weakref.WeakSet[EngineProcess] = weakref.WeakSet()


def _close_copies() -> None:
    for process in list(_held):
        process.close_copy()


# A connection ends when its last copy is closed: without this a forked child would keep it open when we are killed.
os.register_at_fork(after_in_child=_close_copies)
