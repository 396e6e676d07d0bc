"""Episodes: the policy and an environment speak in turns, many episodes at once.

An episode is one completion: its tokens are everything after the prompt. Each turn is a request that goes on from all
tokens so far (`PromptGroup.prefix_tokens`). They are drawn by the episode's own seed at its own positions. The order of
replies decides when a token is written, and never which.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from types import MappingProxyType
from typing import NamedTuple, Protocol, cast

from fp8core.environments.chat import Conversation, ObservationError, Talk
from fp8core.environments.protocol import Action, Outcome, Reply, Task, Turn, calls_json, opening_json, said_json
from fp8core.rewards.scorer import Key
from fp8core.rollout.engine import Completion, Finish, PromptGroup, RolloutEngine, Sampling, StreamingEngine

_LOOK_SECONDS = 1.0
"""Longest wait for environments before the caller may look after something else."""
_OTHERWISE = (
    "it answered otherwise when it was asked the same again, as its process was needed by others "
    "(environment.max_concurrent_episodes)"
)
_TOGETHER = 8
"""Answers that enter the engine together: the first ones are computed while the next ones are put into tokens."""
_Repeated = deque[tuple[Turn, Action | None]]
"""What an environment is to say again, and what it is asked then; the last one may be yet to be answered (None)."""


class EpisodePrefix(NamedTuple):
    """Tokens of an episode that goes on, replies, and the ends of the answered turns of the policy."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    replies: Sequence[Turn]
    ends: Sequence[int]


@dataclass(frozen=True)
class TurnBudget:
    """Tokens of a turn of the policy, of an observation and of the first messages; None: no other limit."""

    turns: int
    turn_tokens: int | None = None
    observation_tokens: int | None = None
    prompt_tokens: int | None = None


@dataclass(frozen=True)
class TurnRecord:
    """A turn of the policy and what the environment answered.

    Attributes:
        begin, end: the policy's tokens, a range of the completion's; the answer's follow up to `observation_end`.
        said: the answer's messages, JSON as of `said_json`; empty where the answer was an outcome.
        calls: tool calls of the policy, JSON: a list of name and arguments.
        malformed: why what looked like a call is none, else empty.
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
    """An episode that is over, or goes on later and has `open` for its finish.

    Attributes:
        prompt: the environment's first messages, or the group's where it said none.
        outcome: the environment's; `unparsed` where a budget ended the episode. Where the policy never spoke, the
            completion is one token that it did not write.
        reward: of all turns together, beside what a verifier gives.
        began: the environment's first answer; None without an environment.
        state: of one that goes on, for `MultiTurn.prefixes`.
    """

    completion: Completion
    prompt: tuple[int, ...]
    turns: tuple[TurnRecord, ...]
    outcome: str
    reward: float
    detail: str
    began: Turn | Outcome | None = None
    opening_seconds: float = field(default=0.0, compare=False)
    state: "EpisodeState | None" = field(default=None, compare=False, repr=False)

    @property
    def key(self) -> Key:
        return self.completion.group, self.completion.sample

    @property
    def goes_on(self) -> bool:
        return self.completion.finish == "open"

    @property
    def opening(self) -> str:
        return opening_json(self.began) if isinstance(self.began, Turn) else ""


class EpisodeState:
    def __init__(self, request: PromptGroup, task: Task, talk: Talk, budget: TurnBudget, row_tokens: int) -> None:
        self.request = request
        self.task = task
        self.tokens = list[int]()
        self.heard = list[Turn]()
        self.actions = list[Action]()
        self._talk = talk
        self._budget = budget
        self._row_tokens = row_tokens
        self._logprobs = list[float]()
        self._policy_mask = list[bool]()
        self._turns = list[TurnRecord]()
        self._reward = 0.0
        self._began: Turn | Outcome | None = None
        self._opening_seconds = 0.0
        self._conversation: Conversation | None = None
        # The tokens of a turn of the policy that goes on.
        self._turn = list[int]()
        # Of the present call: its limit of tokens, and whether the policy wrote any token.
        self._max_tokens: int | None = None
        self._wrote = False

    @property
    def key(self) -> Key:
        return self.request.group, self.request.samples[0]

    @property
    def max_tokens(self) -> int | None:
        """None: what its row has left."""
        of_turn = self._budget.turn_tokens
        left = [self._max_tokens, None if of_turn is None else of_turn - len(self._turn)]
        return min((each for each in left if each is not None), default=None)

    @property
    def answered(self) -> list[Action]:
        return self.actions[: len(self.heard) - 1]

    def begin_call(self, max_tokens: int | None) -> None:
        self._max_tokens = max_tokens
        self._wrote = False

    def restore(self, prefix: EpisodePrefix) -> None:
        for reply, end in zip(prefix.replies, [*prefix.ends, None], strict=True):
            heard = self.on_reply(reply, 0.0)
            assert heard is None, "it was not over"
            turn = slice(len(self.tokens), end)
            self._write(prefix.tokens[turn], prefix.logprobs[turn])
            if end is not None:
                self._end_turn("stop" if self.tokens[-1] in self._talk.tokenizer.eos_ids else "length")
        assert self.tokens == [*prefix.tokens], "an observation has other tokens now"

    def on_completion(self, completion: Completion) -> Action | Episode:
        self._write(completion.tokens, completion.logprobs)
        self._wrote = True
        if completion.finish != "open":
            return self._end_turn(completion.finish)
        return self._end_turn("length") if len(self._turn) == self._budget.turn_tokens else self._leave("open")

    def on_reply(self, reply: Turn | Outcome, seconds: float) -> Episode | None:
        """The episode where it is over or goes on later, else None."""
        self._reward += reply.reward
        if self._conversation is None:
            return self._begin(reply, seconds)
        end = len(self.tokens)
        action = self.actions[-1]
        ended: tuple[Finish, str] | None
        if isinstance(reply, Turn):
            ended = self._observe(reply, self._conversation)
            outcome = "unparsed"
            said = said_json(reply.messages)
            self.heard.append(reply)
        else:
            ended = (cast(Finish, action.finish), reply.detail)
            outcome = reply.outcome
            said = ""
        begin = self._turns[-1].observation_end if self._turns else 0
        spoken = (calls_json(action.calls), action.malformed)
        told = (dict(reply.info), seconds)
        self._turns.append(TurnRecord(begin, end, len(self.tokens), said, *spoken, reply.failed, reply.reward, *told))
        if ended is not None:
            finish, detail = ended
            return self._leave(finish, outcome, detail)
        return self._leave("open") if self._max_tokens is not None and self._wrote else None

    def _begin(self, reply: Turn | Outcome, seconds: float) -> Episode | None:
        self._began = reply
        self._opening_seconds = seconds
        if isinstance(reply, Outcome):
            return self._leave("stop", reply.outcome, reply.detail)
        most = self._budget.prompt_tokens
        try:
            conversation = self._talk.open(reply)
        except ObservationError as error:
            return self._leave("observation", "unparsed", str(error))
        length = len(conversation.prompt)
        if not 0 < length <= (length if most is None else most):
            detail = f"the first messages are {length} tokens, 1 to {most} fit (data.max_prompt_tokens)"
            return self._leave("observation", "unparsed", detail)
        self._conversation = conversation
        self.request = replace(self.request, prompt=conversation.prompt)
        self.heard.append(reply)
        return None

    def _observe(self, turn: Turn, conversation: Conversation) -> tuple[Finish, str] | None:
        budget = self._budget
        remaining = self._row_tokens - len(self.tokens)
        stopped = self.actions[-1].finish == "stop"
        if not (remaining or stopped):
            return "length", f"the episode has its {self._row_tokens} tokens"
        if len(self.actions) == budget.turns:
            return "turns", f"the environment goes on after {budget.turns} turns"
        try:
            last = self.tokens[-1] if stopped else None
            tokens = conversation.observe(turn.messages, last)
        except ObservationError as error:
            return "observation", str(error)
        if budget.observation_tokens is not None and len(tokens) > budget.observation_tokens:
            return "observation", f"an observation has {len(tokens)} tokens, {budget.observation_tokens} are allowed"
        if len(tokens) >= remaining:
            return "length", f"an observation of {len(tokens)} tokens leaves no room, {remaining} are left"
        self._extend(tokens, [0.0] * len(tokens), False)
        return None

    def _write(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self._extend(tokens, logprobs, True)
        self._turn += tokens

    def _end_turn(self, finish: Finish) -> Action:
        assert self._conversation is not None, "the policy spoke in a conversation"
        self.actions.append(self._conversation.action(self._turn, finish))
        self._turn = []
        return self.actions[-1]

    def _extend(self, tokens: Sequence[int], logprobs: Sequence[float], by_policy: bool) -> None:
        self.tokens += tokens
        self._logprobs += logprobs
        self._policy_mask += [by_policy] * len(tokens)

    def _leave(self, finish: Finish, outcome: str = "", detail: str = "") -> Episode:
        if not self.tokens:
            self._extend([self._talk.tokenizer.end_id], [0.0], False)
        policy_mask = None if all(self._policy_mask) else [*self._policy_mask]
        completion = Completion(*self.key, [*self.tokens], [*self._logprobs], finish, policy_mask=policy_mask)
        told = tuple(self._turns), outcome, self._reward, detail, self._began, self._opening_seconds
        return Episode(completion, self.request.prompt, *told, self if finish == "open" else None)


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
        """True if it is open, began with this task and was asked exactly this; else it ends."""
        ...

    def end(self, episode: Key) -> None: ...


@dataclass(frozen=True)
class MultiTurn:
    """Environments, the form of conversations with them, their tasks, and budgets.

    Attributes:
        prefixes: episodes that go on, as a call has left or as a run has stored them. An environment that is closed is
            asked the same again; one that answers otherwise has crashed.
        max_tokens: tokens that an episode writes, at most to the end of one turn and its answer; None: to its end.
    """

    pool: Pool
    talk: Talk
    tasks: Mapping[Key, Task]
    budget: TurnBudget
    prefixes: Mapping[Key, EpisodePrefix | Episode] = field(default_factory=dict)
    max_tokens: int | None = None


def one_turn_episodes(
    engine: RolloutEngine,
    groups: Sequence[PromptGroup],
    sampling: Sampling,
    prefixes: Mapping[Key, EpisodePrefix | Episode] = MappingProxyType({}),
) -> Iterator[list[Episode]]:
    """Episodes that the policy's turn ends, in the parts in which the engine gives them.

    `prefixes`: tokens and log-probs of those that go on from `PromptGroup.prefix_tokens`."""
    asked = {group.group: group for group in groups}
    left = sum(len(group.samples) for group in groups)
    for part in engine.generate(groups, sampling) if groups else ():
        left -= len(part)
        yield [_one_turn(done, asked[done.group], prefixes.get((done.group, done.sample))) for done in part]
    assert left == 0, "the engine ended without all completions"


def _one_turn(done: Completion, group: PromptGroup, prefix: EpisodePrefix | Episode | None) -> Episode:
    if prefix is not None:
        before = len(group.prefix_of(group.samples.index(done.sample)))
        known = prefix.completion if isinstance(prefix, Episode) else prefix
        tokens = [*known.tokens[:before], *done.tokens]
        done = replace(done, tokens=tokens, logprobs=[*known.logprobs[:before], *done.logprobs])
    return Episode(done, group.prompt, (), "judge", 0.0, "")


def run_episodes(
    engine: StreamingEngine, groups: Sequence[PromptGroup], sampling: Sampling, multi_turn: MultiTurn
) -> Iterator[list[Episode]]:
    """Play all episodes at once; each yield holds those that have finished since, in order of group and sample.

    One is empty after each second in which no environment answered: the caller may end it all then. With
    `MultiTurn.max_tokens` an episode has finished when it is over or has written so much.

    Raises UserError: the chat template rewrites what was before (`environments.chat`), or the engine refuses a request.
    """
    assert not sampling.report_experts, "experts are not recorded over several turns"
    pool = multi_turn.pool
    session = engine.open_session(sampling)
    open_ = dict[Key, EpisodeState]()
    repeated = dict[Key, _Repeated]()
    finished = list[Episode]()

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
                asked = list[EpisodeState]()
                for key, reply, seconds in new[first : first + _TOGETHER]:
                    if (left := open_[key].on_reply(reply, seconds)) is None:
                        asked.append(open_[key])
                    else:
                        leave(left)
                session.add(_requests(asked))
            yield from _new(finished)
            for completion in session.step() if session.busy else []:
                episode = open_[completion.group, completion.sample]
                said = episode.on_completion(completion)
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


def _to_repeat(pool: Pool, episode: EpisodeState) -> _Repeated:
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


def _all_opened(groups: Sequence[PromptGroup], row_tokens: int, multi_turn: MultiTurn) -> Iterator[EpisodeState]:
    for group in groups:
        for sample, seed in zip(group.samples, group.seeds, strict=True):
            key = group.group, sample
            prefix = multi_turn.prefixes.get(key)
            if isinstance(prefix, Episode):
                assert prefix.state is not None, "it is over"
                episode = prefix.state
            else:
                request = replace(group, samples=(sample,), seeds=(seed,))
                episode = EpisodeState(request, multi_turn.tasks[key], multi_turn.talk, multi_turn.budget, row_tokens)
                if prefix is not None:
                    episode.restore(prefix)
            episode.begin_call(multi_turn.max_tokens)
            yield episode


def _new(finished: list[Episode]) -> Iterator[list[Episode]]:
    if finished:
        yield sorted(finished, key=lambda episode: episode.key)
        finished.clear()


def _requests(asked: Sequence[EpisodeState]) -> list[PromptGroup]:
    return [
        replace(
            episode.request,
            prefix_tokens=(tuple(episode.tokens),) if episode.tokens else (),
            max_tokens=() if episode.max_tokens is None else (episode.max_tokens,),
        )
        for episode in asked
    ]
