"""Files that a user names and a command reads.

Only regular files are read, up to a stated size. A pipe would wait for a writer, and a device need not end. A regular
file may hold more than memory does: every caller states what it can use. Outputs are in `fp8core.store.outputs`.
"""

import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

from fp8core.errors import UserError

LARGEST_USER_JSON = 128 * 2**20
"""Bytes of a JSON file of a checkpoint. The largest tokenizers have some 35 MB."""
FILE_TYPES = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
"""Type of a file that is not regular -> its name."""


def open_input(path: Path) -> BufferedReader:
    """Open a regular file to read.

    Raises:
        OSError: as the file system says.
        UserError: it is no regular file.
    """
    # A pipe without a writer opens at once in this mode, and a regular file does not know it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise UserError(f"{path}: is {FILE_TYPES[stat.S_IFMT(mode)]}; only regular files are read")
    return os.fdopen(descriptor, "rb")


def read_input(path: Path, largest: int) -> bytes:
    """The content of a regular file.

    Raises UserError: naming the file: it cannot be read, is no regular file, or has more than `largest` bytes.
    """
    try:
        with open_input(path) as file:
            content = file.read(largest + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > largest:
        raise UserError(f"{path}: more than {largest:,} bytes, which is the most that is read")
    return content


def read_text(path: Path) -> str:
    """A UTF-8 file of at most `LARGEST_USER_JSON` bytes; raises UserError as `read_input`, and on another encoding."""
    try:
        return read_input(path, LARGEST_USER_JSON).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}") from error


_KINDS = {
    type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list",
    dict: "an object",
}  # fmt: skip


def json_kind(value: object) -> str:
    """Name of a value's type in JSON; of another type, as a dataset of the hub may have, its name in Python."""
    return next((_KINDS[kind] for kind in type(value).__mro__ if kind in _KINDS), type(value).__name__)


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; a missing, unreadable or malformed file is a UserError that names it."""
    text = read_text(path)
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" at")
        raise UserError(f"{path}: line {error.lineno}, column {error.colno}: not JSON: {reason}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, found {json_kind(content)}")
    return content
