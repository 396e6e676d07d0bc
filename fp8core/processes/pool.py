"""Processes that answer requests of this one within limits; a host forks them (host.py).

Not safe for threads. It has no thread: it moves when it is called. A process that is late is killed with all that it
has started, and costs nothing but the answer that it was to give.
"""

import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
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
    """A reply of a process to a request, and the seconds that it took."""

    request: Any
    reply: Any
    seconds: float


class Failure(NamedTuple):
    """The end of a process before it answered."""

    outcome: Literal["timeout", "crashed"]
    detail: str


class PoolProcess:
    """One process of a pool.

    Attributes:
        pending: requests that it has not answered, of which it works on the first.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.connection = Connection(connected.detach())
        self.pending = deque[Any]()
        self.since = time.monotonic()

    def ask(self, request: Any) -> None:
        """Send a request, which it reads when it has answered those before it; None ends the process."""
        if not self.pending:
            self.since = time.monotonic()
        self.pending.append(request)
        with suppress(BrokenPipeError, ConnectionResetError):  # One that is gone is noticed when it is read from.
            self.connection.send(request)

    def shut_down(self) -> None:
        """The host kills it."""
        # A forked child may have a copy of our end.
        with suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as connected:
            connected.shutdown(socket.SHUT_RDWR)
        self.connection.close()


class ProcessPool:
    """The host and its processes.

    Attributes:
        description: of the loaded code.
    """

    def __init__(self, setting: str, function: str, settings: Mapping[str, Any], limits: Limits) -> None:
        """Load the code; `function` is that of `host.serve`, and `setting` names it in errors.

        Raises:
            UserError: it cannot be loaded.
        """
        self._setting, self._function, self._settings, self._limits = setting, function, settings, limits
        self.description: dict[str, str] = {}
        self.processes = set[PoolProcess]()
        self._host: TiedProcess | None = None
        self._load()

    def start(self) -> PoolProcess:
        """A new process. Raises UserError: the host was lost, and another cannot load the code as it was."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"f"], [theirs.fileno()])
            except (BrokenPipeError, ConnectionResetError):
                self._end_host()
                self._load()
                socket.send_fds(self._control, [b"f"], [theirs.fileno()])
        process = PoolProcess(ours)
        self.processes.add(process)
        return process

    def wait(self, seconds: float) -> list[tuple[PoolProcess, Answer | Failure]]:
        """Answers and failures that have come after at most so many seconds. A process that failed is gone."""
        now = time.monotonic()
        deadlines = [self._deadline(process) - now for process in self.processes]
        connections: dict[Any, PoolProcess] = {process.connection: process for process in self.processes}
        patience = min([seconds, *deadlines])
        ready = wait(connections, None if patience == math.inf else max(0.0, patience))
        found = [(connections[each], said) for each in ready for said in self._received(connections[each])]
        # A reply that lay in the channel was in time, however late this process came to read it.
        now = time.monotonic()
        for process in [each for each in self.processes if each.connection not in ready]:
            if now > self._deadline(process):
                self.end(process)
                found.append((process, Failure("timeout", f"no reply after {self._limits.timeout_seconds:g} s")))
        return found

    def end(self, process: PoolProcess) -> None:
        """Kill it with all that it has started; a second call does nothing."""
        if process in self.processes:
            self.processes.remove(process)
            process.shut_down()

    def close(self) -> None:
        """End all processes; a second call does nothing."""
        for process in [*self.processes]:
            self.end(process)
        self._end_host()

    def unusable(self, reason: str) -> UserError:
        return UserError(f"{self._setting}: {reason}")

    def _deadline(self, process: PoolProcess) -> float:
        return process.since + self._limits.timeout_seconds if process.pending else math.inf

    def _received(self, process: PoolProcess) -> list[Answer | Failure]:
        found = list[Answer | Failure]()
        while process in self.processes:
            try:
                if not process.connection.poll():
                    return found
                said = process.connection.recv()
            except (EOFError, OSError, pickle.UnpicklingError):
                said = Ended(-signal.SIGKILL)  # Together with its host.
            if isinstance(said, Ended):
                self.end(process)
                found.append(self._failure(said.code))
            else:
                seconds, reply = said
                found.append(Answer(process.pending.popleft(), reply, seconds))
                process.since = time.monotonic()
        return found

    def _failure(self, code: int | None) -> Failure:
        if code is None:
            return Failure("crashed", "no process can be started")
        if code == -CPU_SIGNAL:
            return Failure("timeout", f"more than {self._limits.cpu_seconds:g} s of processor time")
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return Failure("crashed", f"its process ended ({how})")

    def _load(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            arguments = ["-P", "-c", _BOOT, str(theirs.fileno()), self._function, _ROOT, *sys.path]
            passed = {**variables(), **_VARIABLES}
            self._host = TiedProcess(arguments, subprocess.DEVNULL, [theirs.fileno()], passed)
        try:
            with Connection(self._control.dup().detach()) as connection:
                connection.send((self._limits, dict(self._settings)))
                if not connection.poll(_START_SECONDS):
                    raise self.unusable(f"it was not imported after {_START_SECONDS:g} s")
                loaded, failed = connection.recv()
            if failed is not None:
                raise self.unusable(failed)
            if self.description not in ({}, loaded):
                raise self.unusable(f"it changed while it was used: {self.description}, now {loaded}")
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            self._end_host()
            raise self.unusable("its process ended while it was imported") from error
        except BaseException:
            self._end_host()
            raise
        self.description = loaded

    def _end_host(self) -> None:
        if self._host is None:
            return
        self._control.close()
        self._host.close_copy()
        try:
            self._host.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._host.kill()
            self._host.wait()
        self._host = None
