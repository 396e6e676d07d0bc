"""The lock of a run's folder, held by one process at a time, and the folder's identity: moved, or copied?

A move keeps the inodes of a folder and its ledger, and every host that mounts a file system sees the same ones. A copy
has others. So has a folder that was moved to another file system or restored from a backup. `original_of` separates
these from a copy by looking for the original. Waiting processes import this module: it imports no torch.
"""

import fcntl
import json
import os
import socket
import time
import weakref
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from fp8core.durable import NotOwnFileError, read_stored, sole_file, stored_file, unwritable
from fp8core.errors import StoredFileError, UserError
from fp8core.store.layout import ARTIFACTS, DESCRIPTION, LEDGER

_PROBE_SECONDS = 0.1  # Longer than `is_held` ever holds the lock.


class RunLock:
    """An exclusive flock on a file that names its holder; the kernel frees it however that process ends."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        _held.add(self)

    @classmethod
    def acquire(cls, path: Path) -> "RunLock":
        """Take the lock without waiting. Raises UserError: a process holds it (pid, host), or the disk refuses."""
        try:
            file = FileIO(path, "a+", opener=sole_file)
        except OSError as error:
            raise unwritable(path, error) from error
        try:
            _lock(file)
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
        """Free the lock; a second call does nothing."""
        self._file.close()


def is_held(path: Path) -> bool:
    """True if a living process holds the lock; a missing file is free. Changes nothing.

    Raises StoredFileError: what lies there is no file.
    """
    try:
        with open(path, "rb", opener=stored_file) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except NotOwnFileError as error:
        raise StoredFileError(f"cannot read {path}: {error.strerror}") from error
    return False


def _lock(file: FileIO) -> None:
    """Raises BlockingIOError when another process holds the lock for longer than `is_held` does."""
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


# A flock lives as long as any copy of its descriptor: a forked child would hold the lock of a killed parent.
os.register_at_fork(after_in_child=_close_copies)


def _holder(path: Path) -> str:
    try:
        holder = json.loads(read_stored(path))
    except json.JSONDecodeError:
        return "another process, which is just starting"
    return f"process {holder['pid']} on {holder['host']}"


class FolderIdentity(BaseModel):
    """The host, path and inodes of a run's folder when a process opened it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(description="Name of the machine.")
    path: str = Field(description="Absolute path of the folder.")
    folder: int = Field(description="Inode of the folder.")
    ledger: int = Field(description="Inode of its ledger.")

    @classmethod
    def of(cls, folder: Path) -> "FolderIdentity":
        """Of a folder that holds a ledger. Raises OSError."""
        path = folder.absolute()
        return cls(
            host=socket.gethostname(),
            path=str(path),
            folder=path.stat().st_ino,
            ledger=(path / LEDGER).stat().st_ino,
        )

    def is_same_folder(self, other: "FolderIdentity") -> bool:
        """True if both are one folder under any name, or block-by-block copies of one file system."""
        return (self.folder, self.ledger) == (other.folder, other.ledger)


def original_of(recorded: FolderIdentity, folder: Path) -> str | None:
    """The path of the original of a copied folder; None for the original itself, also when it was moved or restored.

    A folder with another path and other inodes is a copy when the original is still at its path or beside either of
    them. It is one too when the original was on another machine, which cannot be searched.

    Args:
        recorded: the identity that the last process of the run wrote, in a file that is copied with the rest.
        folder: the run's folder now.
    """
    here, there = FolderIdentity.of(folder), Path(recorded.path)
    if here.is_same_folder(recorded):
        twin = _identity(there)
        copied = twin is not None and twin.is_same_folder(recorded) and not there.samefile(folder)
        return str(there) if copied else None
    if recorded.host != here.host:
        return f"{recorded.host}:{recorded.path}"
    if lies_at(there, folder):
        return str(there)
    for parent in dict.fromkeys((there.parent, Path(here.path).parent)):
        for neighbour in _folders(parent, recorded.folder):
            found = _identity(neighbour)
            if found is not None and found.is_same_folder(recorded):
                return str(neighbour)
    return None


def enclosing_run(path: Path) -> Path | None:
    """The folder of the run that a path is in, or is; None: of no run. The path need not exist."""
    place = path.resolve()
    for folder in (place, *place.parents):
        begun = os.path.lexists(folder / DESCRIPTION) and (folder / ARTIFACTS).is_dir()
        if begun or os.path.lexists(folder / LEDGER):
            return folder
    return None


def lies_at(path: Path, folder: Path) -> bool:
    """True if `path` is another folder with the run of `folder`: copies have equal run.json files."""
    try:
        equal = read_stored(path / DESCRIPTION) == read_stored(folder / DESCRIPTION)
        return equal and not path.samefile(folder)
    except OSError:
        return False


def _identity(folder: Path) -> FolderIdentity | None:
    try:
        return FolderIdentity.of(folder)
    except OSError:
        return None


def _folders(parent: Path, inode: int) -> Iterator[Path]:
    try:
        with os.scandir(parent) as entries:
            yield from (Path(entry.path) for entry in entries if entry.inode() == inode)
    except OSError:
        return
