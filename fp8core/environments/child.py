"""The processes below a pool of environments: the host, and for each episode a supervisor and the environment itself.

The pool starts the host below a supervisor of its own (fp8core/processes/supervisor.py). The host imports the
environment once and stays single-threaded. For every episode the pool sends it an end of a socket, and it forks the
episode's supervisor, which forks the process of the environment. That one answers the lines of the pool within
limits. When it ends, or the pool closes the socket, its supervisor kills every process below itself, writes how it
ended, and ends.

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
from typing import Any, NamedTuple, NoReturn

from fp8core.environments.channel import decode, encode, read_action, read_reply, read_task, reply_message
from fp8core.environments.loading import LoadedEnvironment, load_environment
from fp8core.environments.protocol import Action, Environment, Outcome, Task, Turn
from fp8core.errors import UserError, described_error
from fp8core.processes.process_bound import ProcessBound, ask_before_processes
from fp8core.processes.supervisor import (
    CPU_SIGNAL,
    become_subreaper,
    become_supervised,
    confine_signals,
    end_descendants,
    limit_memory,
    signals_are_confined,
)
from fp8core.rewards.scorer import DETAIL_CHARACTERS

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
        raise UserError(f"loading it starts {count - 1} threads, which episodes would lack; start them in `start`")


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
        episode = _EpisodeProcess(lines, loaded, limits)
        episode.say({"ready": True})
        message = decode(first)
        if "construct" in message:
            episode.construct()
        else:
            episode.play(read_task(message["start"]))


class _EpisodeProcess:
    def __init__(self, lines: Any, loaded: LoadedEnvironment, limits: EpisodeLimits) -> None:
        self._lines, self._loaded, self._limits = lines, loaded, limits
        self._environment: Environment | None = None
        self._own = os.getpid()

    def play(self, task: Task) -> None:
        """Answer until there is an outcome, or the pool has no more; then the environment is closed."""
        _seed(task.seed)
        try:
            going = self._answer(task)
            while going and (line := self._lines.readline()):
                going = self._answer(read_action(decode(line)))
        finally:
            # After a crash too, whose outcome the pool has by now, whatever this raises.
            self._close()

    def construct(self) -> None:
        """Make an environment with the options of the configuration, for its errors; its methods are seen as well."""
        self._start_timer()
        try:
            made = self._loaded.create()
            for name in ("start", "step", "close"):
                if not callable(getattr(made, name, None)):
                    raise UserError(f"it makes {type(made).__name__}, which has no method {name}")
        except BaseException as error:  # noqa: BLE001 - the pool says what was raised
            said = str(error) if isinstance(error, UserError) else described_error(error, self._loaded.file)
            self.say({"failed": said})
        else:
            self.say({"constructed": True})
            # It passed: whatever `close` raises here may be about what `start` makes.
            made.close()

    def say(self, message: Mapping[str, Any]) -> None:
        self._lines.write(encode(message))
        self._lines.flush()

    def _answer(self, asked: Task | Action) -> bool:
        """Send the reply; whether the episode goes on. With an outcome of its own, the environment is closed before."""
        began = time.perf_counter()
        self._start_timer()
        try:
            reply = self._ask(asked)
            message = reply_message(reply)
            size = len(line := encode(message))
            read_reply(decode(line), first=isinstance(asked, Task))
            if size > self._limits.reply_bytes:
                raise ValueError(f"a reply of {size:,} bytes; at most {self._limits.reply_bytes:,}")
            if isinstance(reply, Outcome):
                self._close()
        except BaseException as error:  # noqa: BLE001 - the outcome says what was raised
            reply = Outcome("crashed", detail=described_error(error, self._loaded.file)[:DETAIL_CHARACTERS])
            message = reply_message(reply)
        signal.setitimer(signal.ITIMER_PROF, 0)
        self.say({"seconds": time.perf_counter() - began, **message})
        return isinstance(reply, Turn)

    def _ask(self, asked: Task | Action) -> Turn | Outcome:
        try:
            if isinstance(asked, Task):
                self._environment = self._loaded.create()
                return self._environment.start(asked)
            assert self._environment is not None, "an action follows a turn"
            return self._environment.step(asked)
        finally:
            self._end_copy()

    def _end_copy(self) -> None:
        """End a copy that the environment forked and let return; its reply would be taken for the next turn's."""
        if os.getpid() != self._own:
            os._exit(0)

    def _close(self) -> None:
        """Close the environment, unless it was closed or never made."""
        environment, self._environment = self._environment, None
        if environment is not None:
            try:
                environment.close()
            finally:
                self._end_copy()

    def _start_timer(self) -> None:
        """At the end of which the kernel ends this process, in a function of C too."""
        signal.signal(CPU_SIGNAL, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, self._limits.cpu_seconds)


def _seed(seed: int) -> None:
    """All episodes are forked from one process: without this they would draw the same numbers."""
    # Seeds of earlier versions had a sign, which `random` ignores: older episodes are played again with their numbers.
    random.seed(min(seed, 2**64 - seed))
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
