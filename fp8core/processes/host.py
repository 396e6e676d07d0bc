"""The host of a pool of processes: it loads a user's code once, and forks a process for every socket that it is sent.

    pool -> host: settings                host -> pool: (description, None) or (None, the reason for which it failed)
    pool -> host: a socket                host -> pool, by that socket: Ended, when its process has ended
    pool -> process: requests, None last  process -> pool: (seconds, reply) to each

The host has one thread, and runs none of that code after it was loaded. It kills a process when the pool shuts its
socket down, and all of them when the process of the pool ends. Orphans become children of the host, which kills those
whose process has ended. So daemons end too, on Linux.
"""

import ctypes
import gc
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Set
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn, Protocol

import psutil

from fp8core.errors import UserError

# linux/prctl.h
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
CPU_SIGNAL = signal.SIGPROF
"""What ends a process that has computed for too long, in a function of C too."""


class Limits(NamedTuple):
    """Of one answer: seconds, seconds of processor time, and memory (MiB) beyond what the loaded code takes."""

    timeout_seconds: float
    cpu_seconds: float
    memory_mb: int


class Ended(NamedTuple):
    """The end of a process: its exit code, negative for a signal."""

    code: int


class Handler(Protocol):
    """The work of a process, which is `finished` after its last answer. Exceptions of user code become answers."""

    @property
    def finished(self) -> bool: ...

    def answer(self, request: Any) -> Any: ...

    def close(self) -> None: ...


class Service(NamedTuple):
    """Loaded code: its description for records, and what makes the handler of a process."""

    description: dict[str, str]
    create: Callable[[], Handler]


def serve(channel: int, function: str) -> None:
    """Load a service by `module:function`, whose arguments are the pool's settings, and fork until the pool ends."""
    os.set_inheritable(channel, False)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with Connection(channel) as control:
        module, _, name = function.partition(":")
        limits, settings = control.recv()
        try:
            service: Service = getattr(import_module(module), name)(**settings)
            _refuse_threads()
        except UserError as error:
            control.send((None, str(error)))
            return
        gc.collect()
        gc.freeze()  # What is never collected is never written to, and stays shared with every process.
        control.send((service.description, None))
        _Host(control, service, limits).run()


def _refuse_threads() -> None:
    """A fork copies one thread; locks that others hold would stay locked for ever."""
    count = psutil.Process().num_threads() if sys.platform == "linux" else threading.active_count()
    if count > 1:
        raise UserError(
            f"loading it starts {count - 1} threads, which its processes would lack; start them when called"
        )


class _Host:
    def __init__(self, control: Connection, service: Service, limits: Limits) -> None:
        self._control, self._service, self._limits = control, service, limits
        self._processes: dict[int, Connection] = {}
        self._events = select.poll()

    def run(self) -> None:
        woken, wake = os.pipe()
        os.set_blocking(woken, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for each in (sys.stdin.fileno(), self._control.fileno(), woken):
            self._events.register(each, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in self._events.poll()}
            for pid, connection in self._processes.items():
                if connection.fileno() in ready:  # The pool has shut it down.
                    _kill(pid)
            if woken in ready:
                os.read(woken, 1 << 12)
            self._reap()
            gone = sys.stdin.fileno() in ready
            if gone or (self._control.fileno() in ready and not self._fork()):
                for pid in self._processes:
                    _kill(pid)
                end_children()
                return

    def _fork(self) -> bool:
        """False: there is no socket, the pool is closed."""
        with socket.socket(fileno=os.dup(self._control.fileno())) as control:
            _, files, _, _ = socket.recv_fds(control, 1, 1)
        if not files:
            return False
        connection = Connection(files[0])
        if (pid := os.fork()) == 0:
            self._control.close()
            signal.set_wakeup_fd(-1)
            _work(connection, self._service, self._limits)
        self._processes[pid] = connection
        self._events.register(connection, 0)  # Told in any case: the other end was shut down.
        return True

    def _reap(self) -> None:
        ended = dict[int, int]()
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] in self._processes:
                    ended[found[0]] = os.waitstatus_to_exitcode(found[1])
        if any(ended.values()):  # One that ended orderly has left nothing.
            end_children(self._processes.keys() - ended.keys())
        for pid, code in ended.items():
            connection = self._processes.pop(pid)
            self._events.unregister(connection)
            with connection, suppress(OSError):
                connection.send(Ended(code))


def _work(connection: Connection, service: Service, limits: Limits) -> NoReturn:
    """Answer requests, in a forked process, until there are no more. Nothing of the host is unwound."""
    own, code = os.getpid(), 1
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if sys.platform == "linux":
            memory = psutil.Process().memory_info().vms + limits.memory_mb * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        handler = service.create()
        try:
            while not handler.finished and (request := connection.recv()) is not None:
                began = time.perf_counter()
                signal.signal(CPU_SIGNAL, signal.SIG_DFL)
                signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
                reply = handler.answer(request)
                if os.getpid() != own:
                    os._exit(0)  # A copy that the user's code forked and let return; its reply is none.
                signal.setitimer(signal.ITIMER_PROF, 0)
                connection.send((time.perf_counter() - began, reply))
        finally:
            handler.close()
        end_children()
        code = 0
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    finally:
        os._exit(code)


def end_children(spared: Set[int] = frozenset()) -> None:
    """Kill and reap every child but those, orphans that became ours included; none costs a microsecond."""
    with suppress(ChildProcessError):
        while True:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            others = [child for child in psutil.Process().children() if child.pid not in spared]
            if not others:
                return
            for child in others:
                _kill(child.pid)
            psutil.wait_procs(others, 1)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
