"""Episodes: the policy and an environment speak in turns, many episodes at once; one turn without an environment.

An episode is one completion. Its tokens are everything after the prompt: the policy's as it drew them, and the
environment's; `written` is the mask of the policy's. Each of its turns is a request that goes on from all tokens so far
(`PromptGroup.begun`). They are drawn by the episode's own seed at its own positions. While an environment works,
requests of other episodes stay in flight. The order of replies decides when a token is written, and never which.
"""

import json
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
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
        """Answers of environments that have come, with their seconds; `wait`: at least one."""
        ...

    def end(self, episode: Key) -> None:
        """Release an episode."""
        ...


@dataclass(frozen=True)
class TurnBudget:
    """Budgets of an episode, beside the tokens of its row (`Sampling.max_new_tokens`).

    Attributes:
        turns: of the policy.
        turn_tokens: that the policy may write in a turn; None: as many as the row has left.
        observation_tokens: of the longest observation; a longer one ends the episode. None: as many as the row has.
        prompt_tokens: of the longest first messages; longer ones are an observation that is too long.
    """

    turns: int
    turn_tokens: int | None = None
    observation_tokens: int | None = None
    prompt_tokens: int | None = None


@dataclass(frozen=True)
class MultiTurn:
    """Environments, the form of conversations with them, their tasks, and budgets."""

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
        prompt: its token ids: the environment's first messages, or the group's where it said none.
        opening_seconds: that the environment took to begin.
        turns: in order.
        outcome: the environment's; `unparsed` where a budget ended the episode, of which `completion.finish` has the
            name: `turns`, `length` or `observation`. Where the policy never spoke, the completion is one token that it
            did not write.
        reward: of all turns together, beside what a verifier gives.
        detail: for people, a line.
        began: the environment's first answer; None without an environment.
    """

    completion: Completion
    prompt: tuple[int, ...]
    turns: tuple[TurnRecord, ...]
    outcome: str
    reward: float
    detail: str
    began: Turn | Outcome | None = None
    opening_seconds: float = field(default=0.0, compare=False)

    @property
    def opening(self) -> str:
        """First messages and tools, JSON as of `opening_json`; empty where the environment said none."""
        return opening_json(self.began) if isinstance(self.began, Turn) else ""


def run_episodes(
    engine: RolloutEngine,
    groups: Sequence[PromptGroup],
    sampling: Sampling,
    multi_turn: MultiTurn | None = None,
) -> Iterator[list[Episode]]:
    """Play all episodes at once; each yield holds whole groups as they finish, in order of group and sample.

    Args:
        engine: must be a `StreamingEngine` where there is an environment.
        groups: each prompt is that of episodes whose environment never begins, and of all where there is none.
        sampling: `max_new_tokens` limits a whole episode, observations included.
        multi_turn: None: each completion is an episode of one turn, whose outcome is `judge`.

    Raises:
        UserError: the chat template rewrites what was before (`environments.chat`), or the engine refuses a request.
    """
    if multi_turn is None:
        pool: Pool = _OneTurn()
        session: Session = _Generated(engine, sampling)
    else:
        assert isinstance(engine, StreamingEngine), "episodes of several turns need an engine with sessions"
        assert not sampling.report_experts, "experts are not recorded over several turns"
        pool, session = multi_turn.pool, engine.open_session(sampling)
    open_ = {
        (group.group, sample): _Open(group, i, sampling.max_new_tokens, multi_turn)
        for group in groups
        for i, sample in enumerate(group.samples)
    }
    sizes = {group.group: len(group.samples) for group in groups}
    finished: dict[int, list[Episode]] = {group.group: [] for group in groups}
    try:
        for key in open_:
            pool.begin(key, _NO_TASK if multi_turn is None else multi_turn.tasks[key])
        while open_:
            asked = list[_Open]()
            for key, reply, seconds in sorted(pool.replies(not session.busy), key=lambda answer: answer[0]):
                episode = open_[key].hear(reply, seconds)
                if episode is None:
                    asked.append(open_[key])
                    continue
                del open_[key]
                pool.end(key)
                finished[key[0]].append(episode)
            if asked:
                session.add(_requests(asked))
            for whole in [finished.pop(group) for group in [*finished] if len(finished[group]) == sizes[group]]:
                yield sorted(whole, key=lambda episode: episode.completion.sample)
            for completion in session.step() if session.busy else []:
                key = completion.group, completion.sample
                pool.act(key, open_[key].speak(completion))
    finally:
        session.close()
        for key in open_:
            pool.end(key)


class _Open:
    """An episode in progress."""

    def __init__(self, group: PromptGroup, index: int, room: int, multi_turn: MultiTurn | None) -> None:
        """The sample at `index` of a group, of at most `room` tokens."""
        self.group, self.index, self.prompt = group, index, group.prompt
        self.tokens, self._logprobs, self._written = list[int](), list[float](), list[bool]()
        self._room, self._multi_turn = room, multi_turn
        self._conversation: Conversation | None = None
        self._newest: Completion | None = None
        self._action, self._turns = Action(""), list[TurnRecord]()
        self._began: Turn | Outcome | None = None
        self._opening_seconds, self._reward = 0.0, 0.0

    @property
    def turn_tokens(self) -> int | None:
        """Tokens that the policy may write in its turn; None: what its row has left."""
        return None if self._multi_turn is None else self._multi_turn.budget.turn_tokens

    def speak(self, completion: Completion) -> Action:
        """Take in what the policy wrote."""
        self._newest = completion
        self._extend(completion.tokens, completion.logprobs, True)
        if self._conversation is not None:
            finish = "length" if completion.finish == "open" else completion.finish
            self._action = self._conversation.action(completion.tokens, finish)
        return self._action

    def hear(self, reply: Turn | Outcome, seconds: float) -> Episode | None:
        """Take in what the environment answered: the episode where it is over, None where the policy is to speak."""
        self._reward += reply.reward
        if self._newest is None:
            return self._begin(reply, seconds)
        end = len(self.tokens)
        if isinstance(reply, Outcome):
            self._record(reply, end, "", seconds)
            last = self._newest.finish
            return self._over("length" if last == "open" else last, reply.outcome, reply.detail)
        finish, detail = self._go_on(reply, self._newest)
        self._record(reply, end, said_json(reply.messages), seconds)
        return None if finish is None else self._over(finish, "unparsed", detail)

    def _begin(self, reply: Turn | Outcome, seconds: float) -> Episode | None:
        if self._multi_turn is None:
            return None
        self._began, self._opening_seconds = reply, seconds
        if isinstance(reply, Outcome):
            return self._over("stop", reply.outcome, reply.detail)
        most = self._multi_turn.budget.prompt_tokens
        try:
            conversation = self._multi_turn.talk.open(reply)
        except ObservationError as error:
            return self._over("observation", "unparsed", str(error))
        length = len(conversation.prompt)
        if not 0 < length <= (length if most is None else most):
            detail = f"the first messages are {length} tokens, 1 to {most} fit (data.max_prompt_tokens)"
            return self._over("observation", "unparsed", detail)
        self._conversation, self.prompt = conversation, conversation.prompt
        return None

    def _go_on(self, turn: Turn, newest: Completion) -> tuple[Finish | None, str]:
        """Append an observation, or say what ends the episode instead."""
        assert self._multi_turn is not None, "one turn is answered with an outcome"
        assert self._conversation is not None, "the policy spoke in a conversation"
        budget, room = self._multi_turn.budget, self._room - len(self.tokens)
        if newest.finish == "length":
            return "length", f"the episode has its {self._room} tokens"
        if len(self._turns) + 1 == budget.turns:
            return "turns", f"the environment goes on after {budget.turns} turns"
        try:
            tokens = self._conversation.observe(turn.messages, newest.tokens[-1] if newest.finish == "stop" else None)
        except ObservationError as error:
            return "observation", str(error)
        if budget.observation_tokens is not None and len(tokens) > budget.observation_tokens:
            return "observation", f"an observation has {len(tokens)} tokens, {budget.observation_tokens} are allowed"
        if len(tokens) >= room:
            return "length", f"an observation of {len(tokens)} tokens leaves no room, {room} are left"
        self._extend(tokens, [0.0] * len(tokens), False)
        return None, ""

    def _extend(self, tokens: Sequence[int], logprobs: Sequence[float], written: bool) -> None:
        self.tokens += tokens
        self._logprobs += logprobs
        self._written += [written] * len(tokens)

    def _record(self, reply: Turn | Outcome, end: int, said: str, seconds: float) -> None:
        calls = _json([call._asdict() for call in self._action.calls])
        begin = self._turns[-1].observation_end if self._turns else 0
        self._turns.append(
            TurnRecord(
                begin,
                end,
                len(self.tokens),
                said,
                calls,
                self._action.malformed,
                reply.failed,
                reply.reward,
                dict(reply.info),
                seconds,
            )
        )

    def _over(self, finish: Finish, outcome: str, detail: str) -> Episode:
        if not self.tokens:
            assert self._multi_turn is not None, "without an environment the policy speaks"
            self._extend([self._multi_turn.talk.tokenizer.end_id], [0.0], False)
        completion = Completion(
            self.group.group,
            self.group.samples[self.index],
            self.tokens,
            self._logprobs,
            finish,
            None if self._newest is None else self._newest.experts,
            None if all(self._written) else self._written,
        )
        return Episode(
            completion,
            self.prompt,
            tuple(self._turns),
            outcome,
            self._reward,
            detail,
            self._began,
            self._opening_seconds,
        )


def _requests(asked: Sequence[_Open]) -> list[PromptGroup]:
    """Requests of episodes, those of one group and prompt together."""
    together: dict[tuple[int, tuple[int, ...], bool], list[_Open]] = {}
    for episode in asked:
        together.setdefault((episode.group.group, episode.prompt, bool(episode.tokens)), []).append(episode)
    return [
        replace(
            first.group,
            prompt=first.prompt,
            samples=tuple(episode.group.samples[episode.index] for episode in episodes),
            seeds=tuple(episode.group.seeds[episode.index] for episode in episodes),
            begun=tuple(tuple(episode.tokens) for episode in episodes) if first.tokens else (),
            room=() if first.turn_tokens is None else (first.turn_tokens,) * len(episodes),
        )
        for episodes in together.values()
        for first in episodes[:1]
    ]


_NO_TASK = Task("", "", 0)


class _OneTurn:
    """The pool where there is no environment: no first message, and each completion is to be judged."""

    def __init__(self) -> None:
        self._replies = list[tuple[Key, Turn | Outcome, float]]()

    def begin(self, episode: Key, task: Task) -> None:
        self._replies.append((episode, Turn(()), 0.0))

    def act(self, episode: Key, action: Action) -> None:
        self._replies.append((episode, Outcome("judge"), 0.0))

    def replies(self, wait: bool) -> list[tuple[Key, Turn | Outcome, float]]:
        assert self._replies or not wait, "the engine ended without all completions"
        replies, self._replies = self._replies, []
        return replies

    def end(self, episode: Key) -> None:
        """Nothing is held."""


class _Generated:
    """A session of any engine, for requests that come all at once: its steps are the parts of `generate`."""

    def __init__(self, engine: RolloutEngine, sampling: Sampling) -> None:
        self._engine, self._sampling = engine, sampling
        self._parts: Generator[list[Completion], None, None] | None = None
        self.busy = False

    def add(self, groups: Sequence[PromptGroup]) -> None:
        assert self._parts is None, "all requests come at once"
        self._parts, self.busy = (part for part in self._engine.generate(groups, self._sampling)), True

    def step(self) -> list[Completion]:
        assert self._parts is not None, "requests come before steps"
        part = next(self._parts, None)
        self.busy = part is not None
        return part or []

    def close(self) -> None:
        if self._parts is not None:
            self._parts.close()


def opening_json(turn: Turn) -> str:
    """Messages and tools of a first turn, as JSON; the same turn gives the same text."""
    tools = [{**tool._asdict(), "parameters": dict(tool.parameters)} for tool in turn.tools]
    return _json({"messages": [said._asdict() for said in turn.messages], "tools": tools})


def opening_of(text: str) -> Turn:
    """The first turn of which `opening_json` wrote this."""
    found = json.loads(text)
    return Turn(tuple(Said(**said) for said in found["messages"]), tuple(Tool(**tool) for tool in found["tools"]))


def said_json(messages: Iterable[Said]) -> str:
    """Messages of an environment, as JSON."""
    return _json([said._asdict() for said in messages])


def said_of(text: str) -> tuple[Said, ...]:
    """The messages of which `said_json` wrote this."""
    return tuple(Said(**said) for said in json.loads(text))


def _json(value: Any) -> str:
    # ASCII: a lone surrogate that an environment said has no bytes.
    return json.dumps(value)
