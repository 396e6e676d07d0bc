"""A small process that marks the MLflow run of a training as KILLED when the training could not do so itself.

It waits, in a bare interpreter without any of our packages, until the training is gone. One that ended by itself has
said goodbye before; else this module is run in its place, on the folder of the run.
"""

import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from flows.environment import bound_mlflow_requests
from flows.lifeline import Lifeline, running
from tasks.mark_killed import mark_killed

_WAIT = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if not os.read(0, 1):
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
_GOODBYE = b"\n"
_PATIENCE_SECONDS = 120


class Guardian:
    """Watches over the training of a run's folder while the block lasts."""

    def __init__(self, folder: Path) -> None:
        self._job = running("flows.guardian", str(folder.absolute()))

    def __enter__(self) -> Self:
        self._lifeline = Lifeline(["-I", "-S", "-c", _WAIT, *self._job], subprocess.DEVNULL)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lifeline.end(_GOODBYE)


if __name__ == "__main__":
    signal.alarm(_PATIENCE_SECONDS)  # A tracking server may answer neither yes nor no.
    bound_mlflow_requests()
    mark_killed(Path(sys.argv[1]))
