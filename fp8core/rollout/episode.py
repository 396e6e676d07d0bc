"""An episode of a policy and an environment, which is one completion: its tokens are everything after the prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

from fp8core.environments.chat import Conversation, ObservationError, Talk
from fp8core.environments.protocol import Action, Outcome, Task, Turn, calls_json, opening_json, said_json
from fp8core.rewards.scorer import Key
from fp8core.rollout.engine import Completion, Finish, PromptGroup


class Begun(NamedTuple):
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
        seconds: that the environment took.
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
        outcome: the environment's; `unparsed` where a budget ended the episode, which `completion.finish` names. Where
            the policy never spoke, the completion is one token that it did not write.
        reward: of all turns together, beside what a verifier gives.
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
    state: "OpenEpisode | None" = field(default=None, compare=False, repr=False)

    @property
    def key(self) -> Key:
        return self.completion.group, self.completion.sample

    @property
    def goes_on(self) -> bool:
        return self.completion.finish == "open"

    @property
    def opening(self) -> str:
        return opening_json(self.began) if isinstance(self.began, Turn) else ""


class OpenEpisode:
    def __init__(self, request: PromptGroup, task: Task, talk: Talk, budget: TurnBudget, row_tokens: int) -> None:
        self.request, self.task = request, task
        self.tokens, self.heard, self.actions = list[int](), list[Turn](), list[Action]()
        self._talk, self._budget, self._row_tokens = talk, budget, row_tokens
        self._logprobs, self._written = list[float](), list[bool]()
        self._turns, self._reward = list[TurnRecord](), 0.0
        self._began: Turn | Outcome | None = None
        self._opening_seconds = 0.0
        self._conversation: Conversation | None = None
        # The tokens of a turn of the policy that goes on.
        self._turn = list[int]()
        # Of the present call: its room, and whether the policy wrote any token.
        self._room: int | None = None
        self._wrote = False

    @property
    def key(self) -> Key:
        return self.request.group, self.request.samples[0]

    @property
    def room(self) -> int | None:
        """Tokens that the policy may write now; None: what its row has left."""
        of_turn = self._budget.turn_tokens
        left = [self._room, None if of_turn is None else of_turn - len(self._turn)]
        return min((each for each in left if each is not None), default=None)

    @property
    def answered(self) -> list[Action]:
        return self.actions[: len(self.heard) - 1]

    def begin_call(self, room: int | None) -> None:
        self._room, self._wrote = room, False

    def take_in(self, begun: Begun) -> None:
        for reply, end in zip(begun.replies, [*begun.ends, None], strict=True):
            heard = self.hear(reply, 0.0)
            assert heard is None, "it was not over"
            turn = slice(len(self.tokens), end)
            self._write(begun.tokens[turn], begun.logprobs[turn])
            if end is not None:
                self._end_turn("stop" if self.tokens[-1] in self._talk.tokenizer.eos_ids else "length")
        assert self.tokens == [*begun.tokens], "an observation has other tokens now"

    def speak(self, completion: Completion) -> Action | Episode:
        self._write(completion.tokens, completion.logprobs)
        self._wrote = True
        if completion.finish != "open":
            return self._end_turn(completion.finish)
        return self._end_turn("length") if len(self._turn) == self._budget.turn_tokens else self._leave("open")

    def hear(self, reply: Turn | Outcome, seconds: float) -> Episode | None:
        """The episode where it is over or goes on later, else None."""
        self._reward += reply.reward
        if self._conversation is None:
            return self._begin(reply, seconds)
        end, action = len(self.tokens), self.actions[-1]
        ended: tuple[Finish, str] | None
        if isinstance(reply, Turn):
            ended, outcome, said = self._observe(reply, self._conversation), "unparsed", said_json(reply.messages)
            self.heard.append(reply)
        else:
            ended, outcome, said = (cast(Finish, action.finish), reply.detail), reply.outcome, ""
        begin = self._turns[-1].observation_end if self._turns else 0
        spoken, told = (calls_json(action.calls), action.malformed), (dict(reply.info), seconds)
        self._turns.append(TurnRecord(begin, end, len(self.tokens), said, *spoken, reply.failed, reply.reward, *told))
        if ended is not None:
            finish, detail = ended
            return self._leave(finish, outcome, detail)
        return self._leave("open") if self._room is not None and self._wrote else None

    def _begin(self, reply: Turn | Outcome, seconds: float) -> Episode | None:
        self._began, self._opening_seconds = reply, seconds
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
        self._conversation, self.request = conversation, replace(self.request, prompt=conversation.prompt)
        self.heard.append(reply)
        return None

    def _observe(self, turn: Turn, conversation: Conversation) -> tuple[Finish, str] | None:
        budget, room, stopped = self._budget, self._row_tokens - len(self.tokens), self.actions[-1].finish == "stop"
        if not (room or stopped):
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
        if len(tokens) >= room:
            return "length", f"an observation of {len(tokens)} tokens leaves no room, {room} are left"
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

    def _extend(self, tokens: Sequence[int], logprobs: Sequence[float], written: bool) -> None:
        self.tokens += tokens
        self._logprobs += logprobs
        self._written += [written] * len(tokens)

    def _leave(self, finish: Finish, outcome: str = "", detail: str = "") -> Episode:
        if not self.tokens:
            self._extend([self._talk.tokenizer.end_id], [0.0], False)
        written = None if all(self._written) else [*self._written]
        completion = Completion(*self.key, [*self.tokens], [*self._logprobs], finish, written=written)
        told = tuple(self._turns), outcome, self._reward, detail, self._began, self._opening_seconds
        return Episode(completion, self.request.prompt, *told, self if finish == "open" else None)
