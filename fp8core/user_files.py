"""Files that a user names: those that a command reads, and those that it writes.

Only regular files are read, up to a stated size. A pipe would wait for a writer, and a device need not end. A regular
file may hold more than memory does: every caller states what it can use.

An output never goes into a run's folder, except as a file that the run itself keeps there. It never goes through a
link, and it replaces only a file that this program wrote, which is known by its content. `--force` lifts the last of
these, not the others. Outputs are written aside and renamed (`store.durable`).

Commands check their outputs before any work, so this module imports nothing large.
"""

import errno
import json
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from fp8core.errors import UserError
from fp8core.store.durable import read_stored, write_file
from fp8core.store.lock import enclosing_run

LARGEST_JSON = 128 * 2**20
"""Bytes of a JSON file of a checkpoint. The largest tokenizers have some 35 MB."""
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

_MARK = "fp8-grpo"
PAGE_MARK = f'<meta name="generator" content="{_MARK}">'
"""In the head of every page."""
PICTURE_METADATA = {"Software": _MARK}
"""Of every PNG; matplotlib writes it before the pixels."""

_PAGE = re.compile(rb"<!DOCTYPE html>[^\0]{0,200}" + re.escape(PAGE_MARK).encode())
_PICTURE = re.compile(rb"\x89PNG\r\n\x1a\n.{0,64}Software\0" + _MARK.encode(), re.DOTALL)


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
        raise UserError(f"{path}: is {_KINDS[stat.S_IFMT(mode)]}; only regular files are read")
    return os.fdopen(descriptor, "rb")


def read_input(path: Path, largest: int) -> bytes:
    """The content of a regular file.

    Raises:
        UserError: naming the file: it cannot be read, is no regular file, or has more than `largest` bytes.
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
    """A UTF-8 file of at most `LARGEST_JSON` bytes; raises UserError as `read_input` does, and on another encoding."""
    try:
        return read_input(path, LARGEST_JSON).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}") from error


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
        raise UserError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


@dataclass(frozen=True)
class Kind:
    """A kind of output.

    Attributes:
        name: in words.
        is_ours: whether this program wrote a file of such content.
        kept_as: the file in a run's own folder that is of this kind; None: there is none.
        suffix: ending of the file's name; None: any.
    """

    name: str
    is_ours: Callable[[bytes], bool]
    kept_as: str | None = None
    suffix: str | None = None


def json_output(*keys: str, kept_as: str | None = None) -> Kind:
    """The kind of a JSON object that begins with these keys."""

    def is_ours(content: bytes) -> bool:
        try:
            value = json.loads(content)
        except (ValueError, RecursionError):
            return False
        return isinstance(value, dict) and tuple(value)[: len(keys)] == keys

    return Kind(f"a JSON file that begins with {', '.join(keys)}", is_ours, kept_as)


PAGE = Kind(f"a page of {_MARK}", lambda content: _PAGE.match(content) is not None, "report.html")
PICTURE = Kind(f"a picture of {_MARK}", lambda content: _PICTURE.match(content) is not None, suffix=".png")
SUMMARY = json_output("run", "mlflow_run_id", kept_as="summary.json")
EVALUATION = json_output("target", "step", "weights_digest")


class Output:
    """A file that a command is to write."""

    def __init__(self, option: str, path: str, kind: Kind) -> None:
        """`option` names the file in errors. `path` is relative to the present working directory."""
        self.shown = Path(path)
        self.named = f"{option} {path}"
        self._kind = kind
        folder = self.shown.absolute().parent
        # The folder itself may be reached through links; what it is counts, not how it is called.
        self.target = folder.resolve() / self.shown.name

    def refuse_place(self) -> None:
        """Raises UserError: nothing can be written there, or nothing may be."""
        if self.target.is_symlink():
            raise UserError(f"{self.named}: is a symbolic link; name the file itself")
        folder = self.target.parent
        if not folder.is_dir():
            raise UserError(f"{self.named}: cannot be written; name a file in a folder that exists")
        if not os.access(folder, os.W_OK | os.X_OK):
            reason = errno.EROFS if os.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES
            raise UserError(f"{self.named}: cannot be written: {os.strerror(reason)}; name a file in another folder")
        if self.target.exists() and not self.target.is_file():
            found = _KINDS[stat.S_IFMT(self.target.stat().st_mode)]
            raise UserError(f"{self.named}: cannot be written, because it is {found}; name a file")
        if self._kind.suffix is not None and self.target.suffix.lower() != self._kind.suffix:
            raise UserError(f"{self.named}: is written as {self._kind.suffix}; give the file this ending")
        if self._kind.kept_as != self.target.name or enclosing_run(folder.parent) is not None:
            refuse_in_run(self.named, self.target)

    def refuse_other(self) -> None:
        """Raises UserError: a file is there that this program did not write."""
        try:
            content = read_stored(self.target)
        except FileNotFoundError:
            return
        except OSError as error:
            raise UserError(f"{self.named}: cannot be read: {error.strerror}") from error
        if content and not self._kind.is_ours(content):
            raise UserError(
                f"{self.named}: the file there is not {self._kind.name}; name another, or replace it with --force"
            )

    def write(self, content: bytes) -> None:
        """Write or replace the file, durably and atomically. Raises UserError, also where `refuse_place` does."""
        self.refuse_place()
        write_file(self.target, content)

    def write_json(self, content: Any) -> None:
        """`write` a value as indented JSON."""
        self.write(f"{json.dumps(content, indent=2)}\n".encode())


def refuse_in_run(named: str, path: Path) -> None:
    """Raises UserError: a file or folder that a command would make lies in the folder of a run."""
    run = enclosing_run(path)
    if run is not None:
        raise UserError(f"{named}: lies in the folder of the run {run}, which the run alone writes; name another place")
