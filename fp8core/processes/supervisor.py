"""The process between the pool and a verifier: what the verifier starts ends with its answer, and with the run.

The pool starts a supervisor, which forks the process of the verifier (fp8core/rewards/child.py) and waits. The host of
environments (fp8core/environments/child.py) has one too. Both are subreapers: an orphan becomes a child of the nearer
one, which can find and kill it, a daemon in its own session too. The supervisor ends when its standard input does: the
pool has closed it, or is gone. It ends the way the verifier ended, for the pool to read.

The verifier's parent is its supervisor, and its session and process group are its own. From Linux 6.12 on, the kernel
refuses its signals to any process outside, whatever number it finds. An older kernel lets a verifier kill processes of
its user that it looks up. Other systems than Linux have neither subreapers nor this: there the verifier ends with the
run, and its daemons may not. Free of imports that take time: each process of a verifier passes here.
"""

import ctypes
import importlib
import os
import resource
import select
import signal
import struct
import sys
import time
from pathlib import Path

_LINUX = sys.platform == "linux"
_libc = ctypes.CDLL(None, use_errno=True)
if _LINUX:
    _libc.prctl.argtypes = [ctypes.c_int, *4 * [ctypes.c_ulong]]
    _libc.syscall.argtypes = 5 * [ctypes.c_long]
    _libc.syscall.restype = ctypes.c_long

# linux/prctl.h
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38
# linux/landlock.h; these calls have the same numbers on every architecture.
_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446
_LANDLOCK_ASK_VERSION = 1
_LANDLOCK_SCOPE_SIGNAL = 2
_LANDLOCK_WITH_SCOPES = 6
# linux/wait.h: children that send no signal when they end, too.
_WALL = 0x40000000
_SWEEP_SECONDS = 0.001
_STATM = Path("/proc/self/statm")

CPU_SIGNAL = signal.SIGPROF
"""What ends a process that has computed for too long."""
_ROOT = str(Path(__file__).parents[2])
_BOOT = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from fp8core.processes.supervisor import supervise; supervise(int(sys.argv[1]), sys.argv[2])"
)


def supervised(module: str, channel: int) -> list[str]:
    """Arguments of Python for a supervisor whose child calls `serve(channel)` of a module of ours."""
    paths = [_ROOT, *(path for path in sys.path if path != _ROOT)]
    return ["-P", "-c", _BOOT, str(channel), module, *paths]


def supervise(channel: int, module: str) -> None:
    """Fork the verifier's process, which serves `channel`; end what it leaves behind, and end as it did."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    control(_PR_SET_CHILD_SUBREAPER, 1)
    supervisor = os.getpid()
    verifier = os.fork()
    if verifier == 0:
        become_supervised(supervisor)
        # Only here: the supervisor stays small.
        importlib.import_module(module).serve(channel)
        return
    os.close(channel)
    # Without such a descriptor the pool notices the end by its channel, and closes our input.
    ended = [os.pidfd_open(verifier)] if _LINUX else []
    select.select([0, *ended], [], [])
    os.kill(verifier, signal.SIGKILL)  # One that has ended stays as it ended.
    _, status = os.waitpid(verifier, 0)
    end_descendants()
    if os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    if os.WTERMSIG(status) != signal.SIGKILL:
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
    os.kill(supervisor, os.WTERMSIG(status))


def end_descendants() -> None:
    """Kill and reap every process below this one, orphans included; where there is none it takes a microsecond."""
    while _LINUX:
        try:
            while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | _WALL) is not None:
                pass
        except ChildProcessError:
            return
        # Children alone: until we reap one, its number is nobody else's. Their own become ours.
        for child in _children():
            os.kill(child, signal.SIGKILL)
        time.sleep(_SWEEP_SECONDS)


def limit_memory(megabytes: int) -> None:
    """Limit the address space that the process may add to what it has; only Linux reports and enforces it."""
    if _STATM.exists():
        taken = int(_STATM.read_text().split()[0]) * resource.getpagesize()
        limit = taken + megabytes * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def signals_are_confined() -> bool:
    """True if this kernel can keep the signals of a process within what it starts."""
    return landlock_version() >= _LANDLOCK_WITH_SCOPES


def landlock_version() -> int:
    """Of the kernel's Landlock; below 1 there is none."""
    return system_call(_LANDLOCK_CREATE_RULESET, 0, 0, _LANDLOCK_ASK_VERSION) if _LINUX else 0


def become_supervised(supervisor: int) -> None:
    """Make this process, which `supervisor` forked, the head of a session that signals nobody outside."""
    os.setsid()
    become_subreaper(supervisor)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    if signals_are_confined():
        confine_signals()


def become_subreaper(parent: int) -> None:
    """From now on this process ends with `parent`, which forked it, and orphans below it become its children."""
    control(_PR_SET_CHILD_SUBREAPER, 1)
    control(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # It ended before the kernel was told.


def confine_signals() -> None:
    """From now on this process, and what it starts, can signal only themselves."""
    rules = struct.pack("=QQQ", 0, 0, _LANDLOCK_SCOPE_SIGNAL)  # No files and no network: signals alone.
    content = ctypes.create_string_buffer(rules, len(rules))
    ruleset = checked(system_call(_LANDLOCK_CREATE_RULESET, ctypes.addressof(content), len(rules), 0))
    forbid_new_privileges()
    checked(system_call(_LANDLOCK_RESTRICT_SELF, ruleset, 0, 0))
    os.close(ruleset)


def forbid_new_privileges() -> None:
    """Of this process; the kernel demands it before a process may restrict itself."""
    control(_PR_SET_NO_NEW_PRIVS, 1)


def _children() -> list[int]:
    """Numbers of our children. Not every kernel lists them, so the parent of each process is read."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue  # It ended while we looked.
            # NUMBER (NAME) STATE PARENT, and a name may hold anything.
            if int(stat.rpartition(b")")[2].split()[1]) == os.getpid():
                found.append(int(entry.name))
    return found


def system_call(number: int, *arguments: int) -> int:
    """Of Linux; what it returns, below 0 where it failed."""
    return int(_libc.syscall(number, *arguments, *[0] * (4 - len(arguments))))


def control(option: int, value: int) -> None:
    """`prctl` of Linux. Raises OSError."""
    if _LINUX:
        checked(_libc.prctl(option, value, 0, 0, 0))


def checked(result: int) -> int:
    """Raises OSError where a call of the C library failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
