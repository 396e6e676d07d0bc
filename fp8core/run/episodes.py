"""Episodes of a run: their tasks, as tables, as they were recorded, and the verdicts on how they ended.

Without `environment` in the configuration an episode is one turn that the verifier judges. So there is one way from
prompts to rewards.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from textwrap import shorten
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa

from fp8core.config.environment import EnvironmentConfig
from fp8core.config.run import RunConfig
from fp8core.data.prompt import (
    ADDED_TOKENS,
    Problem,
    encode_prompt,
    longest_prompt,
    prompt_text,
    question_text,
    refuse_length,
)
from fp8core.environments.chat import AT_LEAST, ObservationError, Talk
from fp8core.environments.protocol import Action, Reply, Said, Task, Turn, opening_of, said_of
from fp8core.environments.protocol import Outcome as EnvironmentOutcome
from fp8core.errors import InvalidReply, NotRecordedError, UserError
from fp8core.models.tokenizer import Tokenizer
from fp8core.rewards.scorer import Answer, Key, Outcome, Verdict
from fp8core.rewards.verifier import Verifier
from fp8core.rollout.engine import Completion, sample_seed
from fp8core.rollout.episodes import Begun, Episode, Pool
from fp8core.store.tables import COMPLETION_KEY, TURNS, key_of, text_digest

UNCHECKED_OUTCOMES: dict[Outcome, str] = {"timeout": "timed out", "crashed": "crashed"}
"""Outcomes by which nothing was checked, in words."""
MOST_OF_QUESTION = 80
JUDGE = "judge"
"""The outcome of an episode whose last turn the verifier reads."""


def task_of(row: Mapping[str, Any], seed: int) -> Task:
    """The problem of a row of kind `prompts` as an environment gets it."""
    *before, (_, question) = json.loads(row["messages"])
    columns = json.loads(row.get("columns") or "{}")
    return Task(question, row["reference"], seed, tuple(Said(*message) for message in before), columns)


def messages_of(problem: Problem, config: RunConfig) -> str:
    """The messages of a problem in a row of kind `prompts`, JSON."""
    return json.dumps([*problem.before, ("user", question_text(problem, config))])


def check_openings(
    problems: Sequence[Problem], config: RunConfig, tokenizer: Tokenizer, max_positions: int, pool: Pool, seed: int
) -> None:
    """Raises UserError, with the place (file:line), on a problem that its environment makes too long to be a prompt.

    `seed` is that of the episodes to be played. Each costs a process, so few begin. The longest problem shows how many
    tokens the environment adds, and each problem begins that is too long with as many. An episode that gets more ends
    when it is played.
    """
    assert config.environment is not None, "a pool is of an environment"
    name, talk = config.environment.name, Talk(tokenizer, tool_calls_of(config.environment, tokenizer))
    lengths = [len(prompt_text(row, config, tokenizer)[0].encode()) for row in problems]

    def opened(place: int) -> int | None:
        """Tokens of an episode's first messages; None: it ended at once, which is for its step to tell."""
        row = problems[place]
        turn = _begun(place, row, config, pool, seed)
        pool.end((place, 0))
        if not isinstance(turn, Turn):
            return None
        try:
            return len(talk.open(turn).prompt)
        except ObservationError as error:
            raise UserError(f"{row.place or row.prompt_id}: environment.name={name} begins with: {error}") from error

    longest = max(range(len(problems)), key=lengths.__getitem__)
    if (most := opened(longest)) is None:
        return
    added = most - len(encode_prompt(problems[longest], config, tokenizer, max_positions)[1])
    room = longest_prompt(config, max_positions) - added
    for place, row in enumerate(problems):
        if place == longest:
            count: int | None = most
        elif lengths[place] + ADDED_TOKENS <= room:
            continue
        else:
            long = len(encode_prompt(row, config, tokenizer, max_positions)[1]) > room
            count = opened(place) if long else None
        if count is not None:
            refuse_length(row, count, f"tokens as environment.name={name} begins it", config, max_positions)


def _begun(place: int, problem: Problem, config: RunConfig, pool: Pool, seed: int) -> Turn | EnvironmentOutcome:
    """The first answer of episode `place`, which stays open, to a problem."""
    asked = {"messages": messages_of(problem, config), "reference": problem.reference, "columns": problem.columns}
    pool.begin((place, 0), task_of(asked, sample_seed(seed, 0, place, 0)))
    ((_, reply, _),) = pool.replies(wait=True)
    return reply


Trial = list[Turn | EnvironmentOutcome]


def trial(problem: Problem, config: RunConfig, pool: Pool) -> Trial:
    """The first answer to a problem, and the one to an empty answer of the policy if it is asked for one."""
    replies = [_begun(0, problem, config, pool, config.seed)]
    if isinstance(replies[0], Turn):
        pool.act((0, 0), Action(""))
        replies += [reply for _, reply, _ in pool.replies(wait=True)]
    pool.end((0, 0))
    return replies


def failed_trial(replies: Trial, config: RunConfig) -> str | None:
    """The failure of an environment in its `trial`, in a line; None: it does not fail.

    So a bug in `step` shows before the warm start. It is for people: an environment may be unable to read nothing.
    """
    assert config.environment is not None, "a trial is of an environment"
    *_, reply = replies
    if isinstance(reply, Turn) or reply.outcome not in UNCHECKED_OUTCOMES:
        return None
    how = ended_as(reply.outcome, reply.detail)
    return f"environment.name={config.environment.name}: an episode whose first answer is empty ends as {how}"


def refuse_invalid(replies: Trial, config: RunConfig) -> None:
    """Raises UserError: what an environment returned in its `trial` is no reply, whatever it was asked."""
    assert config.environment is not None, "a trial is of an environment"
    *_, reply = replies
    if isinstance(reply, EnvironmentOutcome) and (invalid := InvalidReply.read(reply.detail)) is not None:
        asked = "start" if len(replies) == 1 else "step, with an empty answer"
        raise UserError(f"environment.name={config.environment.name}: {asked}: {invalid}")


def check_observation(replies: Trial, config: RunConfig, tokenizer: Tokenizer) -> None:
    """Raises UserError: the chat template cannot go on after a `trial`, as at the first observation of a step."""
    assert config.environment is not None, "a trial is of an environment"
    if not tokenizer.has_template or config.environment.max_turns == 1:
        return
    match replies:
        case [Turn() as first, Turn() as reply]:
            talk = Talk(tokenizer, tool_calls_of(config.environment, tokenizer))
            with suppress(ObservationError):  # It ends an episode, and no run.
                talk.open(first).observe(reply.messages, tokenizer.end_id)


def ended_as(outcome: str, detail: str) -> str:
    """An outcome and what is known of it, for people."""
    return f"{outcome}: {detail}".removesuffix(": ")


def tool_calls_of(config: EnvironmentConfig, tokenizer: Tokenizer) -> str:
    """The name of the format of tool calls (`environments.tool_calls.TOOL_CALLS`).

    Raises:
        UserError: it is to be that of the chat template, which writes no tool calls that are known.
    """
    if config.format != "auto":
        return config.format
    if not tokenizer.has_template:
        return "plain"
    for mark, name in (("<tool_call>", "qwen"), ("<|python_tag|>", "llama3")):
        if mark in tokenizer.template:
            return name
    raise UserError(
        f"environment.format=auto: {tokenizer.where}: the chat template writes no tool calls that are known; set it to "
        "qwen, llama3 or plain, and the first message says how to call"
    )


def completion_text(completion: Completion, tokenizer: Tokenizer, stop_strings: Sequence[str]) -> str:
    """The completion as text, without its stop token and what its last token has after a stop string."""
    stopped = completion.finish == "stop"
    text = tokenizer.decode(completion.tokens[:-1] if stopped else completion.tokens)
    return text_until(text, stop_strings)


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
                **{"text": _said_by_policy(episode.completion.tokens[turn.begin : turn.end], tokenizer)},
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


def _said_by_policy(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """The text of a turn, without the token that ended it."""
    return tokenizer.decode(tokens[:-1] if tokens and tokens[-1] in tokenizer.eos_ids else tokens)


def turns_table(episodes: Sequence[Episode], tokenizer: Tokenizer) -> pa.Table:
    """Episodes as a table of kind `turns`, in their order."""
    rows = [
        {"group": one.completion.group, "sample": one.completion.sample, **row}
        for one in episodes
        for row in turn_rows(one, tokenizer)
    ]
    return pa.Table.from_pylist(rows, schema=TURNS)


class RecordedPool:
    """Answers as an environment did, from a table of kind `turns`; see `rollout.episodes.Pool`.

    Attributes:
        counted: as of `MultiTurn`, episodes of which no detail says that tokens were not counted.
    """

    def __init__(self, turns: pa.Table) -> None:
        self._recorded: dict[Key, list[Turn | EnvironmentOutcome]] = {}
        bounded = set[Key]()
        for row in turns.to_pylist():
            self._recorded.setdefault(key_of(row), []).append(_reply(row))
            if row["detail"].startswith(AT_LEAST):
                bounded.add(key_of(row))
        self.counted = frozenset(self._recorded.keys() - bounded)
        self._next: dict[Key, Iterator[Turn | EnvironmentOutcome]] = {}
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
        """All answers that are due."""
        replies, self._replies = self._replies, []
        return replies

    def rest(self, episode: Key) -> None:
        """It is asked again later."""

    def wake(self, episode: Key, task: Task, asked: Sequence[Action]) -> bool:
        """Go on with an episode that was begun here."""
        return episode in self._next

    def end(self, episode: Key) -> None:
        """Forget an episode; of one that is over this does nothing."""
        self._next.pop(episode, None)

    def _answer(self, episode: Key) -> None:
        ended = EnvironmentOutcome("crashed", detail="nothing was recorded of a turn so late")
        self._replies.append((episode, next(self._next[episode], ended), 0.0))


def _reply(row: Mapping[str, Any]) -> Turn | EnvironmentOutcome:
    """The answer in a row of kind `turns`; what a budget ended was answered with a turn."""
    info = json.loads(row["info"] or "{}")
    if not row["said"]:
        return EnvironmentOutcome(row["outcome"], row["reward"], row["failed"], row["detail"], info)
    told = opening_of(row["said"]) if not row["turn"] else Turn(said_of(row["said"]))
    return replace(told, reward=row["reward"], failed=row["failed"], info=info)


def begun_of(tokens: Sequence[int], logprobs: Sequence[float], turns: Sequence[Mapping[str, Any]]) -> Begun:
    """An episode that goes on, from its tokens so far and its rows of kind `turns`."""
    replies = [_reply(dict(row)) for row in turns]
    assert all(isinstance(reply, Turn) for reply in replies), "an outcome ends an episode"
    return Begun(tokens, logprobs, cast(list[Turn], replies), [row["end"] for row in turns[1:]])


class Ending(NamedTuple):
    """The end of an episode: outcome and reward by the environment, and the text for a verifier."""

    group: int
    outcome: str
    reward: float
    detail: str
    text: str
    finish: str


def ending_of(episode: Episode, config: RunConfig, tokenizer: Tokenizer) -> Ending:
    """The end of a played episode; the verifier reads its last turn."""
    done = episode.completion
    if config.environment is None or not episode.turns:
        text = completion_text(done, tokenizer, config.rollout.stop_strings)
    else:
        last = episode.turns[-1]
        text = _said_by_policy(done.tokens[last.begin : last.end], tokenizer)
    return Ending(done.group, episode.outcome, episode.reward, episode.detail, text, done.finish)


def stored_endings(rollouts: pa.Table, turns: pa.Table | None) -> list[Ending]:
    """The ends of stored episodes, in the order of the rollouts (`group`, `sample`, `text`, `finish`)."""
    rows = rollouts.select([*COMPLETION_KEY, "text", "finish"]).to_pylist()
    if turns is None:
        return [Ending(row["group"], JUDGE, 0.0, "", row["text"], row["finish"]) for row in rows]
    played: dict[Key, list[dict[str, Any]]] = {}
    for turn in turns.select([*COMPLETION_KEY, "text", "reward", "outcome", "detail"]).to_pylist():
        played.setdefault(key_of(turn), []).append(turn)

    def ending(row: Mapping[str, Any]) -> Ending:
        said = played[key_of(row)]
        total, last = sum(turn["reward"] for turn in said), said[-1]
        return Ending(row["group"], last["outcome"], total, last["detail"], last["text"], row["finish"])

    return [ending(row) for row in rows]


class Scored(NamedTuple):
    """The verdict on an episode, and its whole reward."""

    verdict: Verdict
    reward: float


def answers(asked: Sequence[Mapping[str, Any]], endings: Sequence[Ending]) -> list[Answer]:
    """The verifier's input for the episodes that it judges, in their order; `asked` are rows of kind `prompts`."""
    rows = {row["group"]: row for row in asked}
    return [answer_to(rows[one.group], one.text, one.finish) for one in endings if one.outcome == JUDGE]


def answer_to(asked: Mapping[str, Any], completion: str, finish: str) -> Answer:
    """`asked`: the row of its prompt. To a verifier a completion that ends in a stop string has stopped."""
    ended = "stop" if finish == "stop_string" else finish
    return Answer(asked["text"], completion, asked["reference"], ended, asked.get("columns", ""))


def score(verifier: Verifier, asked: Sequence[Mapping[str, Any]], endings: Sequence[Ending]) -> list[Scored]:
    """The verdict on each episode: the verifier's where the environment leaves it to that, else the environment's.

    Of the others a right outcome scores 1, and the reward is that of the environment alone.
    """
    verdicts = iter(verifier.verify(answers(asked, endings)))
    found = []
    for one in endings:
        if one.outcome == JUDGE:
            verdict = next(verdicts)
            found.append(Scored(verdict, verdict.reward + one.reward if one.reward else verdict.reward))
        else:
            right = float(one.outcome == "right")
            found.append(Scored(Verdict(right, cast(Outcome, one.outcome), one.detail), one.reward))
    return found


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


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Nearest-rank percentiles of times, and their number; empty without any."""
    if not seconds:
        return {}
    p50, p95 = np.percentile(seconds, [50, 95], method="nearest").tolist()
    return {"answers": float(len(seconds)), "p50": p50, "p95": p95, "max": max(seconds)}


def text_until(text: str, strings: Sequence[str]) -> str:
    """The text up to the end of the string that is complete first; all of it where none is."""
    ends = [text.index(string) + len(string) for string in strings if string in text]
    return text[: min(ends, default=len(text))]


def cut_at(completion: Completion, tokenizer: Tokenizer, strings: Sequence[str]) -> Completion:
    """The completion up to the token that completes the first of the strings; all of it without one.

    A token depends on those before it alone. So the result equals, bit for bit, a completion of an engine that stops
    there.
    """
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
