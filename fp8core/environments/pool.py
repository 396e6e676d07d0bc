"""Episodes of an environment, each in a process of its own that is killed with all it started (processes/pool.py).

An environment ends its own episode at most. A crash, a hang, too much memory or output have an outcome with a named
reason.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from queue import Empty, SimpleQueue
from typing import Any

from fp8core.environments.protocol import Action, Outcome, Reply, Task
from fp8core.errors import UserError
from fp8core.processes.host import Limits
from fp8core.processes.pool import Answer, Failure, PoolProcess, ProcessPool
from fp8core.rewards.scorer import Key

_CLOSING_SECONDS = 2.0


class _Episode:
    """An episode, and what it was asked; it has a process as soon as there is room for one."""

    def __init__(self, key: Key, task: Task) -> None:
        self.key = key
        self.asked: list[Task | Action] = [task]
        self.process: PoolProcess | None = None
        self.busy = False


class EnvironmentPool:
    """Episodes by their keys; it is moved by calls of one thread. Satisfies `rollout.episodes.Pool`.

    A call raises UserError where the host of its processes was killed.
    """

    def __init__(
        self, name: str, options: Mapping[str, Any], limits: Limits, at_once: int, reply_bytes: int = 1 << 20
    ) -> None:
        """Load the environment; of its episodes, `at_once` have a process at the same time.

        `reply_bytes`: of the texts of one reply. Raises UserError: it cannot be loaded, or this is not Linux.
        """
        if sys.platform != "linux":
            raise UserError(f"environment.name={name}: environments run on Linux, and this is {sys.platform}")
        settings = {"name": name, "options": dict(options), "reply_bytes": reply_bytes}
        function = "fp8core.environments.episode_process:serve_environment"
        self._pool = ProcessPool(f"environment.name={name}", function, settings, limits)
        self.description = self._pool.description
        self._limits, self._at_once = limits, at_once
        self._threads = ThreadPoolExecutor(at_once, "environment")
        self._closing = set[Future[None]]()
        self._episodes: dict[Key, _Episode] = {}
        self._waiting = deque[_Episode]()
        self._said = SimpleQueue[tuple[_Episode, Answer | Failure]]()
        self._resting: dict[Key, None] = {}
        """Episodes that are not asked for a while, the first of them first."""

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
        asked.asked.append(action)
        self._ask(asked, action)

    def replies(self, wait: bool, most_seconds: float = math.inf) -> list[Reply]:
        """Replies that have come. An outcome ends its episode.

        Args:
            wait: for at least one, unless every open episode waits for an action; others may wait for room then.
            most_seconds: after which none is waited for.
        """
        found, until = list[Reply](), time.monotonic() + most_seconds
        while True:
            self._launch()
            working = any(episode.busy for episode in self._episodes.values())
            patience = until - time.monotonic() if wait and working and not found else 0.0
            try:
                block = patience > 0
                episode, said = self._said.get(block, patience if block and patience < math.inf else None)
            except Empty:
                return found
            if self._episodes.get(episode.key) is not episode:
                continue  # It was ended meanwhile.
            episode.busy = False
            reply = said.reply if isinstance(said, Answer) else Outcome(said.outcome, detail=said.detail)
            if isinstance(reply, Outcome):
                self.end(episode.key)
            found.append((episode.key, reply, said.seconds))

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
        if ended.process is None:
            self._waiting.remove(ended)
            return
        closing = self._threads.submit(ended.process.close)
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def close(self) -> None:
        """End all episodes and the host; a second call does nothing."""
        for episode in list(self._episodes):
            self.end(episode)
        wait_for(list(self._closing), min(_CLOSING_SECONDS, self._limits.timeout_seconds))
        self._pool.close()
        self._threads.shutdown()

    def _launch(self) -> None:
        """Give those that wait a process, as far as there is room, or as episodes that rest make some."""
        while self._resting and len(self._episodes) > self._at_once:
            self.end(next(iter(self._resting)))
        while self._waiting and len(self._episodes) - len(self._waiting) < self._at_once:
            episode = self._waiting[0]
            episode.process = self._pool.start()
            self._waiting.popleft()
            self._ask(episode, episode.asked[0])

    def _ask(self, episode: _Episode, request: Task | Action) -> None:
        process = episode.process
        assert process is not None, f"{episode.key} has no process"
        episode.busy = True
        self._threads.submit(lambda: self._said.put((episode, process.ask(request))))
