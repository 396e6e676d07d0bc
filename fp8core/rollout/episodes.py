"""Episodes: the policy and an environment speak in turns, many episodes at once; one turn without an environment.

An episode is one completion. Its tokens are everything after the prompt: the policy's as it drew them, and the
environment's; `written` is the mask of the policy's. Each of its turns is a request that goes on from all tokens so far
(`PromptGroup.begun`). They are drawn by the episode's own seed at its own positions. While an environment works,
requests of other episodes stay in flight. The order of replies decides when a token is written, and never which.
"""

import math
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from fp8core.environments.chat import Conversation, LongTextError, ObservationError, Talk
from fp8core.environments.protocol import Action, Outcome, Reply, Task, Turn, calls_json, opening_json, said_json
from fp8core.rewards.scorer import Key
from fp8core.rollout.engine import (
    Completion,
    Finish,
    PromptGroup,
    RolloutEngine,
    Sampling,
    Session,
    StreamingEngine,
)

_LOOK_SECONDS = 1.0
"""Longest wait for environments before the caller may look after something else."""
_OTHERWISE = (
    "it answered otherwise when it was asked the same again, as its process was needed by others (environment.at_once)"
)


class Pool(Protocol):
    """Environments of open episodes, moved by calls; `environments.pool.EnvironmentPool` is the one with processes."""

    def begin(self, episode: Key, task: Task) -> None:
        """Start an episode; an earlier one that rests ends."""
        ...

    def act(self, episode: Key, action: Action) -> None:
        """Hand an environment what the policy wrote."""
        ...

    def replies(self, wait: bool, most_seconds: float = math.inf) -> list[Reply]:
        """Answers of environments that have come, with their seconds; `wait`: at least one, if it comes in time."""
        ...

    def rest(self, episode: Key) -> None:
        """Nothing is asked of an open episode for a while; it may be ended where others need its room."""
        ...

    def wake(self, episode: Key, task: Task, asked: Sequence[Action]) -> bool:
        """True if an episode is open that began with this task and was asked exactly this; else it ends."""
        ...

    def end(self, episode: Key) -> None:
        """Release an episode."""
        ...


class Begun(NamedTuple):
    """An episode that goes on.

    Attributes:
        tokens, logprobs: all after the prompt, so far; the policy's present turn may have begun.
        replies: of the environment, the first one first.
        ends: of each turn of the policy that was answered, the end of its tokens.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    replies: Sequence[Turn]
    ends: Sequence[int]


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
    """Environments, the form of conversations with them, their tasks, and budgets.

    Attributes:
        begun: episodes that go on, as a call has left or as a run has stored them. When the policy's turn has ended, an
            environment that is not open any more is asked the same again; one that answers otherwise has crashed
            (`ask_again` finds it before).
        room: tokens that an episode writes, at most to the end of one turn and its answer; None: to the episode's end.
        counted: episodes in which tokens of long texts are made and counted, for a detail as earlier versions had it.
    """

    pool: Pool
    talk: Talk
    tasks: Mapping[Key, Task]
    budget: TurnBudget
    begun: Mapping[Key, "Begun | Episode"] = field(default_factory=dict)
    room: int | None = None
    counted: frozenset[Key] = frozenset()


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
    """An episode: finished, or one that goes on later, whose completion has `open` for its finish.

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
        state: of one that goes on, for `MultiTurn.begun`.
    """

    completion: Completion
    prompt: tuple[int, ...]
    turns: tuple[TurnRecord, ...]
    outcome: str
    reward: float
    detail: str
    began: Turn | Outcome | None = None
    opening_seconds: float = field(default=0.0, compare=False)
    state: "_Open | None" = field(default=None, compare=False, repr=False)

    @property
    def goes_on(self) -> bool:
        """True where it is not over."""
        return self.completion.finish == "open"

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
    """Play all episodes at once; each yield holds those that have finished since, in order of group and sample.

    One is empty after each second in which environments alone worked and none answered: the caller may end it all then.
    With `MultiTurn.room` an episode has finished when it is over or has written so much.

    Args:
        engine: must be a `StreamingEngine` where there is an environment.
        groups: each prompt is that of episodes whose environment never begins, and of all where there is none.
        sampling: `max_new_tokens` limits a whole episode, observations included.
        multi_turn: None: each completion is an episode of one turn, whose outcome is `judge`.

    Raises:
        UserError: the chat template rewrites what was before (`environments.chat`), or the engine refuses a request.
    """
    pool, session = _pool_and_session(engine, sampling, multi_turn)
    open_, finished = dict[Key, _Open](), list[Episode]()

    def go_on(key: Key, found: Episode | Action | None) -> None:
        """Let the policy speak, ask the environment, or leave the episode."""
        if found is None:
            asked.append(open_[key])
        elif isinstance(found, Action):
            pool.act(key, found)
        else:
            del open_[key]
            (pool.rest if found.goes_on else pool.end)(key)
            finished.append(found)

    try:
        open_.update(_all_opened(groups, sampling.max_new_tokens, multi_turn))
        asked = [episode for episode in open_.values() if episode.has_begun]
        for key in [key for key, episode in open_.items() if not episode.has_begun]:
            pool.begin(key, open_[key].task)
        while open_:
            wait = not (asked or session.busy)
            replies = pool.replies(wait, _LOOK_SECONDS)
            if wait and not replies:
                yield []
            for key, reply, seconds in sorted(replies, key=lambda answer: answer[0]):
                go_on(key, open_[key].hear(reply, seconds))
            if asked:
                session.add(_requests(asked))
            asked.clear()
            yield from _new(finished)
            for completion in session.step() if session.busy else []:
                key = completion.group, completion.sample
                said = open_[key].speak(completion)
                if isinstance(said, Episode) or _woken(pool, key, open_[key]):
                    go_on(key, said)
            yield from _new(finished)
    finally:
        for key in [*open_, *((one.completion.group, one.completion.sample) for one in finished)]:
            pool.end(key)
        session.close()


def ask_again(groups: Sequence[PromptGroup], sampling: Sampling, multi_turn: MultiTurn) -> list[Key]:
    """Ask environments that are not open any more what they were asked before; those that answer otherwise, in order.

    The others rest in the pool, as far as it has room. All samples of the groups have begun (`MultiTurn.begun`).
    """
    pool, differing = multi_turn.pool, list[Key]()
    asked = dict[Key, _Open]()
    for key, episode in _all_opened(groups, sampling.max_new_tokens, multi_turn):
        if _woken(pool, key, episode):
            pool.rest(key)
        else:
            asked[key] = episode
    while asked:
        for key, reply, _ in pool.replies(wait=True):
            match asked[key].hear(reply, 0.0):
                case Action() as action:
                    pool.act(key, action)
                    continue
                case None:
                    pool.rest(key)
                case Episode():
                    pool.end(key)
                    differing.append(key)
            del asked[key]
    return sorted(differing)


def _pool_and_session(engine: RolloutEngine, sampling: Sampling, multi_turn: MultiTurn | None) -> tuple[Pool, Session]:
    if multi_turn is None:
        return _OneTurn(), _Generated(engine, sampling)
    assert isinstance(engine, StreamingEngine), "episodes of several turns need an engine with sessions"
    assert not sampling.report_experts, "experts are not recorded over several turns"
    return multi_turn.pool, engine.open_session(sampling)


def _all_opened(
    groups: Sequence[PromptGroup], room: int, multi_turn: MultiTurn | None
) -> Iterator[tuple[Key, "_Open"]]:
    """Every sample of every group, as `_opened`."""
    for group in groups:
        for i, sample in enumerate(group.samples):
            yield (group.group, sample), _opened(group, i, room, multi_turn)


def _opened(group: PromptGroup, index: int, room: int, multi_turn: MultiTurn | None) -> "_Open":
    """The sample at `index` of a group, of at most `room` tokens: it begins or goes on."""
    begun = None if multi_turn is None else multi_turn.begun.get((group.group, group.samples[index]))
    if isinstance(begun, Episode):
        assert multi_turn is not None and begun.state is not None, "it is over"  # noqa: PT018 - one thought
        return begun.state.again(group, index, multi_turn)
    return _Open(group, index, room, multi_turn, begun)


def _new(finished: list[Episode]) -> Iterator[list[Episode]]:
    """Those that have finished, if any; they leave when the caller has them."""
    if finished:
        yield sorted(finished, key=lambda episode: (episode.completion.group, episode.completion.sample))
        finished.clear()


def _woken(pool: Pool, key: Key, episode: "_Open") -> bool:
    """True if the environment is open; else it begins again, to be asked everything that it was asked."""
    if pool.wake(key, episode.task, episode.asked):
        return True
    pool.begin(key, episode.task)
    episode.begin_again()
    return False


class _Open:
    """An episode in progress."""

    def __init__(
        self, group: PromptGroup, index: int, room: int, multi_turn: MultiTurn | None, begun: Begun | None
    ) -> None:
        """As `_opened`."""
        self.group, self.index, self.prompt = group, index, group.prompt
        self.tokens, self._logprobs, self._written = list[int](), list[float](), list[bool]()
        self._room, self._multi_turn = room, multi_turn
        self._conversation: Conversation | None = None
        self._newest: Completion | None = None
        self._action, self._turns = Action(""), list[TurnRecord]()
        self._began: Turn | Outcome | None = None
        self._opening_seconds, self._reward = 0.0, 0.0
        # The tokens of a turn of the policy that goes on, and whether it wrote any in this call.
        self._turn, self._wrote = list[int](), False
        # The environment's replies so far with the actions that followed, and those that it is to repeat.
        self._known = list[tuple[Turn, Action | None]]()
        self._repeated = deque[tuple[Turn, Action | None]]()
        if begun is not None:
            self._take_in(begun)

    @property
    def room(self) -> int | None:
        """Tokens that the policy may write now; None: what its row has left."""
        if self._multi_turn is None:
            return None
        of_turn = self._multi_turn.budget.turn_tokens
        left = [self._multi_turn.room, None if of_turn is None else of_turn - len(self._turn)]
        return min((each for each in left if each is not None), default=None)

    @property
    def has_begun(self) -> bool:
        """True where the environment has said something."""
        return bool(self._known)

    @property
    def task(self) -> Task:
        """The problem as its environment gets it."""
        if self._multi_turn is None:
            return _NO_TASK
        return self._multi_turn.tasks[self.group.group, self.group.samples[self.index]]

    @property
    def asked(self) -> list[Action]:
        """The policy's actions that were answered."""
        return [action for _, action in self._known[:-1] if action is not None]

    def begin_again(self) -> None:
        """The environment has begun anew: it is asked what it was asked before, and then the newest action."""
        self._repeated = deque(self._known)

    def again(self, group: PromptGroup, index: int, multi_turn: MultiTurn) -> "_Open":
        """This episode in another call."""
        self.group, self.index, self._multi_turn, self._wrote = group, index, multi_turn, False
        return self

    def _take_in(self, begun: Begun) -> None:
        """Take in all earlier turns, by the same way as when they were played."""
        assert self._multi_turn is not None, "one turn never goes on"
        ends = self._multi_turn.talk.tokenizer.eos_ids
        for reply, end in zip(begun.replies, [*begun.ends, None], strict=True):
            heard = self.hear(reply, 0.0)
            assert heard is None, "it was not over"
            if end is not None:
                written = slice(len(self.tokens), end)
                tokens = list(begun.tokens[written])
                finish: Finish = "stop" if tokens[-1] in ends else "open"
                place = self.group.group, self.group.samples[self.index]
                said = self.speak(Completion(*place, tokens, list(begun.logprobs[written]), finish))
                assert isinstance(said, Action), "its turn was over"
                self._wrote = False
        assert self.tokens == list(begun.tokens[: len(self.tokens)]), "an observation has other tokens now"
        written = slice(len(self.tokens), None)
        self._turn = list(begun.tokens[written])
        self._extend(self._turn, begun.logprobs[written], True)

    def speak(self, completion: Completion) -> Action | Episode:
        """Take in what the policy wrote: its action, or the episode where its turn goes on later."""
        tokens, self._wrote = [*self._turn, *completion.tokens], True
        self._extend(completion.tokens, completion.logprobs, True)
        self._newest = replace(completion, tokens=tokens)
        if self._conversation is not None:
            assert self._multi_turn is not None, "it has an environment"
            if completion.finish == "open" and len(tokens) != self._multi_turn.budget.turn_tokens:
                self._turn = tokens
                return self._over("open", "", "")
            finish = "length" if completion.finish == "open" else completion.finish
            self._action, self._turn = self._conversation.action(tokens, finish), []
            self._known[-1] = self._known[-1][0], self._action
        return self._action

    def hear(self, reply: Turn | Outcome, seconds: float) -> Episode | Action | None:
        """Take in what the environment answered.

        Returns: the episode where it is over or goes on later. None: the policy is to speak. An action: it is known,
        and the environment is asked again.
        """
        if self._repeated:
            known, action = self._repeated.popleft()
            # Tools are told at the start only.
            if isinstance(reply, Turn) and (reply if known.tools else replace(reply, tools=())) == known:
                return action
            self._repeated.clear()
            reply = Outcome("crashed", detail=_OTHERWISE)
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
        if finish is not None:
            return self._over(finish, "unparsed", detail)
        self._known.append((reply, None))
        waits = self._multi_turn is not None and self._multi_turn.room is not None and self._wrote
        return self._over("open", "", "") if waits else None

    def _begin(self, reply: Turn | Outcome, seconds: float) -> Episode | None:
        if self._multi_turn is None:
            return None
        self._began, self._opening_seconds = reply, seconds
        if isinstance(reply, Outcome):
            return self._over("stop", reply.outcome, reply.detail)
        most = self._multi_turn.budget.prompt_tokens
        try:
            conversation = self._multi_turn.talk.open(reply, self._refused_from(most))
        except ObservationError as error:
            return self._over("observation", "unparsed", str(error))
        length = len(conversation.prompt)
        if not 0 < length <= (length if most is None else most):
            detail = f"the first messages are {length} tokens, 1 to {most} fit (data.max_prompt_tokens)"
            return self._over("observation", "unparsed", detail)
        self._conversation, self.prompt = conversation, conversation.prompt
        self._known.append((reply, None))
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
        last = newest.tokens[-1] if newest.finish == "stop" else None
        most = self._refused_from(room - 1 if budget.observation_tokens is None else budget.observation_tokens)
        try:
            tokens = self._conversation.observe(turn.messages, last, most)
        except LongTextError as error:
            return "length" if budget.observation_tokens is None else "observation", str(error)
        except ObservationError as error:
            return "observation", str(error)
        if budget.observation_tokens is not None and len(tokens) > budget.observation_tokens:
            return "observation", f"an observation has {len(tokens)} tokens, {budget.observation_tokens} are allowed"
        if len(tokens) >= room:
            return "length", f"an observation of {len(tokens)} tokens leaves no room, {room} are left"
        self._extend(tokens, [0.0] * len(tokens), False)
        return None, ""

    def _refused_from(self, most: int | None) -> int | None:
        assert self._multi_turn is not None, "it has an environment"
        return None if (self.group.group, self.group.samples[self.index]) in self._multi_turn.counted else most

    def _extend(self, tokens: Sequence[int], logprobs: Sequence[float], written: bool) -> None:
        self.tokens += tokens
        self._logprobs += logprobs
        self._written += [written] * len(tokens)

    def _record(self, reply: Turn | Outcome, end: int, said: str, seconds: float) -> None:
        calls = calls_json(self._action.calls)
        begin = self._turns[-1].observation_end if self._turns else 0
        told = reply.failed, reply.reward, dict(reply.info), seconds
        self._turns.append(TurnRecord(begin, end, len(self.tokens), said, calls, self._action.malformed, *told))

    def _over(self, finish: Finish, outcome: str, detail: str) -> Episode:
        """The episode as it is now."""
        if not self.tokens:
            assert self._multi_turn is not None, "without an environment the policy speaks"
            self._extend([self._multi_turn.talk.tokenizer.end_id], [0.0], False)
        completion = Completion(
            self.group.group,
            self.group.samples[self.index],
            [*self.tokens],
            [*self._logprobs],
            finish,
            None if self._newest is None else self._newest.experts,
            None if all(self._written) else [*self._written],
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
            self if finish == "open" else None,
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
            room=() if first.room is None else tuple(episode.room or 0 for episode in episodes),
        )
        for episodes in together.values()
        for first in episodes[:1]
    ]


_NO_TASK = Task("", "", 0)


class _OneTurn:
    """The pool where there is no environment: no first message, and each completion is to be judged."""

    def __init__(self) -> None:
        self._replies = list[Reply]()

    def begin(self, episode: Key, task: Task) -> None:
        self._replies.append((episode, Turn(()), 0.0))

    def act(self, episode: Key, action: Action) -> None:
        self._replies.append((episode, Outcome("judge"), 0.0))

    def replies(self, wait: bool, most_seconds: float = math.inf) -> list[Reply]:
        assert self._replies or not wait, "the engine ended without all completions"
        replies, self._replies = self._replies, []
        return replies

    def rest(self, episode: Key) -> None:
        """One turn never goes on."""

    def wake(self, episode: Key, task: Task, asked: Sequence[Action]) -> bool:
        return True

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
