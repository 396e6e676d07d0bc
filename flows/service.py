"""The servers and workers of `fp8-grpo up`: child processes that start, are watched, and end together."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn, Self

import psutil

from flows.lifeline import Lifeline

_START_SECONDS = 300.0
# How long a server, and a training that has a step to commit, may take to end.
SERVER_SECONDS, STEP_SECONDS = 15.0, 600.0
_POLL_SECONDS = 0.2
# Runs in a bare interpreter: ends the process groups it was told of when who told it is gone without a goodbye.
_REAP = """
import os, signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
groups = []
for line in sys.stdin:
    if line == "goodbye\\n":
        sys.exit()
    groups.append(int(line))
for number, seconds in ((signal.SIGTERM, 10), (signal.SIGKILL, 0)):
    for group in groups:
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            pass
    time.sleep(seconds)
"""


class ServiceError(Exception):
    """A service did not start, or ended."""


class Stopped(Exception):
    """A signal asked this process to end; `args` holds its number."""


class Service:
    """A child with a process group and a log of its own: neither Ctrl-C nor a signal to our group reaches it."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], place: Path, log: Path):
        """Start `command` in the folder `place`; what it says is appended to `log`."""
        self.name, self._log = name, log
        with log.open("ab") as output:
            self._begin = output.tell()
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                cwd=place,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.group = self._process.pid
        self._thawed = False

    @property
    def exit_code(self) -> int | None:
        """What it ended with, or None while it runs."""
        return self._process.poll()

    def death(self) -> ServiceError:
        """Its exit code and last words."""
        with self._log.open("rb") as log:
            log.seek(self._begin)
            said = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        last = said[-1] if said else "it said nothing"
        return ServiceError(f"{self.name} ended with {self.exit_code}: {last} (log: {self._log})")

    def stop(self) -> None:
        """Ask it to end, what it has started first; what a training has started is for the training to end.

        Meanwhile it is frozen: a Prefect worker would kill its trainings when it ends, or start the next one.
        """
        if self.exit_code is not None:
            self._signal_group(signal.SIGTERM)
            return
        os.kill(self.group, signal.SIGSTOP)
        for child in self._children():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.terminate()

    def wait(self, seconds: float) -> bool:
        """Whether it ends, with everything in its group, within `seconds`; what it has started came first."""
        deadline = time.monotonic() + seconds
        while self.exit_code is None or _running(self.group):
            if not self._thawed and self.exit_code is None and not self._children():
                self._thawed = True
                os.kill(self.group, signal.SIGTERM)
                os.kill(self.group, signal.SIGCONT)
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _children(self) -> list[psutil.Process]:
        return [process for process, parent in _running(self.group) if parent == self.group]

    def kill(self) -> None:
        """End it and its group at once."""
        self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, number)


class Services:
    """The services of this process; leaving the block ends them, the last one started first.

    A signal is only noted, and raised by `check`, so that no service can be started and not be known here.
    """

    def __init__(self, environment: Mapping[str, str], place: Path, logs: Path) -> None:
        """Commands run with `environment` in the folder `place` and write to `logs`."""
        self._environment, self._place, self._logs = environment, place, logs
        self._lasting: list[Service] = []
        self._all: list[tuple[Service, float]] = []
        self._signals: list[int] = []

    def __enter__(self) -> Self:
        self._reaper = Lifeline(["-I", "-S", "-c", _REAP], subprocess.DEVNULL)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for service, patience in reversed(self._all):
            service.stop()
            deadline = time.monotonic() + patience
            while not service.wait(_POLL_SECONDS):
                if len(self._signals) > 1 or time.monotonic() > deadline:
                    service.kill()
        self._reaper.end(b"goodbye\n")

    def note_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: the first one asks for the end, a second one for the end at once."""
        self._signals.append(number)

    def start(self, name: str, arguments: Sequence[str], patience: float) -> None:
        """Start our Python with `arguments`, to last; asked to end, it may take `patience` seconds."""
        self._lasting.append(self._launch(name, arguments, patience))

    def begin(self, name: str, arguments: Sequence[str]) -> Service:
        """Start our Python with `arguments`, to be waited for by `finish`."""
        return self._launch(name, arguments, SERVER_SECONDS)

    def finish(self, service: Service) -> None:
        """Wait for its end. Raises as `wait_until`; ServiceError too when it fails."""
        self.wait_until(lambda: service.exit_code is not None, service.name)
        if service.exit_code != 0:
            raise service.death()

    def _launch(self, name: str, arguments: Sequence[str], patience: float) -> Service:
        log = self._logs / f"{name.replace(' ', '-')}.log"
        service = Service(name, [sys.executable, *arguments], self._environment, self._place, log)
        self._all.append((service, patience))
        self._reaper.say(f"{service.group}\n".encode())
        return service

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Say what is waited for. Raises ServiceError: `what` did not come about; and as `check`."""
        print(f"waiting for: {what}", flush=True)
        deadline = time.monotonic() + _START_SECONDS
        while not condition():
            self.check()
            if time.monotonic() > deadline:
                raise ServiceError(f"{what}: not within {_START_SECONDS:.0f} s (logs: {self._logs})")
            time.sleep(_POLL_SECONDS)

    def watch(self) -> NoReturn:
        """Wait until `check` raises."""
        while True:
            self.check()
            time.sleep(_POLL_SECONDS)

    def check(self) -> None:
        """Raises Stopped after a signal, and ServiceError when a service has ended."""
        if self._signals:
            raise Stopped(self._signals[0])
        for service in self._lasting:
            if service.exit_code is not None:
                raise service.death()


def _running(group: int) -> list[tuple[psutil.Process, int]]:
    """Processes of a group, with their parents; one that has ended and nobody has waited for does not count."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process, process.ppid()))
    return found
