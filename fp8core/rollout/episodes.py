"""Episodes: the policy and an environment speak in turns, many episodes at once.

An episode is one completion: its tokens are everything after the prompt. Each turn is a request that goes on from all
tokens so far (`PromptGroup.prefix_tokens`). They are drawn by the episode's own seed at its own positions. The order of
replies decides when a token is written, and never which.
"""

import json
from bisect import bisect_left
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, cast

from fp8core.config.run import RunConfig
from fp8core.environments.chat import Conversation, ObservationError, Talk
from fp8core.environments.pool import Pool, opening_record, reply_of, turn_record
from fp8core.environments.protocol import Action, Outcome, Reply, Said, Task, Turn, TurnRecord
from fp8core.errors import UserError
from fp8core.models.architecture import Architecture
from fp8core.models.tokenizer import Tokenizer
from fp8core.rewards.scorer import Key
from fp8core.rollout.engine import Completion, Finish, PromptGroup, RolloutEngine, Sampling, StreamingEngine
from fp8core.rollout.registry import longest_prompt, longest_row

_LOOK_SECONDS = 1.0
"""Longest wait for environments before the caller may look after something else."""
_OTHERWISE = (
    "it answered otherwise when it was asked the same again, as its process was needed by others "
    "(environment.max_concurrent_episodes)"
)
_TOGETHER = 8
"""Answers that enter the engine together: the first ones are computed while the next ones are put into tokens."""
_Replay = deque[tuple[Turn, Action | None]]
"""What an environment is to say again, and what it is asked then; the last one may be yet to be answered (None)."""


@dataclass(frozen=True)
class TurnBudget:
    """Tokens of a turn of the policy, of an observation and of the first messages; None: no other limit."""

    turns: int
    turn_tokens: int | None = None
    observation_tokens: int | None = None
    prompt_tokens: int | None = None


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
        # Turn 0 is the environment's first answer.
        self._turns = list[TurnRecord]()
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

    def restore(self, prefix: Completion) -> None:
        """Take in what a run has stored of an episode that goes on."""
        for turn, answered in zip_longest(prefix.turns, prefix.turns[1:]):
            reply = self.on_reply(reply_of(turn), 0.0)
            assert reply is None, "an outcome ends an episode"
            place = slice(len(self.tokens), None if answered is None else answered.end)
            self._write(prefix.tokens[place], prefix.logprobs[place])
            if answered is not None:
                self._end_turn("stop" if self.tokens[-1] in self._talk.tokenizer.eos_ids else "length")
        assert self.tokens == prefix.tokens, "an observation has other tokens now"

    def on_completion(self, completion: Completion) -> Action | Completion:
        self._write(completion.tokens, completion.logprobs)
        self._wrote = True
        if not completion.in_flight:
            return self._end_turn(completion.finish)
        return self._end_turn("length") if len(self._turn) == self._budget.turn_tokens else self._leave("open")

    def on_reply(self, reply: Turn | Outcome, seconds: float) -> Completion | None:
        """The episode where it is over or goes on later, else None."""
        if self._conversation is None:
            return self._begin(reply, seconds)
        end = len(self.tokens)
        action = self.actions[-1]
        ending: tuple[Finish, str] | None
        if isinstance(reply, Turn):
            ending = self._observe(reply, self._conversation)
            outcome = "unparsed"
            self.heard.append(reply)
        else:
            ending = (cast(Finish, action.finish), reply.detail)
            outcome = reply.outcome
        record = turn_record(len(self._turns), action, reply, seconds)
        begin = self._turns[-1].observation_end
        self._turns.append(replace(record, begin=begin, end=end, observation_end=len(self.tokens)))
        if ending is not None:
            finish, detail = ending
            return self._leave(finish, outcome, detail)
        return self._leave("open") if self._max_tokens is not None and self._wrote else None

    def _begin(self, reply: Turn | Outcome, seconds: float) -> Completion | None:
        self._turns.append(opening_record(reply, seconds))
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
        is_complete = self.actions[-1].finish == "stop"
        if not (remaining or is_complete):
            return "length", f"the episode has its {self._row_tokens} tokens"
        if len(self.actions) == budget.turns:
            return "turns", f"the environment goes on after {budget.turns} turns"
        try:
            last = self.tokens[-1] if is_complete else None
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

    def _leave(self, finish: Finish, outcome: str = "", detail: str = "") -> Completion:
        last = replace(self._turns[-1], outcome=outcome, detail=detail)
        if not self.tokens:
            # The policy never spoke: a token stands for what it would have written.
            self._extend([self._talk.tokenizer.end_id], [0.0], False)
            last = replace(last, observation_end=1)
        return Completion(
            *self.key,
            [*self.tokens],
            [*self._logprobs],
            finish,
            policy_mask=None if all(self._policy_mask) else [*self._policy_mask],
            prompt_id=self.request.prompt_id,
            seed=self.request.seeds[0],
            prompt_tokens=[*self.request.prompt],
            turns=[*self._turns[:-1], last],
        )


@dataclass(frozen=True)
class MultiTurn:
    """Environments, the form of conversations with them, their tasks, and budgets.

    Attributes:
        prefixes: episodes that go on, as a run has stored them. An environment that is closed is asked the same again;
            one that answers otherwise has crashed.
        max_tokens: tokens that an episode writes, at most to the end of one turn and its answer; None: to its end.
        states: of episodes that go on, as the last call has left them; each call takes them in place of prefixes.
    """

    pool: Pool
    talk: Talk
    tasks: Mapping[Key, Task]
    budget: TurnBudget
    prefixes: Mapping[Key, Completion] = field(default_factory=dict)
    max_tokens: int | None = None
    states: dict[Key, EpisodeState] = field(default_factory=dict)

    def release(self, state: EpisodeState, episode: Completion) -> None:
        if episode.in_flight:
            self.states[episode.key] = state
            self.pool.rest(episode.key)
        else:
            self.pool.end(episode.key)


def one_turn_episodes(
    engine: RolloutEngine,
    groups: Sequence[PromptGroup],
    sampling: Sampling,
    prefixes: Mapping[Key, Completion] = MappingProxyType({}),
) -> Iterator[list[Completion]]:
    """Episodes that the policy's turn ends, in the parts in which the engine gives them.

    `prefixes`: those that go on from `PromptGroup.prefix_tokens`."""
    by_number = {group.group: group for group in groups}
    left = sum(len(group.samples) for group in groups)
    for part in engine.generate(groups, sampling) if groups else ():
        left -= len(part)
        yield [_whole(done, by_number[done.group], prefixes.get(done.key)) for done in part]
    assert left == 0, "the engine ended without all completions"


def _whole(done: Completion, group: PromptGroup, prefix: Completion | None) -> Completion:
    i = group.samples.index(done.sample)
    before = 0 if prefix is None else len(group.prefix_of(i))
    return replace(
        done,
        tokens=done.tokens if prefix is None else [*prefix.tokens[:before], *done.tokens],
        logprobs=done.logprobs if prefix is None else [*prefix.logprobs[:before], *done.logprobs],
        prompt_id=group.prompt_id,
        seed=group.seeds[i],
        prompt_tokens=[*group.prompt],
    )


def run_episodes(
    engine: StreamingEngine, groups: Sequence[PromptGroup], sampling: Sampling, multi_turn: MultiTurn
) -> Iterator[list[Completion]]:
    """Play all episodes at once; each yield holds those that have finished since, in order of group and sample.

    One is empty after each second in which no environment answered: the caller may end it all then. With
    `MultiTurn.max_tokens` an episode has finished when it is over or has written so much.

    Raises UserError: the chat template rewrites what was before (`environments.chat`), or the engine refuses a request.
    """
    assert not sampling.report_experts, "experts are not recorded over several turns"
    pool = multi_turn.pool
    session = engine.open_session(sampling)
    open_ = dict[Key, EpisodeState]()
    replays = dict[Key, _Replay]()
    finished = list[Completion]()

    def leave(episode: Completion) -> None:
        multi_turn.release(open_.pop(episode.key), episode)
        finished.append(episode)

    try:
        open_.update((each.key, each) for each in _open_states(groups, sampling.max_new_tokens, multi_turn))
        for key in [key for key, episode in open_.items() if not episode.heard]:
            pool.begin(key, open_[key].task)
        session.add(_requests([episode for episode in open_.values() if episode.heard]))
        while open_:
            wait = not session.busy
            replies = pool.replies(wait, _LOOK_SECONDS)
            if wait and not replies:
                yield []
            new = [*_new_replies(pool, replies, replays)]
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
                if isinstance(said, Completion):
                    leave(said)
                elif again := _to_repeat(pool, episode):
                    replays[episode.key] = again
                else:
                    pool.act(episode.key, said)
            yield from _new(finished)
    finally:
        for key in [*open_, *(one.key for one in finished)]:
            pool.end(key)
        session.close()


def _new_replies(pool: Pool, replies: Sequence[Reply], replays: Mapping[Key, _Replay]) -> Iterator[Reply]:
    for key, reply, seconds in sorted(replies, key=lambda answer: answer[0]):
        again = replays.get(key)
        if not again:
            yield key, reply, seconds
        elif not _repeat_next(pool, key, reply, again):
            again.clear()
            yield key, Outcome("crashed", detail=_OTHERWISE), seconds


def _to_repeat(pool: Pool, episode: EpisodeState) -> _Replay:
    if pool.wake(episode.key, episode.task, episode.answered):
        return deque()
    pool.begin(episode.key, episode.task)
    return deque(zip_longest(episode.heard, episode.actions))


def _repeat_next(pool: Pool, key: Key, reply: Turn | Outcome, again: _Replay) -> bool:
    """True for the answer of before, after which the environment is asked what it was asked before."""
    known, action = again.popleft()
    # Tools are told at the start only.
    same = isinstance(reply, Turn) and (reply if known.tools else replace(reply, tools=())) == known
    if same and action is not None:
        pool.act(key, action)
    return same


def _open_states(groups: Sequence[PromptGroup], row_tokens: int, multi_turn: MultiTurn) -> Iterator[EpisodeState]:
    for group in groups:
        for sample, seed in zip(group.samples, group.seeds, strict=True):
            key = group.group, sample
            episode = multi_turn.states.pop(key, None)
            if episode is None:
                request = replace(group, samples=(sample,), seeds=(seed,))
                episode = EpisodeState(request, multi_turn.tasks[key], multi_turn.talk, multi_turn.budget, row_tokens)
                if key in multi_turn.prefixes:
                    episode.restore(multi_turn.prefixes[key])
            episode.begin_call(multi_turn.max_tokens)
            yield episode


def _new(finished: list[Completion]) -> Iterator[list[Completion]]:
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


def task_of(row: Mapping[str, Any], seed: int) -> Task:
    """Of a row of kind `prompts`."""
    *before, (_, question) = json.loads(row["messages"])
    columns = json.loads(row.get("columns") or "{}")
    # Generators refuse negative seeds, NumPy's among them.
    return Task(question, row["reference"], seed % 2**64, tuple(Said(*message) for message in before), columns)


@dataclass(frozen=True)
class EpisodePlayer:
    """`longest`: most tokens of an environment's first messages; `states`: as of `MultiTurn`."""

    config: RunConfig
    tokenizer: Tokenizer
    longest: int
    states: dict[Key, EpisodeState] = field(default_factory=dict)

    @classmethod
    def of(cls, config: RunConfig, tokenizer: Tokenizer, arch: Architecture) -> "EpisodePlayer":
        return cls(config, tokenizer, longest_prompt(config, longest_row(config, arch)))

    def sampling(self) -> Sampling:
        rollout = self.config.rollout
        eos_ids = self.tokenizer.eos_ids
        return Sampling(rollout.temperature, rollout.max_new_tokens, eos_ids, truncation=rollout.truncation)

    def evaluation_sampling(self, temperature: float) -> Sampling:
        """At a temperature of the evaluation's own; 0 is greedy."""
        truncation = self.config.rollout.truncation if temperature else None
        return replace(self.sampling(), temperature=temperature, truncation=truncation)

    def play(
        self,
        engine: RolloutEngine,
        groups: Sequence[PromptGroup],
        prompts: Sequence[Mapping[str, Any]],
        sampling: Sampling,
        pool: Pool | None = None,
        prefixes: Mapping[Key, Completion] = MappingProxyType({}),
    ) -> Generator[list[Completion], None, None]:
        """Whole episodes, as they are over or reach the limit of their groups.

        Args:
            prompts: rows of kind `prompts`, of these groups or more.
            pool: None without an environment: the policy's turn ends each episode.
            prefixes: of groups that have tokens.
        """
        if pool is None:
            strings = self.config.rollout.stop_strings
            for episodes in one_turn_episodes(engine, groups, sampling, prefixes):
                yield [cut_at(one, self.tokenizer, strings) for one in episodes]
            return
        limits = self.config.environment
        assert limits is not None, "a pool is of an environment"
        if not isinstance(engine, StreamingEngine):
            raise UserError(
                f"environment.name={limits.name}: rollout.engine={self.config.rollout.engine} has no open_session, "
                "which takes requests while others are in flight"
            )
        rows = {row["group"]: row for row in prompts}
        tasks = {
            (group.group, sample): task_of(rows[group.group], seed)
            for group in groups
            for sample, seed in zip(group.samples, group.seeds, strict=True)
        }
        budget = TurnBudget(limits.max_turns, limits.turn_tokens, limits.observation_tokens, self.longest)
        max_tokens = groups[0].max_tokens[0] if groups and groups[0].max_tokens else None
        talk = Talk.of(self.config, self.tokenizer)
        multi_turn = MultiTurn(pool, talk, tasks, budget, prefixes, max_tokens, self.states)
        # An episode has its own tokens, and its limit is that of all turns together.
        yield from run_episodes(
            engine, [replace(group, prefix_tokens=(), max_tokens=()) for group in groups], sampling, multi_turn
        )


def cut_at(completion: Completion, tokenizer: Tokenizer, strings: Sequence[str]) -> Completion:
    """The completion up to the token that completes the first of the strings, as of an engine that stops there."""
    if not strings:
        return completion

    def complete(count: int) -> bool:
        text = tokenizer.decode(completion.tokens[:count])
        return any(string in text for string in strings)

    whole = len(completion.tokens)
    if not complete(whole):
        return completion
    count = bisect_left(range(whole), True, key=complete)
    experts = completion.experts
    cut = replace(completion.part(0, count), finish="stop_string")
    return cut if experts is None else replace(cut, experts=experts[: len(experts) - (whole - count)])
