"""A Python interpreter for code of the policy: a fresh process that reads the standard library, and reaches no more.

What holds it, on Linux for x86-64:

- seccomp: only listed system calls are made, and all others fail. It has no sockets, starts no process, sends no
  signal, changes no file's name, owner or mode, and mounts, traces and loads nothing.
- Landlock (Linux from 5.13): it opens nothing but files of Python and of installed packages, and these to read.
- Limits: processor time of a call, memory, no file to write, no core. Between calls it is stopped.
- It is started anew, by exec, with an empty environment: neither the reference nor a descriptor of ours is in it.

An error of the kernel in a listed call would let it out. It learns whether a path exists, the time,
and facts of the machine. Code and interpreter share a process, so that it can make its own answers up; no reward
depends on them. Other kernels and architectures are refused.
"""

import ast
import contextlib
import ctypes
import errno
import json
import math
import os
import platform
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from fp8core.errors import UserError
from fp8core.processes.process_bound import (
    ALLOW,
    ANY_BIT,
    AT_LEAST,
    CALLS,
    CLONE_THREAD,
    EQUAL,
    ERRNO,
    KILL,
    LOAD,
    OTHER_ABI,
    RETURN,
    install,
    statement,
)
from fp8core.processes.supervisor import checked, forbid_new_privileges, landlock_version, limit_memory, system_call

_MACHINE = "x86_64"
_ROOT = str(Path(__file__).parents[2])
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); from fp8core.environments.sandbox import interpret; "
    "interpret(int(sys.argv[2]), sys.argv[1], sys.argv[3:])"
)
_CHANNEL = 3
_SECOND_TRY = "; what it defined is lost"
_TICKS = os.sysconf("SC_CLK_TCK")
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]{6,16}\b")

# asm/unistd_64.h, by what they are for.
_MEMORY = (9, 10, 11, 12, 25, 27, 28)  # mmap mprotect munmap brk mremap mincore madvise
_FILES = (0, 1, 2, 3, 4, 5, 6, 8, 17, 18, 19, 20, 21, 32, 33, 79, 89, 217, 257, 262, 267, 269, 292, 332, 439)
# read write open close stat fstat lstat lseek pread64 pwrite64 readv writev access dup dup2 getcwd readlink getdents64
# openat newfstatat readlinkat faccessat dup3 statx faccessat2
_WAITING = (7, 22, 23, 24, 34, 35, 202, 219, 230, 232, 233, 270, 271, 281, 290, 291, 293)
# poll pipe select sched_yield pause nanosleep futex restart_syscall clock_nanosleep epoll_wait epoll_ctl pselect6 ppoll
# epoll_pwait eventfd2 epoll_create1 pipe2
_ITSELF = (13, 14, 15, 39, 60, 63, 97, 98, 99, 100, 102, 104, 107, 108, 110, 131, 186, 201, 204, 218, 228, 229, 231)
_ITSELF_TOO = (273, 309, 318, 324, 334)
# rt_sigaction rt_sigprocmask rt_sigreturn getpid exit uname getrlimit getrusage sysinfo times getuid getgid geteuid.
# getegid getppid sigaltstack gettid time sched_getaffinity set_tid_address clock_gettime clock_getres exit_group.
# set_robust_list getcpu getrandom membarrier rseq.
_IOCTL, _FCNTL, _PRLIMIT = 16, 72, 302
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5450, 0x5451)  # TCGETS TIOCGWINSZ FIONREAD FIONCLEX FIOCLEX
_FCNTLS = (0, 1, 2, 3, 4, 1030)  # F_DUPFD F_GETFD F_SETFD F_GETFL F_SETFL F_DUPFD_CLOEXEC
_ARGUMENTS = (16, 24, 32)  # Offsets of the low words of the first three arguments.
_HIGH = 4

# linux/landlock.h
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_PATH_BENEATH = 1
_READ = 4 | 8  # Files, and the list of a folder's.
_RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 5: 0xFFFF}
"""All that a version knows, from that version on."""
_NET_VERSION, _NET = 4, 3
_SCOPE_VERSION, _SCOPES = 6, 3


def refuse_kernel() -> None:
    """Raises UserError where the sandbox cannot be closed."""
    if sys.platform != "linux" or platform.machine() != _MACHINE:
        raise UserError(f"its sandbox is for Linux on {_MACHINE}; this is {sys.platform} on {platform.machine()}")
    if landlock_version() < 1:
        raise UserError("its sandbox needs Landlock (Linux from 5.13, and enabled in this container)")


class Interpreter:
    def __init__(self, seconds: int, memory_mb: int, characters: int) -> None:
        """Set limits of a call: processor time, of which twice as much may pass; MiB; and characters of the answer."""
        self._seconds, self._memory_mb, self._characters = seconds, memory_mb, characters
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def run(self, code: str) -> tuple[str, bool]:
        """Output of the code, the value of its last line and its error, cut; True with it: it failed."""
        if self._process is None:
            self._start()
        assert self._process is not None, "it was started"
        assert self._control is not None, "it was started"
        # An interpreter that is gone is noticed below.
        with contextlib.suppress(ProcessLookupError, BrokenPipeError, ConnectionResetError):
            os.kill(self._process.pid, signal.SIGCONT)
            limit = math.ceil(_processor_seconds(self._process.pid) + self._seconds)
            resource.prlimit(self._process.pid, resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
            self._control.sendall(json.dumps(code).encode() + b"\n")
        printed, told = self._collect(time.monotonic() + 2 * self._seconds)
        parts = [printed.decode("utf-8", "replace")]
        try:
            value, error = json.loads(told or b"null")
            parts += [str(value), str(error)]
            failed = bool(error)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGSTOP)  # Threads of the code would use up time of others.
        except (ValueError, TypeError, RecursionError):
            parts.append(self._end())
            failed = True
        return self._cut("\n".join(part.rstrip("\n") for part in parts if part.rstrip("\n"))), failed

    def close(self) -> None:
        if self._process is not None:
            self._end()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        packages = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
        limits = [str(self._memory_mb), str(self._characters), *dict.fromkeys(packages)]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-s", "-S", "-c", _BOOT, _ROOT, str(theirs.fileno()), *limits],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                pass_fds=[theirs.fileno()],
                env={"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )

    def _collect(self, until: float) -> tuple[bytes, bytes]:
        """The output until the end of the call, and the line at its end; empty without one.

        Both are cut, and what is beyond is read and dropped.
        """
        assert self._process is not None, "it was started"
        assert self._process.stdout is not None, "it was started with a pipe"
        assert self._control is not None, "it was started"
        output, control = self._process.stdout.fileno(), self._control.fileno()
        most = 4 * self._characters + 1  # Bytes of UTF-8.
        printed, told = bytearray(), bytearray()
        ended = False
        while not ended and (left := until - time.monotonic()) > 0:
            ready, _, _ = select.select([output, control], [], [], left)
            if control in ready:
                part = _received(self._control)
                told += part[: 32 * most - len(told)]
                ended = not part or part.endswith(b"\n")
            if output in ready:
                part = os.read(output, 1 << 16)
                printed += part[: max(0, most - len(printed))]
                ended = ended or not part
        while ended and select.select([output], [], [], 0)[0] and (part := os.read(output, 1 << 16)):
            printed += part[: max(0, most - len(printed))]
            if time.monotonic() > until:
                break
        return bytes(printed), bytes(told) if told.endswith(b"\n") else b""

    def _end(self) -> str:
        """End the process; a line on how it ended."""
        assert self._process is not None, "it was started"
        assert self._process.stdout is not None, "it was started with a pipe"
        assert self._control is not None, "it was started"
        try:
            code: int | None = self._process.wait(0.05)
        except subprocess.TimeoutExpired:
            code = None
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._control.close()
        self._process = self._control = None
        if code is None:
            return f"no end after {2 * self._seconds} s{_SECOND_TRY}"
        if code == -signal.SIGXCPU:
            return f"more than {self._seconds} s of processor time{_SECOND_TRY}"
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return f"the interpreter ended ({how}){_SECOND_TRY}"

    def _cut(self, text: str) -> str:
        shown = _without_addresses(text) or "(no output)"
        if len(shown) <= self._characters:
            return shown
        return f"{shown[: self._characters]}\n... (cut after {self._characters} characters)"


def _without_addresses(text: str) -> str:
    """Where an object lies differs from run to run."""
    return _ADDRESS.sub("at 0x", text)


def _received(control: socket.socket) -> bytes:
    with contextlib.suppress(ConnectionResetError):
        return control.recv(1 << 16)
    return b""


def _processor_seconds(pid: int) -> float:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS
    return 0.0


# Below: in the process of the interpreter.


def interpret(inherited: int, root: str, arguments: list[str]) -> None:
    """Close the sandbox around this process, and run what comes by the channel."""
    # Always one number: those of files that the code opens must be the same in a replay.
    channel = os.dup2(inherited, _CHANNEL, inheritable=False)
    if inherited != channel:
        os.close(inherited)
    memory_mb, characters, *packages = arguments
    sys.path[:] = [path for path in sys.path if path and path != root] + packages
    sys.argv[:] = [""]
    _enter(int(memory_mb), packages)
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    output = sys.stdout
    with os.fdopen(channel, "rb") as lines:  # As a file: calls of sockets are refused.
        for line in lines:
            told = json.dumps(_run(json.loads(line), names, int(characters))).encode()
            # Code may have replaced ours, or closed it.
            for each in (output, sys.stdout):
                with contextlib.suppress(BaseException):
                    each.flush()
            while told:
                told = told[os.write(channel, told) :]
            os.write(channel, b"\n")


def _run(code: str, names: dict[str, Any], characters: int) -> tuple[str, str]:
    """Value of the last line, and error; each has one character beyond the limit at most, by which a cut shows."""
    try:
        parsed = ast.parse(code, "<code>")
        last = parsed.body.pop() if parsed.body and isinstance(parsed.body[-1], ast.Expr) else None
        exec(compile(parsed, "<code>", "exec"), names)
        if last is None:
            return "", ""
        value = eval(compile(ast.Expression(last.value), "<code>", "eval"), names)  # type: ignore[attr-defined]
        return ("" if value is None else _without_addresses(repr(value))[: characters + 1]), ""
    except BaseException as error:  # noqa: BLE001 - it is the answer
        return "", _without_addresses(_described(error))[: characters + 1]


def _described(error: BaseException) -> str:
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<code>":
            line = trace.tb_lineno
        trace = trace.tb_next
    place = "" if line is None else f"line {line}: "
    try:
        return f"{place}{type(error).__name__}: {error}".removesuffix(": ")
    except BaseException:  # noqa: BLE001 - of the error's own `__str__`
        return f"{place}{type(error).__name__}"


def _enter(memory_mb: int, packages: list[str]) -> None:
    """From here on this process is confined. Raises OSError where the kernel refuses."""
    os.chdir("/")
    limit_memory(memory_mb)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    library = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    shared = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/usr/share/zoneinfo"]
    forbid_new_privileges()
    _confine_files([*library, *packages, *shared])
    install(_filter())


def _confine_files(readable: list[str]) -> None:
    version = landlock_version()
    rights = _RIGHTS[max(known for known in _RIGHTS if known <= version)]
    net = _NET if version >= _NET_VERSION else 0
    scopes = _SCOPES if version >= _SCOPE_VERSION else 0
    size = 24 if scopes else 16 if net else 8
    rules = (ctypes.c_uint64 * 3)(rights, net, scopes)
    ruleset = checked(system_call(_CREATE_RULESET, ctypes.addressof(rules), size, 0))
    for path in dict.fromkeys(readable):
        if not os.path.exists(path):
            continue
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = _READ if os.path.isdir(path) else _READ & 4
        rule = ctypes.create_string_buffer(allowed.to_bytes(8, "little") + opened.to_bytes(4, "little"), 12)
        checked(system_call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.addressof(rule), 0))
        os.close(opened)
    checked(system_call(_RESTRICT_SELF, ruleset, 0, 0))
    os.close(ruleset)


def _filter() -> list[bytes]:
    """Instructions that let the listed calls through."""
    allow, refuse = statement(RETURN, ALLOW), statement(RETURN, ERRNO | errno.EPERM)
    calls = CALLS[_MACHINE]

    def only(call: int, argument: int, values: tuple[int, ...]) -> list[bytes]:
        """Of a call, those whose argument is one of the values."""
        tests = [part for value in values for part in (statement(EQUAL, value, no=1), allow)]
        return [statement(EQUAL, call, no=2 + len(tests)), statement(LOAD, _ARGUMENTS[argument]), *tests, refuse]

    listed = sorted((*_MEMORY, *_FILES, *_WAITING, *_ITSELF, *_ITSELF_TOO))
    return [
        statement(LOAD, 4),
        statement(EQUAL, calls.audit, yes=1),
        statement(RETURN, KILL),
        statement(LOAD, 0),
        statement(AT_LEAST, OTHER_ABI, no=1),
        refuse,
        *(part for number in listed for part in (statement(EQUAL, number, no=1), allow)),
        # Its arguments lie in memory, where no filter reads; libraries then use `clone`.
        statement(EQUAL, calls.clone3, no=1),
        statement(RETURN, ERRNO | errno.ENOSYS),
        statement(EQUAL, calls.clone, no=4),
        statement(LOAD, _ARGUMENTS[0]),
        statement(ANY_BIT, CLONE_THREAD, no=1),
        allow,
        refuse,
        *only(_IOCTL, 1, _IOCTLS),
        *only(_FCNTL, 1, _FCNTLS),
        # Limits are read; a new one would be the third argument.
        statement(EQUAL, _PRLIMIT, no=5),
        statement(LOAD, _ARGUMENTS[2]),
        statement(EQUAL, 0, no=2),
        statement(LOAD, _ARGUMENTS[2] + _HIGH),
        statement(EQUAL, 0, yes=1),
        refuse,
        statement(LOAD, 0),
        statement(EQUAL, _PRLIMIT, no=1),
        allow,
        refuse,
    ]
