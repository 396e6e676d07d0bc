"""Digests of files and folders of any size, read piece by piece."""

import hashlib
from collections.abc import Callable
from pathlib import Path

Report = Callable[[int], None]
"""Told how many more bytes were read."""

_PIECE = 1 << 18


def silent(read: int) -> None:
    """The report of who does not want one."""


def file_digest(path: Path, report: Report = silent) -> str:
    """SHA-256 (64 hex digits) of a file. Raises OSError."""
    digest, piece = hashlib.sha256(), memoryview(bytearray(_PIECE))
    with path.open("rb", buffering=0) as file:
        while read := file.readinto(piece):
            digest.update(piece[:read])
            report(read)
    return digest.hexdigest()


def folder_digest(folder: Path, report: Report = silent) -> str:
    """SHA-256 (64 hex digits) over the sorted (relative path, SHA-256) of a folder's files. Raises OSError."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder).as_posix()}\n{file_digest(path, report)}\n".encode())
    return digest.hexdigest()
