"""Processes that answer requests of this one within limits. A host loads a user's code once, and forks each of them.

    pool -> host: settings                host -> pool: (description, None) or (None, the reason for which it failed)
    pool -> host: the end of a pipe       process -> pool, by that pipe: its number, and a reply to each request
                                          host -> pool, by that pipe: ProcessExit, when the process has ended

A process that is late is killed with its group, and costs nothing but the answer that it was to give.
"""

import ctypes
import gc
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import psutil

from fp8core.errors import UserError
from fp8core.processes.end_with_parent import TiedProcess

_ROOT = str(Path(__file__).parents[2])
_BOOT = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from fp8core.processes.pool import serve; serve(int(sys.argv[1]), sys.argv[2])"
)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
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


class Limits(NamedTuple):
    """Limits of one answer: seconds, and memory (MiB) beyond what the loaded code takes."""

    timeout_seconds: float
    memory_mb: int


class Handler(Protocol):
    """The work of a process. Exceptions of user code become answers."""

    def answer(self, request: Any) -> Any: ...

    def close(self) -> None: ...


class Service(NamedTuple):
    description: dict[str, str]
    create: Callable[[], Handler]


class Failure(NamedTuple):
    outcome: Literal["timeout", "crashed"]
    detail: str


class ProcessExit(NamedTuple):
    """The end of a process: its exit code, negative for a signal."""

    code: int


class PoolProcess:
    def __init__(self, connection: Connection, timeout_seconds: float) -> None:
        self._connection = connection
        self._timeout_seconds = timeout_seconds
        self._pid: int = connection.recv()
        self._lock = threading.Lock()

    def ask(self, request: Any) -> tuple[Any | Failure, float]:
        """The reply to a request, and the seconds until it came. A process that fails is gone."""
        with self._lock:
            began = time.monotonic()
            reply = self._reply(request)
        return reply, time.monotonic() - began

    def _reply(self, request: Any) -> Any | Failure:
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # Its end lies in the channel.
                self._connection.send(request)
            if not self._connection.poll(self._timeout_seconds):
                _kill_group(self._pid)
                return Failure("timeout", f"no reply after {self._timeout_seconds:g} s")
            reply = self._connection.recv()
        except (EOFError, OSError):
            reply = ProcessExit(-signal.SIGKILL)  # Together with its host.
        if not isinstance(reply, ProcessExit):
            return reply
        how = f"exit code {reply.code}" if reply.code >= 0 else signal.Signals(-reply.code).name
        return Failure("crashed", f"its process ended ({how})")

    def close(self) -> None:
        """Let it end by itself, and kill it if it does not."""
        self.ask(None)


class ProcessPool:
    """The host of processes; `description` is of the code that it has loaded. Safe for threads."""

    def __init__(self, setting: str, function: str, settings: Mapping[str, Any], limits: Limits) -> None:
        """`function`: of `serve`; `setting` names the code in errors. Raises UserError: it cannot be loaded."""
        self._setting = setting
        self._limits = limits
        self._control, theirs = Pipe()
        with theirs:
            arguments = ["-P", "-c", _BOOT, str(theirs.fileno()), function, _ROOT, *sys.path]
            environment = {**os.environ, **_VARIABLES}
            self._host = TiedProcess(arguments, subprocess.DEVNULL, [theirs.fileno()], environment)
        try:
            self.description = self._load(settings)
        except BaseException:
            self.close()
            raise

    def start(self) -> PoolProcess:
        """A new process. Raises UserError: the host was killed."""
        ours, theirs = Pipe()
        try:
            with theirs:
                send_handle(self._control, theirs.fileno(), None)
            return PoolProcess(ours, self._limits.timeout_seconds)
        except (EOFError, OSError) as error:
            raise UserError(f"{self._setting}: the process that has loaded it was killed; resume the run") from error

    def close(self) -> None:
        """End all processes; a second call does nothing."""
        self._control.close()
        self._host.close_copy()
        try:
            self._host.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._host.kill()
            self._host.wait()

    def _load(self, settings: Mapping[str, Any]) -> dict[str, str]:
        try:
            self._control.send((self._limits, dict(settings)))
            if not self._control.poll(_START_SECONDS):
                raise UserError(f"{self._setting}: it was not imported after {_START_SECONDS:g} s")
            description, reason = self._control.recv()
        except (EOFError, OSError) as error:
            raise UserError(f"{self._setting}: its process ended while it was imported") from error
        if reason is not None:
            raise UserError(f"{self._setting}: {reason}")
        about: dict[str, str] = description
        return about


def serve(channel: int, function: str) -> None:
    """Load a service by `module:function`, whose arguments are the pool's settings, and fork until the pool ends."""
    os.set_inheritable(channel, False)
    with Connection(channel) as control:
        module, _, name = function.partition(":")
        limits, settings = control.recv()
        try:
            service: Service = getattr(import_module(module), name)(**settings)
            # A fork copies one thread; locks that others hold would stay locked for ever.
            if (count := psutil.Process().num_threads()) > 1:
                raise UserError(
                    f"loading it starts {count - 1} threads, which its processes would lack; start them when called"
                )
        except UserError as error:
            control.send((None, str(error)))
            return
        gc.collect()
        gc.freeze()  # What is never collected is never written to, and stays shared with every process.
        control.send((service.description, None))
        _fork_loop(control, service, limits)


def _fork_loop(control: Connection, service: Service, limits: Limits) -> None:
    processes = dict[int, tuple[BaseProcess, Connection]]()
    requests = sys.stdin.fileno()
    try:
        while requests not in (ready := wait([requests, control, *processes])):
            for sentinel in [each for each in ready if each in processes]:
                process, connection = processes.pop(sentinel)
                process.join()
                assert process.exitcode is not None
                _kill_group(process.pid)
                with connection, suppress(OSError):
                    connection.send(ProcessExit(process.exitcode))
            if control in ready:
                connection = Connection(recv_handle(control))
                process = multiprocessing.get_context("fork").Process(
                    target=_work, args=(connection, control, service, limits)
                )
                process.start()
                processes[process.sentinel] = process, connection
    except EOFError:
        pass  # The pool is closed.
    finally:
        for process, _ in processes.values():
            _kill_group(process.pid)


def _work(connection: Connection, control: Connection, service: Service, limits: Limits) -> None:
    control.close()
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    memory = psutil.Process().memory_info().vms + limits.memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    connection.send(os.getpid())
    handler = service.create()
    try:
        with suppress(EOFError, BrokenPipeError, ConnectionResetError):
            while (request := connection.recv()) is not None:
                connection.send(handler.answer(request))
    finally:
        handler.close()


def _kill_group(pid: int | None) -> None:
    assert pid is not None, "it was started"
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
