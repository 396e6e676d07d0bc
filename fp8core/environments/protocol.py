"""The protocol of environments. Imported by child processes, hence free of everything heavy."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from fp8core.rewards.scorer import Key

Role = Literal["system", "user", "assistant", "tool"]


class Tool(NamedTuple):
    """A function that the policy may call; `parameters` is the JSON schema of its arguments, an object."""

    name: str
    description: str
    parameters: Mapping[str, Any]


class ToolCall(NamedTuple):
    name: str
    arguments: Mapping[str, Any]


class Said(NamedTuple):
    """A message of the environment; `role` is user or tool, of the first turn also system or assistant."""

    role: Role
    content: str


@dataclass(frozen=True)
class Action:
    """The text of the policy in a turn without the token that ended it, and the calls that were read in it.

    `malformed`: why what looks like a call is none. `finish`: as a completion's: `stop`, `length`, `stop_string`.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    malformed: str = ""
    finish: str = "stop"


@dataclass(frozen=True)
class Turn:
    """The environment speaks, and the policy is to answer.

    Attributes:
        messages: new ones since the policy wrote; of `start` the whole conversation up to the policy's first turn.
        tools: told at the start only.
        reward: of the action that this answers; it adds up over the episode.
        failed: how many of the action's calls failed.
        info: numbers for metrics, by a short name.
    """

    messages: tuple[Said, ...]
    tools: tuple[Tool, ...] = ()
    reward: float = 0.0
    failed: int = 0
    info: Mapping[str, float] = field(default_factory=dict)


Ending = Literal["judge", "right", "wrong", "unparsed", "timeout", "crashed"]


@dataclass(frozen=True)
class Outcome:
    """The end of an episode.

    Attributes:
        outcome: `judge` where the configured verifier is to read the policy's last turn, else as a verdict's.
        reward: of the last action, beside what the verifier gives it; a `right` outcome adds nothing to it.
        failed: how many of the last action's calls failed.
    """

    outcome: Ending
    reward: float = 0.0
    failed: int = 0
    detail: str = ""
    info: Mapping[str, float] = field(default_factory=dict)


Reply = tuple[Key, Turn | Outcome, float]
"""With the seconds that the environment took."""


@dataclass(frozen=True)
class TurnRecord:
    """A turn of the policy and the environment's answer: a row of kind `turns` (`store.tables.TURNS`) without its key.

    Attributes:
        turn: from 1; turn 0 has the environment's first messages.
        said: messages of the answer as JSON, of turn 0 also the tools; empty where the answer was an outcome.
        observation: SHA-256 of `said`.
        text: of the policy, without the token that ended it.
        calls: tool calls of the policy, JSON: a list of name and arguments.
        malformed: why what looked like a call is none, else empty.
        reward, failed, info: of the answer; `info` as JSON.
        begin, end: the policy's tokens, a range of the completion's; the answer's follow up to `observation_end`.
        outcome, detail: of the last turn of a completion that is over: the environment's, or `unparsed` where a budget
            ended it.
    """

    turn: int
    said: str = ""
    observation: str = ""
    reward: float = 0.0
    failed: int = 0
    info: str = ""
    text: str = ""
    calls: str = ""
    malformed: str = ""
    begin: int = 0
    end: int = 0
    observation_end: int = 0
    outcome: str = ""
    detail: str = ""
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class Task:
    """A problem as an environment gets it.

    Attributes:
        reference: it never reaches the policy unless the environment tells it.
        before: messages before the question.
        columns: other columns of its row (`data.columns`).
        seed: of this episode; unsigned, 64 bits, the same whenever the episode is begun again.
    """

    question: str
    reference: str
    seed: int
    before: tuple[Said, ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """One episode. Each lives in a process of its own; whatever it raises ends that episode as `crashed`.

    `close` is called once, also after an Outcome, or where `start` failed.
    """

    def start(self, task: Task) -> Turn | Outcome: ...

    def step(self, action: Action) -> Turn | Outcome: ...

    def close(self) -> None: ...
