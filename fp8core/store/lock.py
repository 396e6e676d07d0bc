"""The lock of a run's folder, held by one process at a time. Waiting processes import it: it imports no torch."""

import fcntl
import json
import os
import socket
import weakref
from io import FileIO
from pathlib import Path

from fp8core.durable import unwritable
from fp8core.errors import UserError


class RunLock:
    """An exclusive flock on a file that names its holder; the kernel frees it however that process ends."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        _own_locks.add(self)

    @classmethod
    def acquire(cls, path: Path) -> "RunLock":
        """Take the lock without waiting. Raises UserError: a process holds it (pid, host), or the disk refuses."""
        try:
            file = FileIO(path, "a+")
        except OSError as error:
            raise unwritable(path, error) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate(0)
            file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        except BlockingIOError as error:
            file.close()
            raise UserError(f"{path.parent} is in use by {_holder(path)}; wait for it, or stop it") from error
        except OSError as error:
            file.close()
            raise UserError(f"cannot lock {path}: {error.strerror}") from error
        return cls(file)

    def release(self) -> None:
        self._file.close()


def has_owner(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


_own_locks: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _close_copies() -> None:
    for lock in list(_own_locks):
        lock.release()


# A flock lives as long as any copy of its descriptor: a forked child would hold the lock of a killed parent.
os.register_at_fork(after_in_child=_close_copies)


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_bytes())
    except json.JSONDecodeError:
        return "another process, which is just starting"
    return f"process {holder['pid']} on {holder['host']}"
