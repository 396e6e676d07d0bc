"""One child process of the verifier pool, as the pool sees it: its channel, what it is working on, and its end."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fp8core.rewards.child import CPU_SIGNAL

_ROOT = str(Path(__file__).parents[2])
_BOOT = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from fp8core.rewards.child import serve; serve(int(sys.argv[1]), int(sys.argv[2]))"
)
_READ_BYTES = 1 << 20


class WorkerProcess:
    """A fresh Python interpreter that serves one scorer; nothing of this process but the channel is passed on.

    It leads a session and process group of its own: signals to ours do not reach it, and what it starts ends with it.
    The socket never blocks.
    """

    def __init__(self, task: Mapping[str, Any]) -> None:
        """`task` is the first line of the channel (fp8core/rewards/child.py)."""
        self.channel, theirs = socket.socketpair()
        self.channel.setblocking(False)
        with theirs:
            arguments = [str(theirs.fileno()), str(os.getpid()), _ROOT, *(path for path in sys.path if path != _ROOT)]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.description: dict[str, str] | None = None
        self.working_on: deque[tuple[str, ...]] = deque()
        """Lines that were sent and have no verdict, the first of which is being worked on."""
        self.since = time.monotonic()
        """When it began with that one, or was started."""
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self._send(task)

    @property
    def ready(self) -> bool:
        """Whether it has loaded the scorer."""
        return self.description is not None

    @property
    def ended(self) -> bool:
        """Whether `end` was called."""
        return self.channel.fileno() < 0

    @property
    def has_outgoing(self) -> bool:
        """Whether something waits for the channel to take it."""
        return bool(self._outgoing)

    def give(self, lines: Iterable[tuple[str, ...]]) -> None:
        """Work for an idle process."""
        assert self.ready, "a process is given work once it is ready"
        assert not self.working_on, "a process is given work when it is idle"
        self.working_on.extend(lines)
        self.since = time.monotonic()
        for line in self.working_on:
            self._outgoing += json.dumps(line).encode() + b"\n"
        self.write()

    def write(self) -> None:
        """Pass on what the channel takes."""
        # A process that is gone is noticed when it is read from.
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._outgoing:
                del self._outgoing[: self.channel.send(self._outgoing)]

    def read(self) -> tuple[list[bytes], bool]:
        """Whole lines that have come, and whether the channel has ended."""
        ended = False
        try:
            while part := self.channel.recv(_READ_BYTES):
                self._incoming += part
            ended = True
        except BlockingIOError:
            pass
        except ConnectionResetError:
            ended = True
        *lines, rest = bytes(self._incoming).split(b"\n")
        self._incoming = bytearray(rest)
        return lines, ended

    def end(self) -> int:
        """Kill it and everything it has started; returns what it ended with (negative: a signal, maybe ours)."""
        if not self.ended:
            self.channel.close()
            # Before it is reaped, its number belongs to nobody else.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def _send(self, message: Mapping[str, Any]) -> None:
        self._outgoing += json.dumps(message).encode() + b"\n"
        self.write()


def ending(code: int) -> str:
    """How a process ended, in words."""
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def took_too_much_time(code: int) -> bool:
    """Whether the kernel ended a process for the processor time it took."""
    return code == -CPU_SIGNAL
