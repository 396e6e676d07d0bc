"""Files that a user names and a command writes: refused before any work where they cannot be, written whole or not."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from fp8core.durable import write_file
from fp8core.errors import UserError


class Output:
    def __init__(self, option: str, path: str) -> None:
        """`option` names the file in errors. Raises UserError: nothing can be written there."""
        self.shown = Path(path)
        self.named = f"{option} {path}"
        self.target = self.shown.absolute()
        folder = self.target.parent
        if not folder.is_dir():
            raise UserError(f"{self.named}: cannot be written; name a file in a folder that exists")
        if not os.access(folder, os.W_OK | os.X_OK):
            reason = errno.EROFS if os.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES
            raise UserError(f"{self.named}: cannot be written: {os.strerror(reason)}; name a file in another folder")
        if self.target.exists() and not stat.S_ISREG(self.target.stat().st_mode):
            raise UserError(f"{self.named}: cannot be written, because it is no file; name a file")

    def write(self, content: bytes) -> None:
        """Write or replace the file, durably and atomically. Raises UserError."""
        write_file(self.target, content)

    def write_json(self, content: Any) -> None:
        self.write(f"{json.dumps(content, indent=2)}\n".encode())
