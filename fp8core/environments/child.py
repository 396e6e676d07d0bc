"""The processes below a pool of environments: the host, and for each episode a supervisor and the environment itself.

The pool starts the host below a supervisor of its own (fp8core/rewards/supervisor.py). The host imports the environment
once and stays single-threaded. For every episode the pool sends it an end of a socket, and it forks the episode's
supervisor, which forks the process of the environment. That one answers the lines of the pool within limits. When it
ends, or the pool closes the socket, its supervisor kills every process below itself, writes how it ended, and ends.

    pool -> {"start": task} or {"construct": true}; -> {"ready": true}; -> a reply with the seconds it took
    pool -> action; -> a reply ...; the end of the socket asks the environment to close
    supervisor -> {"ended": exit code, negative for a signal} or {"ended": "processes"}

No process of an episode can signal the host or another episode on Linux from 6.12 on. An older kernel lets it kill what
it looks up, as it does with verifiers.
"""

import gc
import json
import os
import random
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

from fp8core.environments.channel import decode, encode, read_action, read_reply, read_task, reply_message
from fp8core.environments.loading import LoadedEnvironment, load_environment
from fp8core.environments.process_bound import ProcessBound, ask_before_processes
from fp8core.environments.protocol import Environment, Outcome, Turn
from fp8core.errors import UserError, first_line
from fp8core.rewards.child import CPU_SIGNAL, limit_memory
from fp8core.rewards.supervisor import (
    become_subreaper,
    become_supervised,
    confine_signals,
    end_descendants,
    signals_are_confined,
)

TOO_MANY_PROCESSES = "processes"
_THREADS = Path("/proc/self/task")


class EpisodeLimits(NamedTuple):
    """Of one episode.

    Attributes:
        timeout_seconds: longest wait for one reply.
        cpu_seconds: processor time of the environment's process for one reply.
        memory_mb: MiB that each process of an episode may add to what the loaded environment takes.
        reply_bytes: of one reply, as JSON.
        processes: that an episode may have at once beside its own.
    """

    timeout_seconds: float = 10.0
    cpu_seconds: float = 5.0
    memory_mb: int = 1024
    reply_bytes: int = 1 << 20
    processes: int = 32


def serve(channel: int) -> None:
    """Load the environment, then fork an episode for every socket that comes; `channel`: our end of the control."""
    os.set_inheritable(channel, False)
    with socket.socket(fileno=channel) as control:
        with control.makefile("rb") as lines:
            task = json.loads(lines.readline())
        try:
            loaded = load_environment(task["name"], task["options"])
            _refuse_threads()
        except UserError as error:
            control.sendall(encode({"failed": str(error)}))
            return
        limits = EpisodeLimits(**task["limits"])
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The kernel reaps supervisors.
        gc.collect()
        gc.freeze()  # What is never collected is never written to, and stays shared with every episode.
        control.sendall(encode({"loaded": loaded.description}))
        while True:
            _, files, _, _ = socket.recv_fds(control, 1, 1)
            if not files:
                return
            _fork_episode(control, files[0], loaded, limits)


def _refuse_threads() -> None:
    """A fork copies one thread; locks that others hold would stay locked for ever."""
    count = len(list(_THREADS.iterdir())) if _THREADS.exists() else threading.active_count()
    if count > 1:
        raise UserError(f"importing it starts {count - 1} threads; start them in `start`, of each episode")


def _fork_episode(control: socket.socket, channel: int, loaded: LoadedEnvironment, limits: EpisodeLimits) -> None:
    host = os.getpid()
    try:
        forked = os.fork()
    except OSError as error:
        os.write(channel, encode({"failed": f"no process can be started: {error.strerror}"}))
    else:
        if forked == 0:
            control.close()
            _forked(lambda: _supervise_episode(host, channel, loaded, limits))
    os.close(channel)


def _forked(work: Callable[[], None]) -> NoReturn:
    """Run a forked process to its end: nothing of the one that forked it is unwound."""
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def _supervise_episode(host: int, channel: int, loaded: LoadedEnvironment, limits: EpisodeLimits) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    become_subreaper(host)
    confined = signals_are_confined()
    if confined:
        confine_signals()  # The environment confines itself once more, within this, and cannot reach us.
    supervisor = os.getpid()
    ours, theirs = socket.socketpair()
    episode = os.fork()
    if episode == 0:
        ours.close()
        _forked(lambda: _serve_episode(supervisor, channel, theirs, loaded, limits))
    theirs.close()
    ended = _wait(episode, channel, ours, limits.processes)
    os.kill(episode, signal.SIGKILL)  # One that has ended stays as it ended.
    if confined:
        # All at once, however fast they multiply: of those that we may signal, none is outside.
        os.kill(-1, signal.SIGKILL)
    _, status = os.waitpid(episode, 0)
    end_descendants()
    line = b"\n" + encode({"ended": ended or os.waitstatus_to_exitcode(status)})
    with socket.socket(fileno=channel) as connection:
        try:
            connection.send(line, socket.MSG_DONTWAIT)
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            return  # Nobody reads: the pool has closed its end, or the environment has filled it.


def _wait(episode: int, channel: int, ours: socket.socket, most: int) -> str | None:
    """Wait until the episode ends, the pool closes its end, or too many processes come to be; the last is told."""
    events = select.poll()
    pidfd = os.pidfd_open(episode)
    events.register(pidfd, select.POLLIN)
    events.register(channel, 0)  # Told in any case: the other end was closed.
    events.register(ours, select.POLLIN)
    bound = None
    while True:
        ready = {number for number, _ in events.poll()}
        if pidfd in ready or channel in ready:
            return None
        if bound is None:
            bound = ProcessBound.receive(ours, most)
            events.unregister(ours)
            if bound is not None:
                events.register(bound.listener, select.POLLIN)
        elif not bound.admit():
            return TOO_MANY_PROCESSES


def _serve_episode(
    supervisor: int, channel: int, theirs: socket.socket, loaded: LoadedEnvironment, limits: EpisodeLimits
) -> None:
    become_supervised(supervisor)
    with theirs:
        ask_before_processes(theirs)
    limit_memory(limits.memory_mb)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=channel) as connection, connection.makefile("rwb") as lines:
        first = lines.readline()
        if not first:
            return
        _say(lines, {"ready": True})
        message = decode(first)
        if "construct" in message:
            _say(lines, _constructed(loaded, limits))
            return
        task = read_task(message["start"])
        _seed(task.seed)
        environment: Environment | None = None

        def start() -> Turn | Outcome:
            nonlocal environment
            environment = loaded.create()
            return environment.start(task)

        going = _answer(lines, limits, start, lambda: environment, first=True)
        for line in lines if going else ():
            action = read_action(decode(line))
            assert environment is not None, "it was started"
            if not _answer(lines, limits, lambda: environment.step(action), lambda: environment, first=False):  # noqa: B023 - called at once
                return
        if going and environment is not None:
            environment.close()


def _answer(
    lines: BinaryIO,
    limits: EpisodeLimits,
    ask: Callable[[], Turn | Outcome],
    environment: Callable[[], Environment | None],
    first: bool,
) -> bool:
    """Send the reply to a task or an action; whether the episode goes on. After an outcome the environment is closed."""
    began = time.perf_counter()
    signal.signal(CPU_SIGNAL, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
    try:
        reply = ask()
        message = reply_message(reply)
        read_reply(decode(encode(message)), first)
        if isinstance(reply, Outcome) and (opened := environment()) is not None:
            opened.close()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the outcome says what was raised
        reply = Outcome("crashed", detail=described_error(error))
        message = reply_message(reply)
    signal.setitimer(signal.ITIMER_PROF, 0)
    line = encode({"seconds": time.perf_counter() - began, **message})
    if len(line) > limits.reply_bytes:
        reply = Outcome("crashed", detail=f"a reply of {len(line):,} bytes; at most {limits.reply_bytes:,}")
        line = encode({"seconds": time.perf_counter() - began, **reply_message(reply)})
    lines.write(line)
    lines.flush()
    return isinstance(reply, Turn)


def described_error(error: BaseException) -> str:
    """What was raised, in a line."""
    return f"{type(error).__name__}: {first_line(error)}"


def _constructed(loaded: LoadedEnvironment, limits: EpisodeLimits) -> Mapping[str, Any]:
    """Make an environment with the options of the configuration, for its errors; its methods are seen as well."""
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
    try:
        environment = loaded.create()
        for name in ("start", "step", "close"):
            if not callable(getattr(environment, name, None)):
                return {"failed": f"it makes {type(environment).__name__}, which has no method {name}"}
        environment.close()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the pool says what was raised
        return {"failed": str(error) if isinstance(error, UserError) else described_error(error)}
    return {"constructed": True}


def _seed(seed: int) -> None:
    """All episodes are forked from one process: without this they would draw the same numbers."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def _say(lines: BinaryIO, message: Mapping[str, Any]) -> None:
    lines.write(encode(message))
    lines.flush()
