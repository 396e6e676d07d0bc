"""Processes that answer requests of this one within limits; a host forks them (host.py). Safe for threads.

A process that is late is killed with all that it has started, and costs nothing but the answer that it was to give.
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fp8core.errors import UserError
from fp8core.processes.end_with_parent import TiedProcess
from fp8core.processes.host import CPU_SIGNAL, Ended, Limits
from fp8core.processes.variables import variables

_ROOT = str(Path(__file__).parents[2])
_BOOT = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from fp8core.processes.host import serve; serve(int(sys.argv[1]), sys.argv[2])"
)
_START_SECONDS = 120.0
_ENDING_SECONDS = 20.0
# Sets of strings have the same order in every run. A thread of a library, pyarrow's allocator among them, would stay
# behind in a fork.
_VARIABLES = {
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}


class Answer(NamedTuple):
    """A reply of a process, and the seconds that it took."""

    reply: Any
    seconds: float


class Failure(NamedTuple):
    """The end of a process before it answered, after so many seconds."""

    outcome: Literal["timeout", "crashed"]
    detail: str
    seconds: float


class PoolProcess:
    def __init__(self, connected: socket.socket, limits: Limits) -> None:
        self._connection, self._limits = Connection(connected.detach()), limits
        self._lock = threading.Lock()

    def ask(self, request: Any) -> Answer | Failure:
        """Wait for the reply to a request. A process that fails is gone."""
        with self._lock:
            began = time.monotonic()
            with suppress(BrokenPipeError, ConnectionResetError):  # Its end lies in the channel.
                self._connection.send(request)
            if not self._connection.poll(self._limits.timeout_seconds):
                self.kill()
                late = f"no reply after {self._limits.timeout_seconds:g} s"
                return Failure("timeout", late, time.monotonic() - began)
            try:
                said = self._connection.recv()
            except (EOFError, OSError, pickle.UnpicklingError):
                said = Ended(-signal.SIGKILL)  # Together with its host.
        if isinstance(said, Ended):
            return self._failure(said.code, time.monotonic() - began)
        seconds, reply = said
        return Answer(reply, seconds)

    def close(self) -> None:
        """Let it end by itself, and kill it if it does not."""
        self.ask(None)

    def kill(self) -> None:
        """Let the host kill it with all that it has started."""
        # A forked child may have a copy of our end.
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as connected:
            connected.shutdown(socket.SHUT_RDWR)

    def _failure(self, code: int, seconds: float) -> Failure:
        if code == -CPU_SIGNAL:
            return Failure("timeout", f"more than {self._limits.cpu_seconds:g} s of processor time", seconds)
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return Failure("crashed", f"its process ended ({how})", seconds)


class ProcessPool:
    """The host of processes; `description` is of the code that it has loaded."""

    def __init__(self, setting: str, function: str, settings: Mapping[str, Any], limits: Limits) -> None:
        """`function`: of `host.serve`; `setting` names the code in errors. Raises UserError: it cannot be loaded."""
        self._setting, self._limits = setting, limits
        self._control, theirs = socket.socketpair()
        with theirs:
            arguments = ["-P", "-c", _BOOT, str(theirs.fileno()), function, _ROOT, *sys.path]
            passed = {**variables(), **_VARIABLES}
            self._host = TiedProcess(arguments, subprocess.DEVNULL, [theirs.fileno()], passed)
        try:
            self.description = self._loaded(settings)
        except BaseException:
            self.close()
            raise

    def start(self) -> PoolProcess:
        """A new process. Raises UserError: the host was killed."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"f"], [theirs.fileno()])
            except (BrokenPipeError, ConnectionResetError) as error:
                raise UserError(
                    f"{self._setting}: the process that has loaded it was killed; resume the run"
                ) from error
        return PoolProcess(ours, self._limits)

    def close(self) -> None:
        """End all processes; a second call does nothing."""
        self._control.close()
        self._host.close_copy()
        try:
            self._host.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._host.kill()
            self._host.wait()

    def _loaded(self, settings: Mapping[str, Any]) -> dict[str, str]:
        try:
            with Connection(self._control.dup().detach()) as connection:
                connection.send((self._limits, dict(settings)))
                if not connection.poll(_START_SECONDS):
                    raise UserError(f"{self._setting}: it was not imported after {_START_SECONDS:g} s")
                description, reason = connection.recv()
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise UserError(f"{self._setting}: its process ended while it was imported") from error
        if reason is not None:
            raise UserError(f"{self._setting}: {reason}")
        found: dict[str, str] = description
        return found
