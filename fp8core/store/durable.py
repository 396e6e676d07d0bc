"""Files that are whole or absent after a kill or a power cut.

A write goes to a temporary file in the target's folder, is fsynced, renamed over the target, and the folder is
fsynced: when `write_file` returns the content is durable, before that the previous content (or none) is.
"""

import os
import re
import shutil
import uuid
from pathlib import Path

from fp8core.errors import UserError

_TEMPORARY = re.compile(r"^\..+\.[0-9a-f]{32}\.tmp$")


def sync_path(path: Path) -> None:
    """Makes a file's content durable, or renames, creations and removals in a folder. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Creates a folder and its missing parents, durably. Raises UserError naming the folder that cannot be made."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    try:
        folder.mkdir(exist_ok=True)
        sync_path(folder.parent)
    except OSError as error:
        raise UserError(f"cannot create the folder {folder}: {error.strerror}") from error


def write_file(path: Path, data: bytes) -> None:
    """Writes or replaces a file, durably and atomically. Raises UserError naming the path, and leaves nothing."""
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_path(path.parent)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def ensure_file(path: Path, data: bytes) -> None:
    """Makes a file hold `data`, durably: one that does is left alone, any other is replaced. Raises UserError."""
    try:
        intact = path.read_bytes() == data
        if intact:
            # Its writer may have been killed between the rename and this.
            sync_path(path.parent)
    except OSError:
        # Missing or unreadable alike: writing repairs it, or says why it cannot.
        intact = False
    if not intact:
        write_file(path, data)


def partial_folder(folder: Path) -> Path:
    """Where a folder is while it is made or removed: what is found under this name counts for nothing."""
    return folder.with_name(f".{folder.name}.partial")


def remove_folder(folder: Path) -> None:
    """Removes a folder and all in it: a kill on the way leaves a `partial_folder`, never half of it. Raises OSError."""
    shutil.rmtree(folder.rename(partial_folder(folder)))


def sweep(folder: Path) -> list[Path]:
    """Removes the temporary files that killed writers left under a folder, and returns them sorted.

    Only for the holder of the run's lock, and before it writes: a temporary file in use would go too.
    """
    orphans = [
        Path(parent) / name for parent, _, names in os.walk(folder) for name in names if _TEMPORARY.fullmatch(name)
    ]
    for orphan in orphans:
        orphan.unlink()
    return sorted(orphans)
