"""Environments of many episodes, live or recorded, and the records of their turns.

Each live one has a process of its own (processes/pool.py), which ends its own episode at most.
"""

import hashlib
import json
import math
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Any, Protocol, cast

from fp8core.environments.protocol import Action, Ending, Outcome, Reply, Said, Task, Tool, Turn, TurnRecord
from fp8core.errors import NotRecordedError, UserError
from fp8core.processes.pool import Failure, Limits, PoolProcess, ProcessPool
from fp8core.rewards.scorer import Key

_CLOSING_SECONDS = 2.0
_QUESTION_CHARACTERS = 80


class Pool(Protocol):
    """Environments of open episodes."""

    def begin(self, episode: Key, task: Task) -> None: ...

    def act(self, episode: Key, action: Action) -> None: ...

    def replies(self, wait: bool, most_seconds: float = math.inf) -> list[Reply]:
        """`wait`: for at least one, if it comes in time."""

    def rest(self, episode: Key) -> None:
        """It may be ended where others need its room."""

    def wake(self, episode: Key, task: Task, actions: Sequence[Action]) -> bool:
        """True if it is open, began with this task and was asked exactly this; else it ends."""

    def end(self, episode: Key) -> None: ...


@dataclass(eq=False)
class _Episode:
    """An episode, what it was asked, and its reply to come; it has a process as soon as there is room for one."""

    key: Key
    requests: list[Task | Action]
    process: PoolProcess | None = None
    reply: Future[tuple[Any, float]] | None = None


class EnvironmentPool:
    """A live `Pool`, for one thread. A call raises UserError where the host was killed."""

    def __init__(self, name: str, options: Mapping[str, Any], limits: Limits, max_concurrent_episodes: int) -> None:
        """Load the environment; of its episodes, `max_concurrent_episodes` have a process at the same time.

        Raises UserError: it cannot be loaded, or this is not Linux.
        """
        if sys.platform != "linux":
            raise UserError(f"environment.name={name}: environments run on Linux, and this is {sys.platform}")
        settings = {"name": name, "options": dict(options)}
        function = "fp8core.environments.episode_process:serve_environment"
        self._pool = ProcessPool(f"environment.name={name}", function, settings, limits)
        self.description = self._pool.description
        self._limits = limits
        self._max_concurrent_episodes = max_concurrent_episodes
        self._threads = ThreadPoolExecutor(max_concurrent_episodes, "environment")
        self._closing = set[Future[None]]()
        self._episodes: dict[Key, _Episode] = {}
        self._waiting = deque[_Episode]()
        self._resting: dict[Key, None] = {}
        """Episodes that are not asked for a while, the first of them first."""

    def begin(self, episode: Key, task: Task) -> None:
        if episode in self._resting:
            self.end(episode)
        assert episode not in self._episodes, f"{episode} is open"
        state = self._episodes[episode] = _Episode(episode, [task])
        self._waiting.append(state)
        self._launch()

    def act(self, episode: Key, action: Action) -> None:
        state = self._episodes[episode]
        assert state.process is not None, f"{episode} waits for a process"
        assert state.reply is None, f"{episode} has not answered yet"
        state.requests.append(action)
        state.reply = self._threads.submit(state.process.ask, action)

    def replies(self, wait: bool, most_seconds: float = math.inf) -> list[Reply]:
        """Replies that have come. `wait`: for at least one, unless every open episode waits for an action."""
        replies = list[Reply]()
        until = time.monotonic() + most_seconds
        while True:
            self._launch()
            busy = {episode.reply: episode for episode in self._episodes.values() if episode.reply is not None}
            patience = max(0.0, until - time.monotonic()) if wait and not replies else 0.0
            ready, _ = wait_for(busy, None if patience == math.inf else patience, FIRST_COMPLETED)
            if not ready:
                return replies
            for episode in map(busy.__getitem__, ready):
                assert episode.reply is not None, "it is done"
                (reply, seconds), episode.reply = episode.reply.result(), None
                if isinstance(reply, Failure):
                    reply = Outcome(reply.outcome, detail=reply.detail)
                if isinstance(reply, Outcome):
                    self.end(episode.key)
                replies.append((episode.key, reply, seconds))

    def rest(self, episode: Key) -> None:
        if episode in self._episodes:
            self._resting[episode] = None

    def wake(self, episode: Key, task: Task, actions: Sequence[Action]) -> bool:
        self._resting.pop(episode, None)
        state = self._episodes.get(episode)
        if state is not None and state.requests == [task, *actions]:
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
        while self._resting and len(self._episodes) > self._max_concurrent_episodes:
            self.end(next(iter(self._resting)))
        while self._waiting and len(self._episodes) - len(self._waiting) < self._max_concurrent_episodes:
            episode = self._waiting[0]
            episode.process = self._pool.start()
            self._waiting.popleft()
            episode.reply = self._threads.submit(episode.process.ask, episode.requests[0])


class RecordedPool:
    """A `Pool` that replies as a run has recorded it, for a replay."""

    def __init__(self, turns: Mapping[Key, Sequence[TurnRecord]]) -> None:
        self._recorded_turns = turns
        self._next: dict[Key, Iterator[TurnRecord]] = {}
        self._replies = list[Reply]()

    def begin(self, episode: Key, task: Task) -> None:
        if episode not in self._recorded_turns:
            question = shorten(task.question, _QUESTION_CHARACTERS, placeholder="...")
            raise NotRecordedError(
                f'sample {episode[1]} of the prompt "{question}": the run played no such episode in this step, so no '
                "answers are recorded"
            )
        self._next[episode] = iter(self._recorded_turns[episode])
        self._answer(episode)

    def act(self, episode: Key, action: Action) -> None:
        self._answer(episode)

    def replies(self, wait: bool, most_seconds: float = math.inf) -> list[Reply]:
        replies = self._replies
        self._replies = []
        return replies

    def rest(self, episode: Key) -> None:
        pass

    def wake(self, episode: Key, task: Task, actions: Sequence[Action]) -> bool:
        return episode in self._next

    def end(self, episode: Key) -> None:
        self._next.pop(episode, None)

    def _answer(self, episode: Key) -> None:
        turn = next(self._next[episode], None)
        reply = Outcome("crashed", detail="nothing was recorded of a turn so late") if turn is None else reply_of(turn)
        self._replies.append((episode, reply, 0.0))


def opening_record(reply: Turn | Outcome, seconds: float) -> TurnRecord:
    """Turn 0."""
    opening = ""
    if isinstance(reply, Turn):
        tools = [{**tool._asdict(), "parameters": dict(tool.parameters)} for tool in reply.tools]
        opening = json.dumps({"messages": _dicts(reply.messages), "tools": tools})
    return _record(0, reply, opening, seconds)


def turn_record(turn: int, action: Action, reply: Turn | Outcome, seconds: float) -> TurnRecord:
    """A turn of the policy, without its place in the completion."""
    record = _record(turn, reply, json.dumps(_dicts(reply.messages)) if isinstance(reply, Turn) else "", seconds)
    return replace(record, text=action.text, calls=json.dumps(_dicts(action.calls)), malformed=action.malformed)


def _record(turn: int, reply: Turn | Outcome, said: str, seconds: float) -> TurnRecord:
    # JSON is of ASCII: a lone surrogate has no bytes.
    info = json.dumps(dict(reply.info), sort_keys=True) if reply.info else ""
    observation = hashlib.sha256(said.encode()).hexdigest()
    return TurnRecord(turn, said, observation, reply.reward, reply.failed, info, seconds=seconds)


def _dicts(values: Iterable[Any]) -> list[dict[str, Any]]:
    return [value._asdict() for value in values]


def reply_of(record: TurnRecord) -> Turn | Outcome:
    info = json.loads(record.info or "{}")
    if not record.said:
        return Outcome(cast(Ending, record.outcome), record.reward, record.failed, record.detail, info)
    said = json.loads(record.said)
    messages, tools = (said, []) if record.turn else (said["messages"], said["tools"])
    turn = Turn(tuple(Said(**message) for message in messages), tuple(Tool(**tool) for tool in tools))
    return replace(turn, reward=record.reward, failed=record.failed, info=info)
