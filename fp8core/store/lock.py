"""The lock of a run: one process at a time."""

import fcntl
import json
import os
import socket
import time
import weakref
from pathlib import Path
from typing import IO

from fp8core.errors import UserError

# Longer than `is_held` is ever in the way of somebody who takes the lock.
_PROBE_SECONDS = 0.1


class RunLock:
    """An exclusive flock on a file that names its holder; the kernel frees it however that process ends."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        _held.add(self)

    @classmethod
    def acquire(cls, path: Path) -> "RunLock":
        """Takes the lock without waiting. Raises UserError: somebody has it (pid, host), or the disk refuses."""
        try:
            file = path.open("a+")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from error
        try:
            _lock(file)
            file.truncate(0)
            file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
            file.flush()
        except BlockingIOError as error:
            file.close()
            raise UserError(f"{path.parent} is in use by {_holder(path)}; wait for it, or stop it") from error
        except OSError as error:
            file.close()
            raise UserError(f"cannot lock {path}: {error.strerror}") from error
        return cls(file)

    def release(self) -> None:
        """Frees the lock; a second call does nothing."""
        self._file.close()


def is_held(path: Path) -> bool:
    """Whether a living process has the lock; a file that is missing is free. Changes nothing."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _lock(file: IO[str]) -> None:
    """Raises BlockingIOError when another process has the lock, and does not merely ask whether one has."""
    deadline = time.monotonic() + _PROBE_SECONDS
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PROBE_SECONDS / 10)


_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _close_copies() -> None:
    for lock in list(_held):
        lock.release()


# A flock lives as long as any copy of its descriptor: without this a forked child would hold a killed parent's lock.
os.register_at_fork(after_in_child=_close_copies)


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text())
    except json.JSONDecodeError:
        return "another process, which is just starting"
    return f"process {holder['pid']} on {holder['host']}"
