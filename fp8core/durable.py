"""Files that survive a kill or a power cut: whole files, files of lines, their digests, and the time they take.

`write_file` writes and fsyncs a temporary file in the target's folder, renames it over the target and fsyncs the
folder. When it returns, the new content is durable; before that the previous content (or none) is.

A file of lines only grows, and each line is durable before the next. A line counts once it ends with a newline. So only
the last one can be torn: by a kill or a power cut in the middle of an append that was never acknowledged.

A run's folder may be somebody else's. So `stored_file` opens its files, and `sole_file` those that change in place.
Both refuse a link, and neither waits for a FIFO or a device.
"""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from fp8core.errors import StoredFileError, UserError

Line = tuple[int, bytes]
"""Byte offset and content without its newline."""

PRIVATE = 0o700
"""Mode of a run's folder and of its missing parents: settings and answers may hold what others are not to read."""

Report = Callable[[int], None]
"""Called with the number of bytes that were read since its last call."""

_TEMPORARY = re.compile(r"^\..+\.[0-9a-f]{32}\.tmp$")
_BLOCK, _DIGEST_BLOCK, _COPY_BLOCK = 1 << 16, 1 << 18, 1 << 22

# Folders whose names this process made durable: each costs one fsync, not one for each file that is written there.
_durable_folders = set[Path]()
_NOT_SYNCED = (errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.EROFS)


class NotOwnFileError(OSError):
    """A link, a FIFO, a device or a folder where a file belongs, or a file that has a second name."""


def stored_file(path: str | Path, flags: int) -> int:
    """The `opener` of `open` for a file of a run. Raises OSError.

    A link, a FIFO or a device is refused, and nothing waits for its writer. `user_files` opens files of the user's own.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        found = {errno.ELOOP: "a symbolic link", errno.ENXIO: "a FIFO, a socket or a device", errno.EISDIR: "a folder"}
        if error.errno in found:
            raise _other(path, found[error.errno]) from error
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _other(path, "a folder" if stat.S_ISDIR(mode) else "a FIFO, a socket or a device")
    return descriptor


def _other(path: str | Path, found: str) -> NotOwnFileError:
    return NotOwnFileError(errno.EINVAL, f"it is {found}, not a file; move it elsewhere", str(path))


def sole_file(path: str | Path, flags: int) -> int:
    """`stored_file` for a file that is changed where it is, and so must have no other name. Raises OSError."""
    descriptor = stored_file(path, flags)
    names = os.fstat(descriptor).st_nlink
    if names > 1:
        os.close(descriptor)
        problem = f"the file has {names} names (hard links), and each would change; put a copy in its place"
        raise NotOwnFileError(errno.EMLINK, problem, str(path))
    return descriptor


def read_stored(path: Path) -> bytes:
    """The content of a file of a run. Raises OSError."""
    with open(path, "rb", opener=stored_file) as file:
        return file.read()


def refuse_link(path: Path) -> None:
    """Raises StoredFileError: a run's file or folder is a link, which leads out of the run's folder."""
    if path.is_symlink():
        raise StoredFileError(f"{path}: it is a symbolic link; a run changes only what lies in its own folder")


def unwritable(path: Path, error: OSError) -> UserError:
    """The error for a file that cannot be written: StoredFileError where the fault lies in what is in its place."""
    if isinstance(error, NotOwnFileError):
        return StoredFileError(f"cannot write {path}: {error.strerror}")
    if isinstance(error, IsADirectoryError):
        return StoredFileError(f"cannot write {path}: a folder lies in its place; move that elsewhere, then go on")
    return UserError(f"cannot write {path}: {why_not_written(error)}")


def why_not_written(error: Exception) -> str:
    """The reason of a failed write without its path, and what helps; safetensors has the number in its text alone."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    if isinstance(error, OSError):
        number, reason = error.errno, error.strerror or str(error)
    else:
        number = None if found is None else int(found[1])
        reason = str(error) if number is None else os.strerror(number)
    return f"{reason}; free space there, then go on" if number == errno.ENOSPC else reason


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
        if folder not in _durable_folders:
            # Its maker may have been killed between the creation and this.
            _sync_name(folder)
        return
    make_folder(folder.parent, mode)
    try:
        folder.mkdir(mode, exist_ok=True)
        sync_path(folder.parent)
    except OSError as error:
        raise UserError(f"cannot create the folder {folder}: {error.strerror}") from error
    _durable_folders.add(folder)


def _sync_name(folder: Path) -> None:
    """Make the name of a folder that is there durable. Raises UserError."""
    try:
        # The name of a mount, or of a link to one, lies in a file system that need not take part.
        if folder.stat().st_dev == folder.parent.stat().st_dev:
            sync_path(folder.parent)
    except OSError as error:
        # In a folder that this process may not read, another user made it. Some file systems sync no folders.
        if error.errno not in _NOT_SYNCED:
            raise UserError(f"cannot make the name of the folder {folder} durable: {error.strerror}") from error
    _durable_folders.add(folder)


def refuse_unwritable(folder: Path) -> None:
    """Raises UserError, as `make_folder` would, on a folder that cannot be made or written to. Leaves nothing."""
    found = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not found.is_dir():
        raise UserError(f"cannot create the folder {found}: {os.strerror(errno.EEXIST)}")
    try:
        # By its permissions root could write in /proc, too. Readers ignore this name, if we are killed here.
        os.rmdir(tempfile.mkdtemp(".partial", ".", found))
    except OSError as error:
        raise UserError(f"cannot write in the folder {found}: {error.strerror}") from error


def write_file(path: Path, data: bytes) -> None:
    """Write or replace a file, durably and atomically. Raises UserError with the path, and then leaves nothing."""
    with _replaced(path) as file:
        file.write(data)


@contextmanager
def _replaced(path: Path) -> Iterator[BinaryIO]:
    """The new content of a file, which takes its name when the block ends well (errors: `write_file`)."""
    make_folder(path.parent)
    try:
        temporary, content = _temporary(path)
        try:
            with content as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                # Before the file is closed, which would leave it to `sweep`.
                temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_path(path.parent)
    except OSError as error:
        raise unwritable(path, error) from error


def _temporary(path: Path) -> tuple[Path, BinaryIO]:
    """A new file beside `path`, locked (flock) until it is closed, or its writer is killed. Raises OSError."""
    while True:
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        file = temporary.open("x+b")  # NFS locks no file that is only written.
        with suppress(OSError):  # A file system without locks can hold no run, so that nothing is swept there.
            fcntl.flock(file, fcntl.LOCK_SH)
        if os.fstat(file.fileno()).st_nlink:
            return temporary, file
        file.close()  # A sweep came before the lock.


def ensure_file(path: Path, data: bytes) -> None:
    """Write `data` durably, unless the file holds it already. Raises UserError."""
    try:
        intact = read_stored(path) == data
        if intact:
            # Its writer may have been killed between the rename and this.
            sync_path(path.parent)
    except OSError:
        # Missing or unreadable: `write_file` replaces it, or raises.
        intact = False
    if not intact:
        write_file(path, data)


def ensure_copy(path: Path, source: Path, digest: str) -> None:
    """Copy a file of this SHA-256 durably, in pieces, unless it is there already. Raises UserError with the path."""
    try:
        if file_digest(path) == digest:
            # Its writer may have been killed between the rename and this.
            sync_path(path.parent)
            return
    except OSError:
        pass  # Missing or unreadable: it is replaced, or the error is raised there.
    with _replaced(path) as file, open(source, "rb", opener=stored_file) as content:
        shutil.copyfileobj(content, file, _COPY_BLOCK)


def partial_folder(folder: Path) -> Path:
    """The name of a folder while it is written or removed; readers ignore it."""
    return folder.with_name(f".{folder.name}.partial")


def remove_folder(folder: Path) -> None:
    """Remove a folder; a kill leaves a `partial_folder`, never half of the folder itself. Raises OSError."""
    shutil.rmtree(folder.rename(partial_folder(folder)))


def temporary_files(folder: Path) -> list[Path]:
    """The temporary files under a folder, sorted: in use, or left by killed writers."""
    return sorted(
        Path(parent) / name for parent, _, names in os.walk(folder) for name in names if _TEMPORARY.fullmatch(name)
    )


def sweep(folder: Path) -> list[Path]:
    """Remove the temporary files that killed writers left under a folder; returns them sorted.

    Not every writer holds the run's lock: one of another process goes on. Files that another user owns stay.
    """
    return [path for path in temporary_files(folder) if _remove_abandoned(path)]


def _remove_abandoned(temporary: Path) -> bool:
    try:
        with open(temporary, "r+b", opener=stored_file) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            temporary.unlink()
    except NotOwnFileError:
        temporary.unlink(missing_ok=True)
    except OSError:
        # It took its name meanwhile, is being written, or is another user's. No run waits for its end.
        return False
    return True


def whole_end(file: FileIO) -> int:
    """Bytes of the file up to the end of its last whole line. Raises OSError."""
    pieces = lines_backward(file, os.fstat(file.fileno()).st_size)
    end, _ = next(pieces)
    last, line = next(pieces, (0, b""))
    # After a power cut a file can have its new length and zeros for content.
    return last if b"\0" in line else end


def read_lines(path: Path) -> list[bytes]:
    """The whole lines of a file. Raises OSError."""
    with FileIO(path, opener=stored_file) as file:
        return [line for _, line in lines_forward(file, 0, whole_end(file))]


def lines_forward(file: FileIO, begin: int, end: int) -> Iterator[Line]:
    """The whole lines between two offsets, read block by block as they are consumed. Raises OSError."""
    rest, position = b"", begin
    while position < end:
        block = os.pread(file.fileno(), min(_BLOCK, end - position), position)
        if not block:
            return
        *lines, rest_after = (rest + block).split(b"\n")
        offset = position - len(rest)
        for line in lines:
            yield offset, line
            offset += len(line) + 1
        rest, position = rest_after, position + len(block)


def lines_backward(file: FileIO, end: int) -> Iterator[Line]:
    """The lines before an offset from the last back, read block by block as they are consumed. Raises OSError.

    The first item is what follows the last newline: empty, or the torn line.
    """
    rest = b""
    while end > 0:
        start = max(0, end - _BLOCK)
        first, *others = (os.pread(file.fileno(), end - start, start) + rest).split(b"\n")
        offset = end + len(rest)
        for piece in reversed(others):
            offset -= len(piece)
            yield offset, piece
            offset -= 1
        rest, end = first, start
    yield 0, rest


def append_durably(file: FileIO, data: bytes) -> None:
    """Append whole lines durably. Raises OSError (a full disk), and then appends nothing."""
    end = os.fstat(file.fileno()).st_size
    try:
        written = 0
        while written < len(data):
            written += file.write(data[written:])
        os.fsync(file.fileno())
    except OSError:
        # Part of a line in the middle would make the whole file unreadable.
        file.truncate(end)
        raise


def file_digest(path: Path, report: Report | None = None) -> str:
    """SHA-256 (64 hex digits) of a file of any size. Raises OSError."""
    digest, block = hashlib.sha256(), memoryview(bytearray(_DIGEST_BLOCK))
    with open(path, "rb", buffering=0, opener=stored_file) as file:
        while read := file.readinto(block):
            digest.update(block[:read])
            if report is not None:
                report(read)
    return digest.hexdigest()


def folder_digest(folder: Path, report: Report | None = None) -> str:
    """SHA-256 (64 hex digits) over the sorted (relative path, SHA-256) of a folder's files.

    Raises OSError, also for what is neither a file nor a folder.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()):
        digest.update(f"{path.relative_to(folder).as_posix()}\n{file_digest(path, report)}\n".encode())
    return digest.hexdigest()


class _ThreadTime(threading.local):
    seconds = 0.0
    running = False


_thread_time = _ThreadTime()


def io_seconds() -> float:
    """Seconds that this thread has spent in `io_timer` so far."""
    return _thread_time.seconds


@contextmanager
def io_timer() -> Iterator[None]:
    """Count a block, or a decorated function, as time for stored files; nested blocks count once."""
    if _thread_time.running:
        yield
        return
    _thread_time.running, began = True, time.perf_counter()
    try:
        yield
    finally:
        _thread_time.running = False
        _thread_time.seconds += time.perf_counter() - began
