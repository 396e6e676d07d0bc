"""Environments in this process that answer by a function, late and in any order, as processes do."""

import math
import random
from collections.abc import Callable, Sequence

from fp8core.environments.protocol import Action, Outcome, Reply, Said, Task, Tool, Turn
from fp8core.rewards.scorer import Key

Answer = Callable[[Key, int, Action], Turn | Outcome]
CALCULATOR = Tool(
    "calculate",
    "Calculates.",
    {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
)


class ScriptedPool:
    """Satisfies `environments.pool.Pool`: the answer to a turn is `answer(episode, turns before, action)`.

    Attributes:
        acted: every action, by episode.
        ended: episodes in the order in which they were released.
    """

    def __init__(self, answer: Answer, order: int | None = None, opening: Turn | Outcome | None = None) -> None:
        """`order`: seed of the order of replies, of which some are held back; None: at once, as they came."""
        self._answer, self._opening = answer, opening
        self._random = None if order is None else random.Random(order)
        self._replies: list[Reply] = []
        self.acted: dict[Key, list[Action]] = {}
        self.ended: list[Key] = []
        self.resting: set[Key] = set()

    def begin(self, episode: Key, task: Task) -> None:
        self.acted[episode] = []
        first = Turn((*task.before, Said("user", task.question)), (CALCULATOR,))
        self._replies.append((episode, self._opening or first, 0.25))

    def act(self, episode: Key, action: Action) -> None:
        before = self.acted[episode]
        self._replies.append((episode, self._answer(episode, len(before), action), 0.5))
        before.append(action)

    def replies(self, wait: bool, most_seconds: float = math.inf) -> list[Reply]:
        assert self._replies or not wait, "nothing would ever come"
        found, self._replies = self._replies, []
        if self._random is not None:
            self._random.shuffle(found)
            count = self._random.randint(1 if wait else 0, len(found))
            found, self._replies = found[:count], found[count:]
        return found

    def rest(self, episode: Key) -> None:
        self.resting.add(episode)

    def wake(self, episode: Key, task: Task, asked: Sequence[Action]) -> bool:
        """As of a pool that ends every second episode that rests."""
        rested = episode in self.resting
        self.resting.discard(episode)
        assert episode not in self.acted or self.acted[episode] == list(asked)
        return episode in self.acted and not (rested and sum(episode) % 2)

    def end(self, episode: Key) -> None:
        self.ended.append(episode)
