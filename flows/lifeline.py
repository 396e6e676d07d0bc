"""A child process that learns when this one is gone, however it went: by SIGKILL too."""

import contextlib
import os
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO

_ROOT = Path(__file__).parents[1]
_RUN_MODULE = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
sys.argv[:] = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


class Lifeline:
    """A child whose standard input is a pipe that nobody writes to and only this process holds open.

    The end of that file is this process's end. The child has a session of its own: neither Ctrl-C nor a signal to our
    process group reaches it.
    """

    def __init__(self, arguments: Sequence[str], output: IO[bytes] | int, files: Sequence[int] = ()) -> None:
        """Start Python with `arguments`; the child writes to `output`, and has the open `files` by the same numbers."""
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            bufsize=0,
            pass_fds=files,
        )
        _held.add(self)

    @property
    def exit_code(self) -> int | None:
        """What the child ended with, or None while it lives."""
        return self._process.poll()

    def wait(self) -> int:
        """What the child ends with, when it does."""
        return self._process.wait()

    def say(self, word: bytes) -> None:
        """Let the child read `word`."""
        assert self._process.stdin is not None, "it was started with a pipe"
        with contextlib.suppress(BrokenPipeError):  # Somebody killed it.
            self._process.stdin.write(word)

    def end(self, word: bytes = b"") -> None:
        """Let the child read `word` and then the end of the file, and wait for it; a second call does nothing."""
        assert self._process.stdin is not None, "it was started with a pipe"
        if not self._process.stdin.closed:
            self.say(word)
            self._process.stdin.close()
            self._process.wait()

    def close_copy(self) -> None:
        """Close the pipe without a word to the child, in a process that only has a copy of it."""
        assert self._process.stdin is not None, "it was started with a pipe"
        self._process.stdin.close()


def running(module: str, *arguments: str) -> list[str]:
    """Arguments of Python to run a module of ours, and not one of the same name in the working directory."""
    return ["-P", "-c", _RUN_MODULE, str(_ROOT), module, *arguments]


def installed(package: str) -> list[str]:
    """Arguments of Python to run a package as its command would: libraries on PYTHONPATH bring no commands."""
    return ["-P", "-m", package]


_held: weakref.WeakSet[Lifeline] = weakref.WeakSet()


def _close_copies() -> None:
    for lifeline in list(_held):
        lifeline.close_copy()


# A pipe ends when its last copy is closed: without this a forked child would keep it open when we are killed.
os.register_at_fork(after_in_child=_close_copies)
