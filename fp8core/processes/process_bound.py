"""A bound on the processes of an episode: none is started without its supervisor.

A seccomp filter of the episode's process, which all that it starts inherit, hands every fork to a listener. Its
supervisor counts, lets it go on, or ends the episode. Threads are none of these, and memory bounds them. RLIMIT_NPROC
would count all processes of the user, and does not hold for root.

On kernels without such listeners (Linux before 5.5) and on other architectures, an episode has no bound but its time.
All that it started ends then.
"""

import array
import ctypes
import errno
import fcntl
import os
import platform
import socket
import struct
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from fp8core.processes.supervisor import checked, forbid_new_privileges, system_call

# linux/seccomp.h
_SET_MODE_FILTER, _FLAG_NEW_LISTENER = 1, 8
KILL, ERRNO, _ASK, ALLOW = 0x80000000, 0x00050000, 0x7FC00000, 0x7FFF0000
_NOTIF_RECV, _NOTIF_SEND = 0xC0502100, 0xC0182101
_GO_ON = 1
# Of the data a filter sees: the number of the call, the architecture, the low word of the first argument.
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
# linux/bpf_common.h: load a word, jump if equal, if greater or equal, if a bit is set, return.
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
CLONE_THREAD = 0x10000
OTHER_ABI = 0x40000000


class Calls(NamedTuple):
    """Numbers of an architecture: of system calls, and `audit` its own."""

    seccomp: int
    audit: int
    clone: int
    clone3: int
    forks: tuple[int, ...]


CALLS = {
    "x86_64": Calls(317, 0xC000003E, 56, 435, (57, 58)),
    "aarch64": Calls(277, 0xC00000B7, 220, 435, ()),
}


def statement(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """An instruction of a filter; `yes` and `no` are how many to skip."""
    return struct.pack("=HBBI", code, yes, no, value)


def install(instructions: list[bytes], flags: int = 0) -> int:
    """Put this process under a filter; the listener's descriptor where the flags ask for one. Raises OSError."""
    forbid_new_privileges()
    content = ctypes.create_string_buffer(b"".join(instructions))
    program = struct.pack("HxxxxxxQ", len(instructions), ctypes.addressof(content))
    described = ctypes.create_string_buffer(program, len(program))
    call = CALLS[platform.machine()].seccomp
    return checked(system_call(call, _SET_MODE_FILTER, flags, ctypes.addressof(described)))


def ask_before_processes(theirs: socket.socket) -> None:
    """From now on every process that this one starts is asked for; our supervisor gets the listener by the socket."""
    calls = CALLS.get(platform.machine())
    if calls is None or sys.platform != "linux":
        return
    instructions = [
        statement(LOAD, _ARCHITECTURE),
        statement(EQUAL, calls.audit, yes=1),
        statement(RETURN, KILL),
        statement(LOAD, _NUMBER),
        statement(AT_LEAST, OTHER_ABI, no=1),
        statement(RETURN, ERRNO | errno.ENOSYS),
        # Its arguments lie in memory, where no filter reads; libraries then use `clone`.
        statement(EQUAL, calls.clone3, no=1),
        statement(RETURN, ERRNO | errno.ENOSYS),
        *(part for number in calls.forks for part in (statement(EQUAL, number, no=1), statement(RETURN, _ASK))),
        statement(EQUAL, calls.clone, no=3),
        statement(LOAD, _FIRST_ARGUMENT),
        statement(ANY_BIT, CLONE_THREAD, yes=1),
        statement(RETURN, _ASK),
        statement(RETURN, ALLOW),
    ]
    try:
        listener = install(instructions, _FLAG_NEW_LISTENER)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EPERM):
            raise
        return  # A kernel without them, or a container that forbids them.
    socket.send_fds(theirs, [b"l"], [listener])
    os.close(listener)


class ProcessBound:
    def __init__(self, listener: int, most: int) -> None:
        self.listener = listener
        self._most = most
        self._started = 0

    @classmethod
    def receive(cls, ours: socket.socket, most: int) -> "ProcessBound | None":
        """With the listener of an episode; None where it has none."""
        _, listeners, _, _ = socket.recv_fds(ours, 1, 1)
        return cls(listeners[0], most) if listeners else None

    def admit(self) -> bool:
        """Let a process be started, or answer False: there would be too many."""
        question = array.array("B", bytes(80))
        try:
            fcntl.ioctl(self.listener, _NOTIF_RECV, question)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EINTR):
                return True  # It ended while it asked.
            raise
        self._started += 1
        if self._started > self._most:
            self._started = _descendants(os.getpid())  # The episode's own process is one, and the new one is not there.
            if self._started > self._most:
                return False
        (identity,) = struct.unpack_from("=Q", question)
        try:
            fcntl.ioctl(self.listener, _NOTIF_SEND, array.array("B", struct.pack("=QqiI", identity, 0, 0, _GO_ON)))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EINTR):
                raise
        return True


def _descendants(root: int) -> int:
    """The number of processes below one, zombies included."""
    below = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            below[int(stat.rpartition(b")")[2].split()[1])].append(int(entry.name))
    found, count = [root], 0
    while found:
        children = below[found.pop()]
        count += len(children)
        found += children
    return count
