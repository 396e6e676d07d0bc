"""Episodes: the policy and an environment speak in turns, many episodes at once.

Each turn of an episode is a request that goes on from all tokens so far (`PromptGroup.begun`). They are drawn by the
episode's own seed at its own positions. The order of replies decides when a token is written, and never which.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Protocol

from fp8core.environments.chat import Talk
from fp8core.environments.protocol import Action, Outcome, Reply, Task, Turn
from fp8core.rewards.scorer import Key
from fp8core.rollout.engine import PromptGroup, RolloutEngine, Sampling, StreamingEngine
from fp8core.rollout.episode import Begun, Episode, OpenEpisode, TurnBudget

_LOOK_SECONDS = 1.0
"""Longest wait for environments before the caller may look after something else."""
_OTHERWISE = (
    "it answered otherwise when it was asked the same again, as its process was needed by others (environment.at_once)"
)
_TOGETHER = 8
"""Answers that enter the engine together: the first ones are computed while the next ones are put into tokens."""
_Repeated = deque[tuple[Turn, Action | None]]
"""What an environment is to say again, and what it is asked then; the last one may be yet to be answered (None)."""


class Pool(Protocol):
    """Environments of open episodes (`environments.pool.EnvironmentPool`)."""

    def begin(self, episode: Key, task: Task) -> None: ...

    def act(self, episode: Key, action: Action) -> None: ...

    def replies(self, wait: bool, most_seconds: float = math.inf) -> list[Reply]:
        """`wait`: for at least one, if it comes in time."""
        ...

    def rest(self, episode: Key) -> None:
        """It may be ended where others need its room."""
        ...

    def wake(self, episode: Key, task: Task, asked: Sequence[Action]) -> bool:
        """True if an episode is open that began with this task and was asked exactly this; else it ends."""
        ...

    def end(self, episode: Key) -> None: ...


@dataclass(frozen=True)
class MultiTurn:
    """Environments, the form of conversations with them, their tasks, and budgets.

    Attributes:
        begun: episodes that go on, as a call has left or as a run has stored them. An environment that is closed is
            asked the same again; one that answers otherwise has crashed.
        room: tokens that an episode writes, at most to the end of one turn and its answer; None: to its end.
    """

    pool: Pool
    talk: Talk
    tasks: Mapping[Key, Task]
    budget: TurnBudget
    begun: Mapping[Key, Begun | Episode] = field(default_factory=dict)
    room: int | None = None


def one_turn_episodes(
    engine: RolloutEngine, groups: Sequence[PromptGroup], sampling: Sampling
) -> Iterator[list[Episode]]:
    prompts = {group.group: group.prompt for group in groups}
    left = sum(len(group.samples) for group in groups)
    for part in engine.generate(groups, sampling) if groups else ():
        left -= len(part)
        yield [Episode(done, prompts[done.group], (), "judge", 0.0, "") for done in part]
    assert left == 0, "the engine ended without all completions"


def run_episodes(
    engine: StreamingEngine, groups: Sequence[PromptGroup], sampling: Sampling, multi_turn: MultiTurn
) -> Iterator[list[Episode]]:
    """Play all episodes at once; each yield holds those that have finished since, in order of group and sample.

    One is empty after each second in which no environment answered: the caller may end it all then. With
    `MultiTurn.room` an episode has finished when it is over or has written so much.

    Raises UserError: the chat template rewrites what was before (`environments.chat`), or the engine refuses a request.
    """
    assert not sampling.report_experts, "experts are not recorded over several turns"
    pool, session = multi_turn.pool, engine.open_session(sampling)
    open_, repeated, finished = dict[Key, OpenEpisode](), dict[Key, _Repeated](), list[Episode]()

    def leave(episode: Episode) -> None:
        del open_[episode.key]
        (pool.rest if episode.goes_on else pool.end)(episode.key)
        finished.append(episode)

    try:
        open_.update((each.key, each) for each in _all_opened(groups, sampling.max_new_tokens, multi_turn))
        for key in [key for key, episode in open_.items() if not episode.heard]:
            pool.begin(key, open_[key].task)
        session.add(_requests([episode for episode in open_.values() if episode.heard]))
        while open_:
            wait = not session.busy
            replies = pool.replies(wait, _LOOK_SECONDS)
            if wait and not replies:
                yield []
            new = [*_new_replies(pool, replies, repeated)]
            for first in range(0, len(new), _TOGETHER):
                asked = list[OpenEpisode]()
                for key, reply, seconds in new[first : first + _TOGETHER]:
                    if (left := open_[key].hear(reply, seconds)) is None:
                        asked.append(open_[key])
                    else:
                        leave(left)
                session.add(_requests(asked))
            yield from _new(finished)
            for completion in session.step() if session.busy else []:
                episode = open_[completion.group, completion.sample]
                said = episode.speak(completion)
                if isinstance(said, Episode):
                    leave(said)
                elif again := _to_repeat(pool, episode):
                    repeated[episode.key] = again
                else:
                    pool.act(episode.key, said)
            yield from _new(finished)
    finally:
        for key in [*open_, *(one.key for one in finished)]:
            pool.end(key)
        session.close()


def _new_replies(pool: Pool, replies: Sequence[Reply], repeated: Mapping[Key, _Repeated]) -> Iterator[Reply]:
    for key, reply, seconds in sorted(replies, key=lambda answer: answer[0]):
        again = repeated.get(key)
        if not again:
            yield key, reply, seconds
        elif not _repeat_next(pool, key, reply, again):
            again.clear()
            yield key, Outcome("crashed", detail=_OTHERWISE), seconds


def _to_repeat(pool: Pool, episode: OpenEpisode) -> _Repeated:
    if pool.wake(episode.key, episode.task, episode.answered):
        return deque()
    pool.begin(episode.key, episode.task)
    return deque(zip_longest(episode.heard, episode.actions))


def _repeat_next(pool: Pool, key: Key, reply: Turn | Outcome, again: _Repeated) -> bool:
    """True for the answer of before, after which the environment is asked what it was asked before."""
    known, action = again.popleft()
    # Tools are told at the start only.
    same = isinstance(reply, Turn) and (reply if known.tools else replace(reply, tools=())) == known
    if same and action is not None:
        pool.act(key, action)
    return same


def _all_opened(groups: Sequence[PromptGroup], row_tokens: int, multi_turn: MultiTurn) -> Iterator[OpenEpisode]:
    for group in groups:
        for sample, seed in zip(group.samples, group.seeds, strict=True):
            key = group.group, sample
            begun = multi_turn.begun.get(key)
            if isinstance(begun, Episode):
                assert begun.state is not None, "it is over"
                episode = begun.state
            else:
                request = replace(group, samples=(sample,), seeds=(seed,))
                episode = OpenEpisode(request, multi_turn.tasks[key], multi_turn.talk, multi_turn.budget, row_tokens)
                if begun is not None:
                    episode.take_in(begun)
            episode.begin_call(multi_turn.room)
            yield episode


def _new(finished: list[Episode]) -> Iterator[list[Episode]]:
    if finished:
        yield sorted(finished, key=lambda episode: episode.key)
        finished.clear()


def _requests(asked: Sequence[OpenEpisode]) -> list[PromptGroup]:
    together: dict[tuple[int, tuple[int, ...], bool], list[OpenEpisode]] = {}
    for episode in asked:
        key = episode.request.group, episode.request.prompt, bool(episode.tokens)
        together.setdefault(key, []).append(episode)
    return [
        replace(
            first.request,
            samples=tuple(sample for episode in episodes for sample in episode.request.samples),
            seeds=tuple(seed for episode in episodes for seed in episode.request.seeds),
            begun=tuple(tuple(episode.tokens) for episode in episodes) if first.tokens else (),
            room=() if first.room is None else tuple(episode.room or 0 for episode in episodes),
        )
        for episodes in together.values()
        for first in episodes[:1]
    ]
