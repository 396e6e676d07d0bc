"""Episodes of an environment, each in a process of its own that is killed with all it started (child.py).

A pool has no thread: it moves when it is called. An environment ends its own episode at most. A crash, a hang, too much
memory or output, and processes without end have an outcome with a named reason.

An episode whose process something outside ends (a kill, the kernel short of memory) gets another one, once. That begins
with the same seed and is asked the same again; its answers up to where the first one was are not told twice. An
environment that is a function of its task and of what it is asked goes on as it would have.
"""

import contextlib
import math
import resource
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from fp8core.config.shipped import SHIPPED_ENVIRONMENTS
from fp8core.environments.channel import action_message, decode, encode, read_reply, task_message
from fp8core.environments.child import TOO_MANY_PROCESSES, EpisodeLimits
from fp8core.environments.protocol import Action, Outcome, Reply, Task, Turn
from fp8core.errors import UserError, printable
from fp8core.processes.supervised import FROM_OUTSIDE, Lines, SupervisedProcess, described
from fp8core.processes.supervisor import CPU_SIGNAL
from fp8core.processes.variables import chosen_variables, variables
from fp8core.rewards.scorer import DETAIL_CHARACTERS, Key

_LOADED_BYTES = 1 << 20
"""Of the line that says what was loaded."""
_ENVELOPE_BYTES = 1 << 10
"""Of a line, around a reply."""
_START_SECONDS = 120.0
_CLOSING_SECONDS = 2.0
_OTHER_FILES = 64
"""Descriptors that this process needs beside one an episode."""
_WRITTEN = "something else was written to the environment's channel"
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH")
"""Variables that a shipped environment sees; code of the policy runs there."""


class _Episode:
    """An episode, what it was asked, and the lines to its process."""

    def __init__(self, key: Key | None, first: Mapping[str, Any]) -> None:
        self.key = key
        self.lines: Lines | None = None
        """None before there is room for its process."""
        self.ready = False
        self.leaving = False
        self.began_again = False
        self.since = time.monotonic()
        self.over: Outcome | None = None
        """What it ended with while nothing was asked of it."""
        self._messages = [encode(first)]
        self.answered, self.told = 0, 0
        """Messages that its process has answered, and answers that were passed on."""

    @property
    def open_lines(self) -> Lines:
        assert self.lines is not None, "it was launched"
        return self.lines

    @property
    def asked(self) -> bool:
        """True if an answer is to be passed on."""
        return not self.leaving and self.told < len(self._messages)

    @property
    def busy(self) -> bool:
        return self.answered < len(self._messages)

    def was_asked(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """True if these are all that it was asked."""
        return self._messages == [encode(message) for message in messages]

    def launch(self, lines: Lines) -> None:
        self.lines = lines
        self.go_on()

    def ask(self, message: Mapping[str, Any]) -> None:
        """Let its process answer, after what it was asked before."""
        self._messages.append(encode(message))
        if self.lines is not None and self.answered == len(self._messages) - 1:
            self.go_on()

    def go_on(self) -> None:
        self.since = time.monotonic()
        self.open_lines.send(self._messages[self.answered])

    def begin_again(self) -> None:
        """Its process is lost."""
        self.lines, self.ready, self.began_again, self.answered = None, False, True, 0


class EnvironmentPool:
    """Episodes by their keys. Not safe for threads.

    A call raises UserError where the host was lost, and another one cannot load the environment as it was.
    """

    def __init__(self, name: str, options: Mapping[str, Any], limits: EpisodeLimits, at_once: int) -> None:
        """Load the environment and make it once; of its episodes, `at_once` have a process at the same time.
        Raises UserError: it cannot be loaded or made, this process may not open so many files, or this is not Linux."""
        self._name, self._limits, self._at_once = name, limits, at_once
        self._task = {"name": name, "options": dict(options), "limits": limits._asdict()}
        if sys.platform != "linux":
            raise self._unusable(f"environments run on Linux, and this is {sys.platform}")
        self._refuse_too_many()
        self._selector = selectors.DefaultSelector()
        self._episodes: dict[Key, _Episode] = {}
        self._waiting: deque[_Episode] = deque()
        self._open: set[_Episode] = set()
        """With a process, those that leave among them."""
        self._replies: deque[Reply] = deque()
        self._resting: dict[Key, None] = {}
        """Episodes that are not asked for a while, the first of them first."""
        self._looked = time.monotonic()
        """When the channels were read last."""
        self.description: dict[str, str] = {}
        """Name and digest of the source."""
        self._host: SupervisedProcess | None = None
        self._closed = False
        try:
            self._start_host()
            self._try_options()
        except BaseException:
            self.close()
            raise

    def begin(self, episode: Key, task: Task) -> None:
        """Start an episode, which waits where `at_once` others are open; an earlier one that rests ends."""
        if episode in self._resting:
            self.end(episode)
        assert not self._closed, "the pool is open"
        assert episode not in self._episodes, f"{episode} is open"
        begun = _Episode(episode, {"start": task_message(task)})
        self._episodes[episode] = begun
        self._waiting.append(begun)
        self._launch()

    def act(self, episode: Key, action: Action) -> None:
        asked = self._episodes[episode]
        assert not asked.asked, f"{episode} has not answered yet"
        if asked.over is not None:
            self._settle(asked, asked.over, 0.0)
            return
        asked.ask(action_message(action))
        if asked in self._open:
            self._watch(asked)

    def replies(self, wait: bool, most_seconds: float = math.inf) -> list[Reply]:
        """Replies that have come. An outcome ends its episode.

        Args:
            wait: for at least one, unless every open episode waits for an action; others may wait for room then.
            most_seconds: after which none is waited for.
        """
        self._move(0)
        until = time.monotonic() + most_seconds
        while wait and not self._replies and self._works() and (left := until - time.monotonic()) > 0:
            self._move(min(left, self._patience()))
        found = list(self._replies)
        self._replies.clear()
        return found

    def rest(self, episode: Key) -> None:
        """Nothing is asked of an open episode for a while: where others wait for a process, it ends."""
        if episode in self._episodes:
            self._resting[episode] = None

    def wake(self, episode: Key, task: Task, asked: Sequence[Action]) -> bool:
        self._resting.pop(episode, None)
        found = self._episodes.get(episode)
        if found is not None and found.was_asked([{"start": task_message(task)}, *map(action_message, asked)]):
            return True
        self.end(episode)
        return False

    def end(self, episode: Key) -> None:
        """Let the environment close, and kill what is left; of an episode that is over this does nothing."""
        self._resting.pop(episode, None)
        ended = self._episodes.pop(episode, None)
        if ended is None:
            return
        self._replies = deque(reply for reply in self._replies if reply[0] != episode)
        if ended in self._waiting:
            self._waiting.remove(ended)
        else:
            self._leave(ended)

    def close(self) -> None:
        """End all episodes and the host, and start nothing; a second call does nothing."""
        self._closed = True
        for episode in list(self._episodes):
            self.end(episode)
        self._waiting.clear()
        until = time.monotonic() + min(_CLOSING_SECONDS, self._limits.timeout_seconds)
        while self._open and (left := until - time.monotonic()) > 0:
            self._move(left)
        for open_one in list(self._open):
            self._drop(open_one)
        self._end_host()

    # The host

    def _start_host(self) -> SupervisedProcess:
        """The process that loads the environment. Raises UserError: it cannot; nothing of it is left then."""
        # Sets of strings have the same order in every run; threads of libraries, pyarrow's allocator among them, would
        # stay behind in a fork.
        passed = chosen_variables(_PASSED_ON) if self._name in SHIPPED_ENVIRONMENTS else variables()
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        single["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
        host = self._host = SupervisedProcess("fp8core.environments.child", {**passed, **single, "PYTHONHASHSEED": "0"})
        try:
            self._load(host.connection)
        except BaseException:
            self._end_host()
            raise
        return host

    def _load(self, connection: socket.socket) -> None:
        connection.settimeout(_START_SECONDS)
        try:
            connection.sendall(encode(self._task))
            with connection.makefile("rb") as lines:
                said = decode(lines.readline(_LOADED_BYTES))
        except TimeoutError as error:
            raise self._unusable(f"it was not imported after {_START_SECONDS:g} s") from error
        except (ValueError, OSError) as error:
            raise self._unusable("its process ended while it was imported, or something else was written") from error
        if "loaded" not in said:
            raise self._unusable(str(said.get("failed", _WRITTEN)))
        if self.description and self.description != said["loaded"]:
            raise self._unusable(f"it changed while it was used: {self.description}, now {said['loaded']}")
        self.description = said["loaded"]
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, None)

    def _end_host(self) -> None:
        if self._host is None:
            return
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._host.connection)
        self._host.end()
        self._host = None

    def _try_options(self) -> None:
        trial = _Episode(None, {"construct": True})
        self._waiting.append(trial)
        self._launch()
        while trial in self._waiting or trial in self._open:
            self._move(self._patience())
        if trial.over is not None:
            raise self._unusable(trial.over.detail)

    # Episodes

    def _launch(self) -> None:
        """Give those that wait a process, as far as there is room, or as episodes that rest make some.

        Where the host is lost, another one loads the environment first. Raises UserError: it cannot.
        """
        leaving = sum(episode.leaving for episode in self._open)
        while self._resting and len(self._waiting) > self._at_once - len(self._open) + leaving:
            self.end(next(iter(self._resting)))
            leaving += 1
        while self._waiting and len(self._open) < self._at_once:
            host = self._host or self._start_host()
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    socket.send_fds(host.connection, [b"e"], [theirs.fileno()])
                except (BlockingIOError, BrokenPipeError, ConnectionResetError):
                    # The host is busy, or gone, which is noticed when it is read from.
                    ours.close()
                    return
            episode, lines = self._waiting.popleft(), Lines(ours, self._limits.reply_bytes + _ENVELOPE_BYTES)
            self._open.add(episode)
            self._selector.register(lines, selectors.EVENT_READ, episode)
            episode.launch(lines)
            self._watch(episode)

    def _move(self, seconds: float) -> None:
        """Wait at most so long for an event, and take in what has come; end what is late."""
        self._launch()
        unwatched = time.monotonic() - self._looked
        found = self._selector.select(seconds)
        self._looked = time.monotonic()
        for key, events in found:
            episode = key.data
            if episode is None:
                # Something outside has killed it, and with it all episodes: the ends of their channels are read next.
                self._end_host()
                continue
            # A part that lay in the channel was in time. The rest may have waited until this process read it.
            episode.since = min(self._looked, episode.since + unwatched)
            if events & selectors.EVENT_WRITE:
                episode.open_lines.write()
                self._watch(episode)
            if events & selectors.EVENT_READ:
                self._take_in(episode)
        self._end_late()
        self._launch()

    def _end_late(self) -> None:
        """End what was late when the channels were read; what that took is nobody's fault."""
        for episode in [episode for episode in self._open if self._looked > self._deadline(episode)]:
            if episode.leaving:
                self._drop(episode)
            elif episode.ready:
                self._over(episode, Outcome("timeout", detail=f"no reply after {self._limits.timeout_seconds:g} s"))
            else:
                self._over(episode, Outcome("timeout", detail=f"no process after {_START_SECONDS:g} s"))

    def _take_in(self, episode: _Episode) -> None:
        lines, ended = episode.open_lines.read()
        for line in filter(None, lines):
            if episode not in self._open:
                return
            self._take_line(episode, line)
        if ended and episode in self._open:
            self._lost(episode, Outcome("crashed", detail="its process is gone, and its supervisor too"))

    def _take_line(self, episode: _Episode, line: bytes) -> None:
        if len(line) > self._limits.reply_bytes + _ENVELOPE_BYTES:
            most = self._limits.reply_bytes
            self._over(episode, Outcome("crashed", detail=f"more than {most:,} bytes without the end of a reply"))
            return
        try:
            message = decode(line)
            if "ended" in message:
                outcome, outside = self._ending(message["ended"]), message["ended"] in FROM_OUTSIDE
                (self._lost if outside else self._over)(episode, outcome)
            elif episode.leaving:
                return
            elif "failed" in message:
                self._over(episode, Outcome("crashed", detail=printable(str(message["failed"]))[:DETAIL_CHARACTERS]))
            elif not episode.ready and message == {"ready": True}:
                episode.ready, episode.since = True, time.monotonic()
            elif episode.key is None:
                episode.leaving = True
            elif not episode.ready or not episode.busy:
                raise ValueError("nothing was asked")
            else:
                seconds = message.pop("seconds")
                if type(seconds) is not float or not 0 <= seconds < float("inf"):
                    raise ValueError("no time")
                self._answer(episode, read_reply(message, episode.answered == 0), seconds)
        except (ValueError, KeyError, RecursionError):
            self._over(episode, Outcome("crashed", detail=_WRITTEN))

    def _ending(self, ended: Any) -> Outcome:
        if ended == TOO_MANY_PROCESSES:
            return Outcome("crashed", detail=f"more than {self._limits.processes} processes")
        if type(ended) is not int or not (0 <= ended < 256 or -ended in {*signal.Signals}):
            raise ValueError("no end of a process")
        if ended == -CPU_SIGNAL:
            return Outcome("timeout", detail=f"more than {self._limits.cpu_seconds:g} s of processor time")
        return Outcome("crashed", detail=described(ended))

    def _answer(self, episode: _Episode, reply: Turn | Outcome, seconds: float) -> None:
        """Pass a reply on, unless it was before the process was lost."""
        episode.answered += 1
        if episode.answered > episode.told:
            self._settle(episode, reply, seconds)
        elif isinstance(reply, Outcome):
            self._over(episode, Outcome("crashed", detail="it ended earlier when it was asked the same again"))
        elif episode.busy:
            episode.go_on()
            self._watch(episode)

    def _settle(self, episode: _Episode, reply: Turn | Outcome, seconds: float) -> None:
        """Pass a reply on; with an outcome the episode is over."""
        episode.told += 1
        assert episode.key is not None, "a trial has no replies"
        self._replies.append((episode.key, reply, seconds))
        if isinstance(reply, Outcome):
            del self._episodes[episode.key]
            if episode in self._open:
                self._leave(episode)

    def _over(self, episode: _Episode, outcome: Outcome) -> None:
        """Its process is of no more use."""
        self._drop(episode)
        if episode.leaving:
            return
        if episode.asked and episode.key is not None:
            self._settle(episode, outcome, time.monotonic() - episode.since)
        else:
            episode.over = outcome

    def _lost(self, episode: _Episode, outcome: Outcome) -> None:
        """Something outside has ended its process."""
        if episode.began_again or episode.leaving or episode.key is None:
            self._over(episode, outcome)
            return
        self._drop(episode)
        episode.begin_again()
        self._waiting.appendleft(episode)

    def _leave(self, episode: _Episode) -> None:
        """Ask the environment to close; it is killed later if it does not."""
        episode.leaving, episode.since = True, time.monotonic()
        episode.open_lines.end_sending()

    def _drop(self, episode: _Episode) -> None:
        """Close our end, upon which its supervisor kills what is left."""
        self._selector.unregister(episode.open_lines)
        episode.open_lines.close()
        self._open.remove(episode)

    def _watch(self, episode: _Episode) -> None:
        if episode in self._open:
            write = selectors.EVENT_WRITE if episode.open_lines.has_outgoing else 0
            self._selector.modify(episode.open_lines, selectors.EVENT_READ | write, episode)

    def _deadline(self, episode: _Episode) -> float:
        if episode.leaving or (episode.ready and episode.busy):
            return episode.since + self._limits.timeout_seconds
        return float("inf") if episode.ready else episode.since + _START_SECONDS

    def _works(self) -> bool:
        """True if a reply will come whatever the caller does."""
        has_room = len(self._open) < self._at_once or any(episode.leaving for episode in self._open)
        return any(episode.asked for episode in self._open) or (bool(self._waiting) and has_room)

    def _patience(self) -> float:
        """Seconds to the next deadline, or to the next try to launch."""
        now = time.monotonic()
        ends = [self._deadline(episode) for episode in self._open]
        if self._waiting and len(self._open) < self._at_once:
            ends.append(now + 0.01)
        return min(max(0.0, min(ends, default=now) - now), _START_SECONDS)

    def _refuse_too_many(self) -> None:
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if allowed != resource.RLIM_INFINITY and self._at_once + _OTHER_FILES > allowed:
            raise UserError(
                f"environment.at_once={self._at_once} needs {self._at_once + _OTHER_FILES} open files, and "
                f"`ulimit -n` allows {allowed}"
            )

    def _unusable(self, reason: str) -> UserError:
        return UserError(f"environment.name={self._name}: {printable(reason)}")
