"""Episodes as text and as tables: their tasks, the rows of their turns, and environments that answer as recorded."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from textwrap import shorten
from typing import Any, cast

import pyarrow as pa

from fp8core.config.run import RunConfig
from fp8core.data.prompt import Problem, question_text
from fp8core.environments.protocol import Action, Outcome, Reply, Said, Task, Turn, opening_of, said_of
from fp8core.errors import NotRecordedError
from fp8core.models.tokenizer import Tokenizer
from fp8core.rewards.scorer import Key
from fp8core.rollout.engine import Completion
from fp8core.rollout.episode import Begun, Episode
from fp8core.store.tables import TURNS, key_of, text_digest

MOST_OF_QUESTION = 80


def task_of(row: Mapping[str, Any], seed: int) -> Task:
    """The problem of a row of kind `prompts` as an environment gets it; `seed` is the completion's, with a sign."""
    *before, (_, question) = json.loads(row["messages"])
    columns = json.loads(row.get("columns") or "{}")
    # Generators refuse negative seeds, NumPy's among them.
    return Task(question, row["reference"], seed % 2**64, tuple(Said(*message) for message in before), columns)


def messages_of(problem: Problem, config: RunConfig) -> str:
    """The messages of a problem in a row of kind `prompts`, JSON."""
    return json.dumps([*problem.before, ("user", question_text(problem, config))])


def completion_text(completion: Completion, tokenizer: Tokenizer, stop_strings: Sequence[str]) -> str:
    """The completion as text, without its stop token and what its last token has after a stop string."""
    stopped = completion.finish == "stop"
    text = tokenizer.decode(completion.tokens[:-1] if stopped else completion.tokens)
    return text_until(text, stop_strings)


def text_until(text: str, strings: Sequence[str]) -> str:
    """The text up to the end of the string that is complete first; all of it where none is."""
    ends = [text.index(string) + len(string) for string in strings if string in text]
    return text[: min(ends, default=len(text))]


def turn_rows(episode: Episode, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The rows of kind `turns` of an episode, without group and sample: what the environment began with, then turns."""
    began = Turn(()) if episode.began is None else episode.began
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
    """The text of a turn, without the token that ended it."""
    return tokenizer.decode(tokens[:-1] if tokens and tokens[-1] in tokenizer.eos_ids else tokens)


def turns_table(episodes: Sequence[Episode], tokenizer: Tokenizer) -> pa.Table:
    rows = [
        {"group": one.completion.group, "sample": one.completion.sample, **row}
        for one in episodes
        for row in turn_rows(one, tokenizer)
    ]
    return pa.Table.from_pylist(rows, schema=TURNS)


def episode_means(episodes: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """Turns of the policy, tool calls, failed ones and malformed ones of an episode in the mean.

    `episodes`: rows of kind `turns`, episode by episode.
    """
    turns = [row for rows in episodes for row in rows if row["turn"]]
    totals = {
        "turns": len(turns),
        "tool_calls": sum(len(json.loads(row["calls"])) for row in turns if row["calls"]),
        "tool_errors": sum(row["failed"] for row in turns),
        "malformed": sum(bool(row["malformed"]) for row in turns),
    }
    return {name: total / len(episodes) for name, total in totals.items()}


def seconds_of(episode: Episode) -> list[float]:
    """Seconds that the environment took, answer by answer; the first is for its opening."""
    return [episode.opening_seconds, *(turn.seconds for turn in episode.turns)]


class RecordedPool:
    """Answers as an environment did, from a table of kind `turns`; see `rollout.episodes.Pool`."""

    def __init__(self, turns: pa.Table) -> None:
        self._recorded: dict[Key, list[Turn | Outcome]] = {}
        for row in turns.to_pylist():
            self._recorded.setdefault(key_of(row), []).append(_reply(row))
        self._next: dict[Key, Iterator[Turn | Outcome]] = {}
        self._replies = list[Reply]()

    def begin(self, episode: Key, task: Task) -> None:
        """Start an episode. Raises NotRecordedError: the run did not play it, as other settings may have begun it."""
        if episode not in self._recorded:
            asked = shorten(task.question, MOST_OF_QUESTION, placeholder="...")
            raise NotRecordedError(
                f'sample {episode[1]} of the prompt "{asked}": the run played no such episode in this step, so no '
                "answers are recorded; --rerun-environments asks the environment"
            )
        self._next[episode] = iter(self._recorded[episode])
        self._answer(episode)

    def act(self, episode: Key, action: Action) -> None:
        """Answer as it was answered, whatever the policy wrote."""
        self._answer(episode)

    def replies(self, wait: bool, most_seconds: float = math.inf) -> list[Reply]:
        replies, self._replies = self._replies, []
        return replies

    def rest(self, episode: Key) -> None:
        """It is asked again later."""

    def wake(self, episode: Key, task: Task, asked: Sequence[Action]) -> bool:
        return episode in self._next

    def end(self, episode: Key) -> None:
        self._next.pop(episode, None)

    def _answer(self, episode: Key) -> None:
        ended = Outcome("crashed", detail="nothing was recorded of a turn so late")
        self._replies.append((episode, next(self._next[episode], ended), 0.0))


def _reply(row: Mapping[str, Any]) -> Turn | Outcome:
    """The answer in a row of kind `turns`; what a budget ended was answered with a turn."""
    info = json.loads(row["info"] or "{}")
    if not row["said"]:
        return Outcome(row["outcome"], row["reward"], row["failed"], row["detail"], info)
    told = opening_of(row["said"]) if not row["turn"] else Turn(said_of(row["said"]))
    return replace(told, reward=row["reward"], failed=row["failed"], info=info)


def begun_of(tokens: Sequence[int], logprobs: Sequence[float], turns: Sequence[Mapping[str, Any]]) -> Begun:
    """An episode that goes on, from its tokens so far and its rows of kind `turns`."""
    replies = [_reply(dict(row)) for row in turns]
    assert all(isinstance(reply, Turn) for reply in replies), "an outcome ends an episode"
    return Begun(tokens, logprobs, cast(list[Turn], replies), [row["end"] for row in turns[1:]])
