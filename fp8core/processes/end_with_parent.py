"""Processes that end with the one that started them, however that ends: by SIGKILL too.

`TiedProcess` is the parent's side, for a command: the end of a pipe is the end of the parent. `follow` and
`follow_parent` run inside our own children. Left alone, processes of vLLM would keep the memory of their GPU.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from threading import Thread
from typing import IO


class TiedProcess(subprocess.Popen[bytes]):
    """A child with a session of its own, whose standard input is a pipe that ends with this process."""

    def __init__(
        self,
        arguments: Sequence[str],
        output: IO[bytes] | int,
        files: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start Python with `arguments`; the child has the open `files` by the same numbers."""
        super().__init__(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            bufsize=0,
            pass_fds=files,
            env=environment,
        )
        _processes.add(self)

    def close_copy(self) -> None:
        """Close the pipe, or a copy of it, and wait for nothing."""
        assert self.stdin is not None, "it was started with a pipe"
        self.stdin.close()


# A module that ends with its standard input: whoever holds the other end has ended, by SIGKILL too.
_TIED = """
import os, runpy, signal, sys, threading
threading.Thread(target=lambda: (os.read(0, 1), os.kill(os.getpid(), signal.SIGTERM)), daemon=True).start()
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def tied_module(module: str, *words: str) -> list[str]:
    """Arguments of Python to run a module that gets SIGTERM when a `TiedProcess` loses its parent."""
    return ["-P", "-c", _TIED, module, *words]


def module_arguments(package: str) -> list[str]:
    """Arguments of Python to run a package or module, and none of the same name in the working directory."""
    return ["-P", "-m", package]


_processes: weakref.WeakSet[TiedProcess] = weakref.WeakSet()


def _close_copies() -> None:
    for process in list(_processes):
        process.close_copy()


# A pipe ends when its last copy is closed: without this a forked child would keep it open when we are killed.
os.register_at_fork(after_in_child=_close_copies)


def follow_parent() -> None:
    """From now on this process ends with the one that started it by `multiprocessing`; without one nothing happens."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        follow(parent.pid)


def follow(pid: int) -> None:
    """From now on this process ends with process `pid`, at once if that is gone.

    A third process between them, which started this one by `multiprocessing`, ends too.
    """
    parent = multiprocessing.parent_process()
    between = None if parent is None or parent.pid == pid else parent.pid
    Thread(target=_end_after, args=(pid, between), name="end_with_parent", daemon=True).start()


def _end_after(pid: int, between: int | None) -> None:
    with suppress(ProcessLookupError):
        wait([os.pidfd_open(pid)])
    if between is not None:
        with suppress(ProcessLookupError):
            os.kill(between, signal.SIGKILL)
    # Nobody is left who could be told, and what is running may hold a lock that an orderly end would wait for.
    os.kill(os.getpid(), signal.SIGKILL)
