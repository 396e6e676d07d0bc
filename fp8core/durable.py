"""Files that survive a kill or a power cut: whole files, files of lines, and their digests.

`write_file` fsyncs a temporary file, renames it over the target and fsyncs the folder. A file of lines only grows, and
each line is durable before the next. So only the last one can be torn.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from fp8core.errors import StoredFileError, UserError

PRIVATE = 0o700
"""Mode of a run's folder and of its missing parents: settings and answers may hold what others are not to read."""

Report = Callable[[int], None]
"""Called with the number of bytes that were read since its last call."""

_TEMPORARY = re.compile(r"^\..+\.[0-9a-f]{32}\.tmp$")
_COPY_BLOCK = 1 << 22


def unwritable(path: Path, error: OSError) -> UserError:
    if isinstance(error, IsADirectoryError):
        return StoredFileError(f"cannot write {path}: a folder lies in its place; move that elsewhere, then go on")
    return UserError(f"cannot write {path}: {write_problem(error)}")


def write_problem(error: Exception) -> str:
    """The reason of a failed write without its path, and what helps; safetensors has it in its text alone."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return f"{reason}; free space there, then go on" if os.strerror(errno.ENOSPC) in reason else reason


def sync_path(path: Path) -> None:
    """Make a file's content durable, or renames, creations and removals in a folder. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Create a folder and its missing parents, durably. Raises UserError naming the folder that cannot be made.

    `mode` is that of every folder made here, less the process's umask; `PRIVATE` keeps other users out.
    """
    if folder.is_dir():
        return
    make_folder(folder.parent, mode)
    try:
        folder.mkdir(mode, exist_ok=True)
        sync_path(folder.parent)
    except OSError as error:
        raise UserError(f"cannot create the folder {folder}: {error.strerror}") from error


def check_writable(folder: Path) -> None:
    """Raises UserError, as `make_folder` would, on a folder that cannot be made or written to. Leaves nothing."""
    existing = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    try:
        # By its permissions root could write in /proc, too. Readers ignore this name, if we are killed here.
        os.rmdir(tempfile.mkdtemp(".partial", ".", existing))
    except OSError as error:
        raise UserError(f"cannot write in the folder {existing}: {error.strerror}") from error


def write_file(path: Path, data: bytes) -> None:
    """Write or replace a file, durably and atomically. Raises UserError with the path, and then leaves nothing."""
    with _replacing(path) as file:
        file.write(data)


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """The new content of a file, which takes its name when the block ends well (errors: `write_file`)."""
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        try:
            with temporary.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_path(path.parent)
    except OSError as error:
        raise unwritable(path, error) from error


def ensure_file(path: Path, data: bytes) -> None:
    """Write `data` durably, unless the file holds it already. Raises UserError."""
    with suppress(OSError):  # Missing or unreadable: it is replaced, or the error is raised there.
        if path.read_bytes() == data:
            return
    write_file(path, data)


def ensure_copy(path: Path, source: Path, digest: str) -> None:
    """Copy a file of this SHA-256 durably, in pieces, unless it is there already. Raises UserError with the path."""
    with suppress(OSError):
        if file_digest(path) == digest:
            return
    with _replacing(path) as file, source.open("rb") as content:
        shutil.copyfileobj(content, file, _COPY_BLOCK)


def partial_folder(folder: Path) -> Path:
    """The name of a folder while it is written or removed; readers ignore it."""
    return folder.with_name(f".{folder.name}.partial")


def remove_folder(folder: Path) -> None:
    """Remove a folder; a kill leaves a `partial_folder`, never half of the folder itself. Raises OSError."""
    shutil.rmtree(folder.rename(partial_folder(folder)))


def sweep(folder: Path, unchanged_seconds: float = 0.0) -> None:
    """Remove the temporary files that killed writers left under a folder.

    `unchanged_seconds`: where living writers may be at work, since when a file must be as it is.
    """
    before = time.time() - unchanged_seconds
    for path in folder.rglob(".*.tmp"):
        if _TEMPORARY.fullmatch(path.name) and path.stat().st_mtime <= before:
            path.unlink()


def read_lines(path: Path) -> tuple[list[bytes], int]:
    """The whole lines of a file, and the offset where the last of them ends. Raises OSError."""
    *lines, _ = path.read_bytes().split(b"\n")
    # After a power cut a file can have its new length and zeros for content.
    if lines and b"\0" in lines[-1]:
        lines.pop()
    return lines, sum(len(line) + 1 for line in lines)


def append_durably(file: FileIO, data: bytes) -> None:
    """Append whole lines durably. Raises OSError (a full disk), and then appends nothing."""
    end = os.fstat(file.fileno()).st_size
    try:
        count = 0
        while count < len(data):
            count += file.write(data[count:])
        os.fsync(file.fileno())
    except OSError:
        # Part of a line in the middle would make the whole file unreadable.
        file.truncate(end)
        raise


def file_digest(path: Path, report: Report | None = None) -> str:
    """SHA-256 (64 hex digits) of a file of any size. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, "sha256")
    if report is not None:
        report(path.stat().st_size)
    return digest.hexdigest()


def folder_digest(folder: Path, report: Report | None = None) -> str:
    """SHA-256 (64 hex digits) over the sorted (relative path, SHA-256) of a folder's files. Raises OSError."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if not path.is_dir()):
        digest.update(f"{path.relative_to(folder).as_posix()}\n{file_digest(path, report)}\n".encode())
    return digest.hexdigest()


class Output:
    def __init__(self, option: str, path: str) -> None:
        self.path = Path(path)
        self.label = f"{option} {path}"
        self.target = self.path.absolute()
        if not self.target.parent.is_dir() or not os.access(self.target.parent, os.W_OK | os.X_OK):
            raise UserError(f"{self.label}: cannot be written; name a file in a folder that exists and can be written")
        if self.target.exists() and not self.target.is_file():
            raise UserError(f"{self.label}: cannot be written, because it is no file; name a file")

    def write(self, content: bytes) -> None:
        write_file(self.target, content)

    def write_json(self, content: Any) -> None:
        self.write(f"{json.dumps(content, indent=2)}\n".encode())
