"""A small process that tidies up after a training that was killed, which nothing inside that training can do.

It waits for the end of a pipe that only the training holds open. A training that ends by itself dismisses it; else

    python -m flows.guardian server FILE    stops the temporary Prefect server, which writes to FILE
    python -m flows.guardian run FOLDER     marks the MLflow run of FOLDER as KILLED

is run, whatever killed the training. Waiting takes a bare interpreter, without our packages.
"""

import contextlib
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

# One byte is the goodbye; the end of the file without one is a death.
_WAIT = """
import os, sys
if not os.read(0, 1):
    os.execv(sys.executable, [sys.executable, "-m", "flows.guardian", *sys.argv[1:]])
"""
_SECONDS = 120
_SERVER_SECONDS = 5.0


class Guardian:
    """The waiting process, as its training sees it; leaving the block dismisses it."""

    def __init__(self, job: str, target: Path) -> None:
        # A session of its own: what ends the whole group of the training must leave it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WAIT, job, str(target.absolute())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )
        _waiting.add(self)

    @classmethod
    def over_server(cls, output: Path) -> Self:
        """Stops the server that writes to `output`. To be had before the server is started."""
        return cls("server", output)

    @classmethod
    def over_run(cls, folder: Path) -> Self:
        """Marks the MLflow run of a run's folder."""
        return cls("run", folder)

    def dismiss(self) -> None:
        """Let it go without its job; a second call does nothing."""
        assert self._process.stdin is not None, "it waits at a pipe"
        if not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # Somebody killed it.
                self._process.stdin.write(b"\n")
            self._process.stdin.close()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.dismiss()

    def forget(self) -> None:
        """Give up this copy of the pipe."""
        assert self._process.stdin is not None, "it waits at a pipe"
        self._process.stdin.close()


_waiting: weakref.WeakSet[Guardian] = weakref.WeakSet()


def _close_copies() -> None:
    for guardian in list(_waiting):
        guardian.forget()


# The end of the pipe is seen when its last copy is closed: without this a forked child would hold one.
os.register_at_fork(after_in_child=_close_copies)


def stop_server(output: Path) -> None:
    """Stop every process that writes to `output`, and remove the file."""
    writers = list(_writers(output))
    for process in writers:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    for process in psutil.wait_procs(writers, timeout=_SERVER_SECONDS)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    output.unlink(missing_ok=True)


def mark_run(folder: Path) -> None:
    """Say in MLflow that the training of a run's folder was killed, unless it goes on already."""
    from fp8core.errors import UserError
    from fp8core.store.run_directory import refuse_in_use
    from tasks.mark_killed import mark_killed

    with contextlib.suppress(UserError):
        refuse_in_use(folder)
        mark_killed(folder)


def _writers(output: Path) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        # Processes of others, and such as end meanwhile.
        with contextlib.suppress(psutil.AccessDenied, psutil.NoSuchProcess):
            if any(file.path == str(output) for file in process.open_files()):
                yield process


def main(job: str, target: str) -> None:
    """Do the job, or end without it after a while: a tracking server may not answer."""
    signal.alarm(_SECONDS)
    {"server": stop_server, "run": mark_run}[job](Path(target))


if __name__ == "__main__":
    main(*sys.argv[1:])
