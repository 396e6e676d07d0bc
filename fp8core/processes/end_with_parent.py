"""Processes that end with the one that started them, however that ends: by SIGKILL too.

`TiedProcess` is the parent's side, for a command: the end of a pipe is the end of the parent. `follow` and
`follow_parent` run inside our own children. Left alone, processes of vLLM would wait for requests, and keep the memory
of their GPU. A descriptor names the parent: its number may be another process's later.
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
from pathlib import Path
from threading import Thread
from typing import IO

_ROOT = Path(__file__).parents[2]
_RUN_MODULE = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
sys.argv[:] = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


class TiedProcess:
    """A child whose standard input is a pipe that nobody writes to and only this process holds open.

    The end of that file is this process's end. The child has a session of its own: neither Ctrl-C nor a signal to our
    process group reaches it.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        output: IO[bytes] | int,
        files: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start Python with `arguments`; the child has the open `files` by the same numbers."""
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            bufsize=0,
            pass_fds=files,
            env=environment,
        )
        _held.add(self)

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def wait(self, seconds: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired after `seconds`."""
        return self._process.wait(seconds)

    def kill(self) -> None:
        self._process.kill()

    def end(self, word: bytes = b"") -> None:
        """Let the child read `word` and then the end of the file, and wait for it; a second call does nothing."""
        assert self._process.stdin is not None, "it was started with a pipe"
        if not self._process.stdin.closed:
            with suppress(BrokenPipeError):  # Somebody killed it.
                self._process.stdin.write(word)
            self._process.stdin.close()
            self._process.wait()

    def close_copy(self) -> None:
        """Close the pipe, or a copy of it, without a word to the child, and wait for nothing."""
        assert self._process.stdin is not None, "it was started with a pipe"
        self._process.stdin.close()


def running(module: str, *arguments: str) -> list[str]:
    """Arguments of Python to run a module of ours, and not one of the same name in the working directory."""
    return ["-P", "-c", _RUN_MODULE, str(_ROOT), module, *arguments]


def installed(package: str) -> list[str]:
    """Arguments of Python to run a package as its command would: libraries on PYTHONPATH bring no commands."""
    return ["-P", "-m", package]


_held: weakref.WeakSet[TiedProcess] = weakref.WeakSet()


def _close_copies() -> None:
    for process in list(_held):
        process.close_copy()


# A pipe ends when its last copy is closed: without this a forked child would keep it open when we are killed.
os.register_at_fork(after_in_child=_close_copies)


def follow_parent() -> None:
    """From now on this process ends with the one that started it by `multiprocessing`; without one nothing happens."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    descriptor = _opened(parent.pid)
    # Asked after it was opened: the number may have been another's by then.
    _start(descriptor if parent.is_alive() else None, None)


def follow(pid: int) -> None:
    """From now on this process ends with process `pid`, at once if that is gone.

    A third process between them, which started this one by `multiprocessing`, ends too.
    """
    parent = multiprocessing.parent_process()
    between = None if parent is None or parent.pid == pid else _opened(parent.pid)
    _start(_opened(pid), between)


def _opened(pid: int | None) -> int | None:
    """A descriptor that can be read from when the process ends; None where it is gone."""
    assert pid is not None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _start(followed: int | None, between: int | None) -> None:
    Thread(target=_end_after, args=(followed, between), name="end_with_parent", daemon=True).start()


def _end_after(followed: int | None, between: int | None) -> None:
    if followed is not None:
        wait([followed])
    if between is not None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(between, signal.SIGKILL)
    # Nobody is left who could be told, and what is running may hold a lock that an orderly end would wait for.
    os.kill(os.getpid(), signal.SIGKILL)
