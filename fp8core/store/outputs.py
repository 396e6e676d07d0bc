"""Files that a user names and a command writes: refused before any work where they cannot be, written whole or not."""

import json
import os
from pathlib import Path
from typing import Any

from fp8core.durable import write_file
from fp8core.errors import UserError


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
