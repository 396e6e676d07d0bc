"""Files that a user names and a command writes.

An output never goes into a run's folder, except as a file that the run itself keeps there. It never goes through a
link, and it replaces only a file that this program wrote, which is known by its content. `--force` lifts the last of
these, not the others. Outputs are written aside and renamed (`fp8core.durable`).

Commands check their outputs before any work, so this module imports nothing large.
"""

import errno
import json
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8core.durable import read_stored, write_file
from fp8core.errors import UserError
from fp8core.store.lock import enclosing_run
from fp8core.user_files import FILE_TYPES

_MARK = "fp8-grpo"
PAGE_MARK = f'<meta name="generator" content="{_MARK}">'
"""In the head of every page."""

_PAGE = re.compile(rb"<!DOCTYPE html>[^\0]{0,200}" + re.escape(PAGE_MARK).encode())


@dataclass(frozen=True)
class Kind:
    """A kind of output; `is_ours` is whether this program wrote a file of such content.

    `kept_as` is the file in a run's own folder that is of this kind.
    """

    name: str
    is_ours: Callable[[bytes], bool]
    kept_as: str | None = None


def json_output(*keys: str, kept_as: str | None = None) -> Kind:
    def is_ours(content: bytes) -> bool:
        try:
            value = json.loads(content)
        except (ValueError, RecursionError):
            return False
        return isinstance(value, dict) and tuple(value)[: len(keys)] == keys

    return Kind(f"a JSON file that begins with {', '.join(keys)}", is_ours, kept_as)


PAGE = Kind(f"a page of {_MARK}", lambda content: _PAGE.match(content) is not None, "report.html")
SUMMARY = json_output("run", "mlflow_run_id", kept_as="summary.json")
EVALUATION = json_output("target", "step", "weights_digest")


class Output:
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
            found = FILE_TYPES[stat.S_IFMT(self.target.stat().st_mode)]
            raise UserError(f"{self.named}: cannot be written, because it is {found}; name a file")
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
        self.write(f"{json.dumps(content, indent=2)}\n".encode())


def refuse_in_run(named: str, path: Path) -> None:
    """Raises UserError: a file or folder that a command would make lies in the folder of a run."""
    run = enclosing_run(path)
    if run is not None:
        raise UserError(f"{named}: lies in the folder of the run {run}, which the run alone writes; name another place")
