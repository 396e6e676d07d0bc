"""A small process that marks the MLflow run of a training as KILLED when the training could not do so itself.

It waits, in a bare interpreter without any of our packages, until the training is gone. One that ended by itself has
sent an exit message before; else this module runs next in that process, on the folder of the run.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from flows.environment import bound_mlflow_requests, naming_store
from flows.tracking.record import is_settled, mark_killed, read_record
from fp8core.end_with_parent import TiedProcess, running

_WAIT = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if not os.read(0, 1):
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
_GOODBYE = b"\n"
_PATIENCE_SECONDS = 120
_ATTEMPTS = 10


class Guardian:
    """Watches the training of a run's folder while the block lasts."""

    def __init__(self, folder: Path, store: str | None = None) -> None:
        """`store` is the tracking store of the user's configuration; None: that of the environment."""
        self._job = running("flows.tracking.guardian", str(folder.absolute()))
        self._environment = None if store is None else naming_store(store)

    def __enter__(self) -> Self:
        arguments = ["-I", "-S", "-c", _WAIT, *self._job]
        self._lifeline = TiedProcess(arguments, subprocess.DEVNULL, environment=self._environment)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lifeline.end(_GOODBYE)


if __name__ == "__main__":
    signal.alarm(_PATIENCE_SECONDS)  # A tracking server may never answer.
    bound_mlflow_requests()
    folder = Path(sys.argv[1])
    for _ in range(_ATTEMPTS):
        # The pipe of a dying process may close before its lock and its database do.
        if mark_killed(folder) or (record := read_record(folder)) is None or is_settled(record):
            break
        time.sleep(1)
