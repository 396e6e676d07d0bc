"""Our side of a process below a supervisor (`supervisor.py`), and of the lines that go to it and come from it.

The pools of verifiers and of environments have such processes. A selector watches their lines; nothing here blocks.
"""

import contextlib
import signal
import socket
import subprocess
from collections.abc import Mapping

from fp8core.processes.end_with_parent import TiedProcess
from fp8core.processes.supervisor import supervised

_READ_BYTES = 1 << 20
_ENDING_SECONDS = 1.0
_SWEEPING_SECONDS = 20.0
"""A supervisor takes milliseconds, unless processes multiply faster than they can be killed."""
FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
"""No limit of ours, and nothing that a user's code does by mistake, ends a process in this way."""


class Lines:
    """Our end of a socket that has a text a line. The other end is not trusted."""

    def __init__(self, connection: socket.socket, longest: int) -> None:
        """`longest`: bytes of a line; what is longer counts as a line, whole or not."""
        connection.setblocking(False)
        self._connection, self._longest = connection, longest
        self._outgoing, self._incoming = bytearray(), bytearray()

    def fileno(self) -> int:
        """For selectors; below 0 after `close`."""
        return self._connection.fileno()

    @property
    def has_outgoing(self) -> bool:
        return bool(self._outgoing)

    def send(self, line: bytes) -> None:
        """Pass on a line, or as much as the socket takes now."""
        self._outgoing += line
        self.write()

    def write(self) -> None:
        """Pass on what waits, as far as the socket takes it."""
        # A process that is gone is noticed when it is read from.
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._outgoing:
                del self._outgoing[: self._connection.send(self._outgoing)]

    def read(self) -> tuple[list[bytes], bool]:
        """The lines that have come, and whether there will be no more."""
        try:
            part = self._connection.recv(_READ_BYTES)
        except BlockingIOError:
            return [], False
        except ConnectionResetError:
            part = b""
        *lines, rest = bytes(self._incoming + part).split(b"\n")
        if len(rest) > self._longest:
            lines, rest = [*lines, rest], b""
        self._incoming = bytearray(rest)
        return lines, not part

    def end_sending(self) -> None:
        """The other end reads the end of the file."""
        with contextlib.suppress(OSError):  # It is gone.
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """The other end reads the end of the file, and nobody reads what it writes; a second call does nothing."""
        self._connection.close()


class SupervisedProcess:
    """A fresh Python interpreter in which a module of ours serves a socket; it gets nothing else of this process.

    Attributes:
        connection: our end.
    """

    def __init__(self, module: str, variables: Mapping[str, str] | None = None) -> None:
        """`module` has `serve(channel)`; `variables` are the environment of the process, None: ours."""
        self.connection, theirs = socket.socketpair()
        with theirs:
            arguments = supervised(module, theirs.fileno())
            self._supervisor = TiedProcess(arguments, subprocess.DEVNULL, [theirs.fileno()], variables)

    def exit_code(self) -> int | None:
        """Its exit code where it ended by itself, negative for a signal; None if it only closed its end."""
        try:
            return self._supervisor.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """Kill it and everything it has started; a second call does nothing."""
        self.connection.close()
        self._supervisor.close_copy()
        try:
            self._supervisor.wait(_SWEEPING_SECONDS)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()


def described(code: int | None) -> str:
    if code is None:
        return "it closed its channel"
    return f"its process ended ({f'exit code {code}' if code >= 0 else signal.Signals(-code).name})"
