"""Episodes of an environment, each in a process of its own that is killed with all it started (processes/pool.py).

An environment ends its own episode at most. A crash, a hang, too much memory or output have an outcome with a named
reason.
"""

import math
import resource
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from fp8core.environments.episode_process import Trial
from fp8core.environments.protocol import Action, Outcome, Reply, Task, Turn
from fp8core.environments.tool_calls import MOST_CALLS, is_too_deep
from fp8core.errors import UserError, printable
from fp8core.processes.host import Limits
from fp8core.processes.pool import Answer, Failure, PoolProcess, ProcessPool
from fp8core.rewards.scorer import Key

_CLOSING_SECONDS = 2.0
_OTHER_FILES = 64
"""Descriptors that this process needs beside one an episode."""


class _Episode:
    """An episode, and what it was asked.

    Attributes:
        process: None before there is room for one.
        over: what it ended with while nothing was asked of it.
    """

    def __init__(self, key: Key, task: Task) -> None:
        self.key = key
        self.asked: list[Task | Action] = [task]
        self.process: PoolProcess | None = None
        self.busy = True
        self.since = time.monotonic()
        self.over: Outcome | None = None


class EnvironmentPool:
    """Episodes by their keys. Not safe for threads.

    A call raises UserError where the host was lost, and another one cannot load the environment as it was.

    Attributes:
        description: name and digest of the source.
    """

    def __init__(
        self, name: str, options: Mapping[str, Any], limits: Limits, at_once: int, reply_bytes: int = 1 << 20
    ) -> None:
        """Load the environment and make it once; of its episodes, `at_once` have a process at the same time.

        `reply_bytes`: of the texts of one reply. Raises UserError: it cannot be loaded or made, this process may not
        open so many files, or this is not Linux.
        """
        self._limits, self._at_once = limits, at_once
        self._episodes: dict[Key, _Episode] = {}
        self._waiting = deque[_Episode]()
        self._open: dict[PoolProcess, _Episode] = {}
        self._leaving = set[PoolProcess]()
        self._replies = deque[Reply]()
        self._resting: dict[Key, None] = {}
        """Episodes that are not asked for a while, the first of them first."""
        if sys.platform != "linux":
            raise UserError(f"environment.name={name}: environments run on Linux, and this is {sys.platform}")
        self._refuse_too_many()
        settings = {"name": name, "options": dict(options), "reply_bytes": reply_bytes}
        function = "fp8core.environments.episode_process:serve_environment"
        self._pool = ProcessPool(f"environment.name={name}", function, settings, limits)
        self.description = self._pool.description
        try:
            self._try_options()
        except BaseException:
            self._pool.close()
            raise

    def begin(self, episode: Key, task: Task) -> None:
        """Start an episode, which waits where `at_once` others are open; an earlier one that rests ends."""
        if episode in self._resting:
            self.end(episode)
        assert episode not in self._episodes, f"{episode} is open"
        begun = self._episodes[episode] = _Episode(episode, task)
        self._waiting.append(begun)
        self._launch()

    def act(self, episode: Key, action: Action) -> None:
        asked = self._episodes[episode]
        assert not asked.busy, f"{episode} has not answered yet"
        asked.busy, asked.since = True, time.monotonic()
        asked.asked.append(action)
        if asked.over is not None:
            self._settle(asked, asked.over, 0.0)
        elif asked.process is not None:
            asked.process.ask(_askable(action))

    def replies(self, wait: bool, most_seconds: float = math.inf) -> list[Reply]:
        """Replies that have come. An outcome ends its episode.

        Args:
            wait: for at least one, unless every open episode waits for an action; others may wait for room then.
            most_seconds: after which none is waited for.
        """
        self._move(0)
        until = time.monotonic() + most_seconds
        while wait and not self._replies and self._works() and (left := until - time.monotonic()) > 0:
            self._move(left)
        found = list(self._replies)
        self._replies.clear()
        return found

    def rest(self, episode: Key) -> None:
        """Nothing is asked of an open episode for a while: where others wait for a process, it ends."""
        if episode in self._episodes:
            self._resting[episode] = None

    def wake(self, episode: Key, task: Task, asked: Sequence[Action]) -> bool:
        """True if an episode is open that began with this task and was asked exactly this; else it ends."""
        self._resting.pop(episode, None)
        found = self._episodes.get(episode)
        if found is not None and found.asked == [task, *asked]:
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
        elif ended.process is not None:
            self._leave(ended.process)

    def close(self) -> None:
        """End all episodes and the host, and start nothing; a second call does nothing."""
        self._waiting.clear()
        for episode in list(self._episodes):
            self.end(episode)
        until = time.monotonic() + min(_CLOSING_SECONDS, self._limits.timeout_seconds)
        while self._leaving and (left := until - time.monotonic()) > 0:
            self._take_in(left)
        self._pool.close()

    def _try_options(self) -> None:
        trial = self._pool.start()
        trial.ask(Trial())
        while not (found := self._pool.wait(math.inf)):
            pass
        ((_, said),) = found[:1]
        failed = said.detail if isinstance(said, Failure) else said.reply
        if failed:
            raise self._pool.unusable(printable(failed))
        self._leave(trial)

    def _launch(self) -> None:
        """Give those that wait a process, as far as there is room, or as episodes that rest make some.

        Raises UserError: the host was lost, and another cannot load the environment.
        """
        while self._resting and len(self._waiting) > self._at_once - len(self._open):
            self.end(next(iter(self._resting)))
        while self._waiting and len(self._pool.processes) < self._at_once:
            episode = self._waiting.popleft()
            episode.process = self._pool.start()
            self._open[episode.process] = episode
            episode.process.ask(episode.asked[0])

    def _move(self, seconds: float) -> None:
        """Wait at most so long for an event, and take in what has come."""
        self._launch()
        self._take_in(seconds)
        self._launch()

    def _take_in(self, seconds: float) -> None:
        for process, said in self._pool.wait(seconds):
            episode = self._open.get(process)
            if isinstance(said, Failure):
                self._leaving.discard(process)
            if episode is None:
                continue
            if isinstance(said, Answer):
                self._settle(episode, said.reply, said.seconds)
            else:
                self._open.pop(process)
                episode.process = None
                episode.over = Outcome(said.outcome, detail=said.detail)
                if episode.busy:
                    self._settle(episode, episode.over, time.monotonic() - episode.since)

    def _settle(self, episode: _Episode, reply: Turn | Outcome, seconds: float) -> None:
        """Pass a reply on; with an outcome the episode is over."""
        episode.busy = False
        self._replies.append((episode.key, reply, seconds))
        if isinstance(reply, Outcome):
            del self._episodes[episode.key]
            if episode.process is not None:
                self._leave(episode.process)

    def _leave(self, process: PoolProcess) -> None:
        """It closes and ends by itself; the pool kills it if it does not."""
        self._open.pop(process, None)
        if process in self._pool.processes:
            self._leaving.add(process)
            process.ask(None)

    def _works(self) -> bool:
        """True if a reply will come whatever the caller does."""
        return any(episode.busy for episode in self._open.values()) or bool(self._waiting and self._leaving)

    def _refuse_too_many(self) -> None:
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = self._at_once + _OTHER_FILES
        if allowed != resource.RLIM_INFINITY and needed > allowed:
            raise UserError(
                f"environment.at_once={self._at_once} needs {needed} open files, and `ulimit -n` allows {allowed}"
            )


def _askable(action: Action) -> Action:
    """An action of bounded size; calls that are too many or nested too deeply are told as malformed."""
    if len(action.calls) > MOST_CALLS:
        return Action(
            action.text, (), f"{len(action.calls)} calls in a turn; at most {MOST_CALLS} are made", action.finish
        )
    if any(is_too_deep(dict(call.arguments)) for call in action.calls):
        return Action(action.text, (), "arguments nested too deeply, or a number too long", action.finish)
    return action
