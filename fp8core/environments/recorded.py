"""Episodes that answer from records, and what differs between a record and what happens again."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields

from fp8core.environments.pool import Key, Reply
from fp8core.environments.protocol import Action, Outcome, Task, Turn
from fp8core.errors import UserError


@dataclass(frozen=True)
class RecordedEpisode:
    """Tasks, actions and replies of an episode.

    Attributes:
        replies: of the environment, the answer to `start` first; an Outcome, if there was one, last.
        actions: of the policy; `replies[n + 1]` answers `actions[n]`.
        task: what it began with; None where that is not compared.
    """

    replies: tuple[Turn | Outcome, ...]
    actions: tuple[Action, ...]
    task: Task | None = None


class RecordedPool:
    """The interface of EnvironmentPool, answered from records: no environment runs, and no reply takes time.

    An episode that was ended before an outcome had no reply to its last action, and has none here.
    """

    def __init__(self, episodes: Mapping[Key, RecordedEpisode], description: Mapping[str, str]) -> None:
        """`description` is that of the pool whose episodes these were."""
        self.description = dict(description)
        self._episodes = episodes
        self._answered: dict[Key, int] = {}
        """How many replies each open episode has given."""
        self._replies: deque[Reply] = deque()

    def begin(self, episode: Key, task: Task) -> None:
        """Raises UserError: it was not recorded, or began with another task."""
        assert episode not in self._answered, f"{episode} is open"
        recorded = self._episodes.get(episode)
        if recorded is None:
            raise UserError(f"{_named(episode)}: no such episode was recorded")
        if recorded.task is not None and (said := difference(recorded.task, task)):
            raise UserError(f"{_named(episode)}: its task differs: {said}")
        self._answered[episode] = 0
        self._reply(episode)

    def act(self, episode: Key, action: Action) -> None:
        """Raises UserError: the policy wrote something else than was recorded; the line names the first difference."""
        recorded, turn = self._episodes[episode], self._answered[episode] - 1
        if turn >= len(recorded.actions) or turn + 1 >= len(recorded.replies):
            raise UserError(f"{_named(episode, turn)}: the recorded episode ended before it")
        if said := difference(recorded.actions[turn], action):
            raise UserError(f"{_named(episode, turn)}: the action differs: {said}")
        self._reply(episode)

    def replies(self, wait: bool) -> list[Reply]:
        """All that are due; `wait` changes nothing, since none is late."""
        found = list(self._replies)
        self._replies.clear()
        return found

    def end(self, episode: Key) -> None:
        """Forget an episode."""
        self._answered.pop(episode, None)
        self._replies = deque(reply for reply in self._replies if reply[0] != episode)

    def close(self) -> None:
        self._answered.clear()
        self._replies.clear()

    def _reply(self, episode: Key) -> None:
        replies, turn = self._episodes[episode].replies, self._answered[episode]
        if turn >= len(replies):
            raise UserError(f"{_named(episode)}: the recorded episode has no reply")
        reply = replies[turn]
        self._answered[episode] += 1
        self._replies.append((episode, reply, 0.0))
        if isinstance(reply, Outcome):
            del self._answered[episode]


def difference(recorded: object, again: object) -> str:
    """The first field in which two tasks, actions or replies differ, with both values; empty where they are equal."""
    if type(recorded) is not type(again):
        return f"{type(recorded).__name__} was recorded, and now it is {type(again).__name__}"
    assert isinstance(recorded, Task | Action | Turn | Outcome), "of episodes"
    for field in fields(recorded):
        was, now = getattr(recorded, field.name), getattr(again, field.name)
        if was != now:
            return f"{field.name} {_shown(was, now)}"
    return ""


_SHOWN = 60


def _shown(was: object, now: object) -> str:
    """Both values around the place where they part."""
    before, after = repr(was), repr(now)
    parts = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), 0)
    begin = max(0, parts - _SHOWN // 2)
    cut = [f"{'...' if begin else ''}{text[begin : begin + _SHOWN]}" for text in (before, after)]
    return f"was {cut[0]}, and is {cut[1]}"


def _named(episode: Key, turn: int | None = None) -> str:
    group, sample = episode
    return f"group {group}, sample {sample}" + ("" if turn is None else f", turn {turn}")
