"""Episodes: the policy and an environment speak in turns, many episodes at once; one turn where there is no environment.

An episode is one completion. Its tokens are everything after the prompt: the policy's as it drew them, and the
environment's, which `written` tells apart. Each turn of the policy is a request that goes on from all tokens so far
(`PromptGroup.begun`), drawn by the episode's own seed at its own positions. While an environment works, requests of
other episodes stay in flight. The order of its replies decides when a token is written, and never which.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from fp8core.environments.chat import Conversation, ObservationError, Talk
from fp8core.environments.protocol import Action, Outcome, Said, Task, Tool, Turn
from fp8core.rollout.engine import (
    Completion,
    Finish,
    PromptGroup,
    RolloutEngine,
    Sampling,
    Session,
    StreamingEngine,
)

Key = tuple[int, int]
"""Group and sample of an episode."""


class Pool(Protocol):
    """Environments of open episodes, moved by calls; `environments.pool.EnvironmentPool` is the one with processes."""

    def begin(self, episode: Key, task: Task) -> None:
        """Start an episode."""
        ...

    def act(self, episode: Key, action: Action) -> None:
        """Hand an environment what the policy wrote."""
        ...

    def replies(self, wait: bool) -> list[tuple[Key, Turn | Outcome, float]]:
        """What environments have answered, with their seconds; `wait`: until one has."""
        ...

    def end(self, episode: Key) -> None:
        """Release an episode."""
        ...


@dataclass(frozen=True)
class TurnBudget:
    """What an episode may have, beside the tokens of its row (`Sampling.max_new_tokens`).

    Attributes:
        turns: of the policy.
        turn_tokens: that the policy may write in a turn; None: as many as the row has left.
        observation_tokens: of the longest observation; a longer one ends the episode. None: as many as the row has.
    """

    turns: int
    turn_tokens: int | None = None
    observation_tokens: int | None = None


@dataclass(frozen=True)
class MultiTurn:
    """Who answers the policy, how that is put into tokens, and for how long."""

    pool: Pool
    talk: Talk
    tasks: Mapping[Key, Task]
    budget: TurnBudget


@dataclass(frozen=True)
class TurnRecord:
    """A turn of the policy and what the environment answered.

    Attributes:
        begin, end: the policy's tokens, a range of the completion's.
        observation_end: those of the answer follow, up to here; equal to `end` where none entered the completion.
        said: the answer's messages, JSON as of `said_json`; empty where the answer was an outcome.
        calls: tool calls of the policy, JSON: a list of name and arguments.
        malformed: why what looked like a call is none, else empty.
        failed: how many of the calls failed.
        reward: of the policy's turn.
        info: numbers of the environment.
        seconds: that the environment took; not part of what happened, hence never compared.
    """

    begin: int
    end: int
    observation_end: int
    said: str
    calls: str
    malformed: str
    failed: int
    reward: float
    info: Mapping[str, float]
    seconds: float = field(compare=False)


@dataclass(frozen=True)
class Episode:
    """A finished episode.

    Attributes:
        completion: all of it as one row; of what the policy wrote no token is missing, and none was encoded again.
        prompt: its token ids: the environment's first messages, or the group's where it says nothing.
        opening: these messages and the tools, JSON as of `opening_json`; empty where there is no environment.
        opening_seconds: that the environment took to begin.
        turns: in order.
        outcome: the environment's; `unparsed` where a budget ended the episode, of which `completion.finish` has the
            name: `turns`, `length` or `observation`.
        reward: of all turns together, beside what a verifier gives.
        detail: for people, a line.
    """

    completion: Completion
    prompt: tuple[int, ...]
    opening: str
    turns: tuple[TurnRecord, ...]
    outcome: str
    reward: float
    detail: str
    opening_seconds: float = field(default=0.0, compare=False)


def run_episodes(
    engine: RolloutEngine, groups: Sequence[PromptGroup], sampling: Sampling, multi_turn: MultiTurn | None = None
) -> Iterator[list[Episode]]:
    """Play all episodes at once; each yield holds whole groups as they finish, in order of group and sample.

    Args:
        engine: must be a `StreamingEngine` where there is an environment.
        groups: a prompt stands for what an environment says first, where it says nothing or never begins.
        sampling: `max_new_tokens` limits a whole episode, observations included.
        multi_turn: None: each completion is an episode of one turn, whose outcome is `judge`.

    Raises:
        UserError: the chat template rewrites what was before (`environments.chat`).
    """
    raise NotImplementedError


def opening_json(turn: Turn) -> str:
    """Messages and tools of a first turn."""
    raise NotImplementedError


def opening_of(text: str) -> Turn:
    """The first turn of which `opening_json` wrote this."""
    raise NotImplementedError


def said_json(messages: Iterable[Said]) -> str:
    """Messages of an environment."""
    raise NotImplementedError


def said_of(text: str) -> tuple[Said, ...]:
    """The messages of which `said_json` wrote this."""
    raise NotImplementedError
