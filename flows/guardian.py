"""A small process that marks the MLflow run of a training as KILLED when the training could not do so itself.

It waits, in a bare interpreter without any of our packages, until the training is gone. One that ended by itself has
said goodbye before; else `python -m flows.guardian FOLDER` takes its place.
"""

import contextlib
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from flows.lifeline import Lifeline

_WAIT = """
import os, sys
if not os.read(0, 1):
    os.execv(sys.executable, [sys.executable, "-m", "flows.guardian", sys.argv[1]])
"""
_GOODBYE = b"\n"
_PATIENCE_SECONDS = 120


class Guardian:
    """Watches over the training of a run's folder while the block lasts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()

    def __enter__(self) -> Self:
        self._lifeline = Lifeline(["-I", "-S", "-c", _WAIT, str(self._folder)], subprocess.DEVNULL)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lifeline.end(_GOODBYE)


def mark(folder: Path) -> None:
    """Say in MLflow that the training of a run's folder was killed, unless it goes on already."""
    from fp8core.errors import UserError
    from fp8core.store.run_directory import refuse_in_use
    from tasks.mark_killed import mark_killed

    with contextlib.suppress(UserError):
        refuse_in_use(folder)
        mark_killed(folder)


if __name__ == "__main__":
    signal.alarm(_PATIENCE_SECONDS)  # A tracking server may never answer.
    mark(Path(sys.argv[1]))
