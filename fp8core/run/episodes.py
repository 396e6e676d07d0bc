"""Episodes as text and as tables: their tasks, the rows of their turns, and environments that answer as recorded."""

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import shorten
from types import MappingProxyType
from typing import Any, cast

import pyarrow as pa

from fp8core.config.run import RunConfig
from fp8core.data.prompt import Problem, longest_prompt, prompt_messages
from fp8core.environments.chat import Talk
from fp8core.environments.protocol import Action, Outcome, Reply, Said, Task, Turn, opening_of, said_of
from fp8core.errors import NotRecordedError, UserError
from fp8core.models.architecture import Architecture
from fp8core.models.tokenizer import Tokenizer
from fp8core.rewards.scorer import Key
from fp8core.rollout.engine import Completion, PromptGroup, RolloutEngine, Sampling, StreamingEngine
from fp8core.rollout.episodes import (
    Episode,
    EpisodePrefix,
    MultiTurn,
    Pool,
    TurnBudget,
    one_turn_episodes,
    run_episodes,
)
from fp8core.rollout.registry import longest_row
from fp8core.run.context import StepContext
from fp8core.store.tables import key_of, text_digest

MOST_OF_QUESTION = 80


def task_of(row: Mapping[str, Any], seed: int) -> Task:
    *before, (_, question) = json.loads(row["messages"])
    columns = json.loads(row.get("columns") or "{}")
    # Generators refuse negative seeds, NumPy's among them.
    return Task(question, row["reference"], seed % 2**64, tuple(Said(*message) for message in before), columns)


def messages_of(problem: Problem, config: RunConfig) -> str:
    return json.dumps(prompt_messages(problem, config))


def completion_text(tokens: Sequence[int], finish: str, tokenizer: Tokenizer, stop_strings: Sequence[str] = ()) -> str:
    return text_until(tokenizer.decode(tokens[:-1] if finish == "stop" else tokens), stop_strings)


def text_until(text: str, strings: Sequence[str]) -> str:
    ends = [text.index(string) + len(string) for string in strings if string in text]
    return text[: min(ends, default=len(text))]


def turn_rows(episode: Episode, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Rows of kind `turns` without place; none without an environment."""
    began = episode.began
    if began is None:
        return []
    opening: dict[str, Any] = {
        **{"turn": 0, "begin": 0, "end": 0, "observation_end": 0, "text": "", "calls": "", "malformed": ""},
        **{"said": episode.opening, "failed": began.failed, "reward": began.reward, "info": _info_json(began.info)},
    }
    rows = [opening]
    for number, turn in enumerate(episode.turns, start=1):
        rows.append(
            {
                **{"turn": number, "begin": turn.begin, "end": turn.end, "observation_end": turn.observation_end},
                **{"text": said_by_policy(episode.completion.tokens[turn.begin : turn.end], tokenizer)},
                **{"calls": turn.calls, "malformed": turn.malformed, "said": turn.said, "failed": turn.failed},
                **{"reward": turn.reward, "info": _info_json(turn.info)},
            }
        )
    for row in rows:
        row |= {"observation": text_digest(row["said"]), "outcome": "", "detail": ""}
    rows[-1] |= {"outcome": episode.outcome, "detail": episode.detail}
    if not (episode.turns or episode.goes_on):
        # The policy never spoke: a token stands for what it would have written.
        rows[-1]["observation_end"] = len(episode.completion.tokens)
    return rows


def _info_json(info: Mapping[str, float]) -> str:
    return json.dumps(dict(info), sort_keys=True) if info else ""


def said_by_policy(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    return tokenizer.decode(tokens[:-1] if tokens and tokens[-1] in tokenizer.eos_ids else tokens)


def seconds_of(episode: Episode) -> list[float]:
    opening = [] if episode.began is None else [episode.opening_seconds]
    return [*opening, *(turn.seconds for turn in episode.turns)]


class RecordedPool:
    def __init__(self, turns: pa.Table) -> None:
        self._recorded_replies: dict[Key, list[Turn | Outcome]] = {}
        for row in turns.to_pylist():
            self._recorded_replies.setdefault(key_of(row), []).append(_reply(row))
        self._next: dict[Key, Iterator[Turn | Outcome]] = {}
        self._replies = list[Reply]()

    def begin(self, episode: Key, task: Task) -> None:
        if episode not in self._recorded_replies:
            question = shorten(task.question, MOST_OF_QUESTION, placeholder="...")
            raise NotRecordedError(
                f'sample {episode[1]} of the prompt "{question}": the run played no such episode in this step, so no '
                "answers are recorded"
            )
        self._next[episode] = iter(self._recorded_replies[episode])
        self._answer(episode)

    def act(self, episode: Key, action: Action) -> None:
        self._answer(episode)

    def replies(self, wait: bool, most_seconds: float = math.inf) -> list[Reply]:
        replies = self._replies
        self._replies = []
        return replies

    def rest(self, episode: Key) -> None:
        pass

    def wake(self, episode: Key, task: Task, actions: Sequence[Action]) -> bool:
        return episode in self._next

    def end(self, episode: Key) -> None:
        self._next.pop(episode, None)

    def _answer(self, episode: Key) -> None:
        no_reply = Outcome("crashed", detail="nothing was recorded of a turn so late")
        self._replies.append((episode, next(self._next[episode], no_reply), 0.0))


def _reply(row: Mapping[str, Any]) -> Turn | Outcome:
    info = json.loads(row["info"] or "{}")
    if not row["said"]:
        return Outcome(row["outcome"], row["reward"], row["failed"], row["detail"], info)
    reply = opening_of(row["said"]) if not row["turn"] else Turn(said_of(row["said"]))
    return replace(reply, reward=row["reward"], failed=row["failed"], info=info)


def prefix_of_turns(
    tokens: Sequence[int], logprobs: Sequence[float], turns: Sequence[Mapping[str, Any]]
) -> EpisodePrefix:
    replies = [_reply(dict(row)) for row in turns]
    assert all(isinstance(reply, Turn) for reply in replies), "an outcome ends an episode"
    return EpisodePrefix(tokens, logprobs, cast(list[Turn], replies), [row["end"] for row in turns[1:]])


@dataclass(frozen=True)
class EpisodePlayer:
    """`longest`: most tokens of an environment's first messages."""

    config: RunConfig
    tokenizer: Tokenizer
    longest: int

    @classmethod
    def of(cls, config: RunConfig, tokenizer: Tokenizer, arch: Architecture) -> "EpisodePlayer":
        return cls(config, tokenizer, longest_prompt(config, longest_row(config, arch)))

    def sampling(self) -> Sampling:
        rollout = self.config.rollout
        return Sampling(rollout.temperature, rollout.max_new_tokens, self.tokenizer.eos_ids)

    def evaluation_sampling(self, temperature: float) -> Sampling:
        """At a temperature of the evaluation's own; 0 is greedy."""
        return Sampling(temperature, self.config.rollout.max_new_tokens, self.tokenizer.eos_ids)

    def play(
        self,
        engine: RolloutEngine,
        groups: Sequence[PromptGroup],
        prompts: Sequence[Mapping[str, Any]],
        sampling: Sampling,
        pool: Pool | None = None,
        prefixes: Mapping[Key, EpisodePrefix | Episode] = MappingProxyType({}),
    ) -> Generator[list[Episode], None, None]:
        """Whole episodes, as they are over or reach the limit of their groups.

        Args:
            prompts: rows of kind `prompts`, of these groups or more.
            pool: None without an environment: the policy's turn ends each episode.
            prefixes: of `MultiTurn`, of groups that have tokens.
        """
        if pool is None:
            strings = self.config.rollout.stop_strings
            for episodes in one_turn_episodes(engine, groups, sampling, prefixes):
                yield [replace(one, completion=cut_at(one.completion, self.tokenizer, strings)) for one in episodes]
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
        multi_turn = MultiTurn(pool, Talk.of(self.config, self.tokenizer), tasks, budget, prefixes, max_tokens)
        # An episode has its own tokens, and its limit is that of all turns together.
        yield from run_episodes(
            engine, [replace(group, prefix_tokens=(), max_tokens=()) for group in groups], sampling, multi_turn
        )


def pool_of(run: StepContext, read_turns: Callable[[], pa.Table]) -> Pool | None:
    """The run's environments, or in a replay its `read_turns` turns; None without an environment."""
    if run.config.environment is None:
        return None
    return RecordedPool(read_turns()) if run.environment is None else run.environment


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
    return replace(
        completion,
        tokens=completion.tokens[:count],
        logprobs=completion.logprobs[:count],
        finish="stop_string",
        experts=None if experts is None else experts[: len(experts) - (whole - count)],
    )
