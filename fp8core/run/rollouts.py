"""Problems as requests, completions as tables with verdicts, and how well held-out prompts are answered."""

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple, cast

import pyarrow as pa
import pyarrow.compute as pc

from fp8core.config.run import RunConfig
from fp8core.data.prompt import Problem, encode_prompt
from fp8core.errors import UserError
from fp8core.metrics.episodes import episode_means
from fp8core.models.tokenizer import Tokenizer
from fp8core.progress import Progress, tell_progress
from fp8core.rewards.scorer import OUTCOMES, Answer, Key, Verdict, VerdictOutcome
from fp8core.rewards.verifier import Verifier
from fp8core.rl.batch import routes_column
from fp8core.rollout.engine import PromptGroup, RolloutEngine, sample_seed
from fp8core.rollout.episodes import Episode, Pool
from fp8core.rollout.registry import longest_row
from fp8core.rollout.stream import Row
from fp8core.run.context import RunContext, StepContext
from fp8core.run.episodes import EpisodePlayer, completion_text, messages_of, pool_of, turn_rows
from fp8core.store.artifacts import Ref
from fp8core.store.ledger import START
from fp8core.store.tables import (
    COLUMNS,
    COMPLETION_KEY,
    EXPERTS,
    HELDOUT_SAMPLES,
    MESSAGES,
    PROMPTS,
    ROLLOUTS,
    SAMPLE_CHARACTERS,
    TURNS,
    VERSIONS,
    key_of,
)

UNCHECKED_OUTCOMES: dict[VerdictOutcome, str] = {"timeout": "timed out", "crashed": "crashed"}
"""Outcomes by which nothing was checked, in words."""
JUDGE = "judge"
"""The outcome of an episode whose last turn the verifier reads."""


def prompt_table(run: StepContext, problems: list[Problem]) -> pa.Table:
    return problem_table(problems, run.config, run.tokenizer, longest_row(run.config, run.arch))


def problem_table(problems: Sequence[Problem], config: RunConfig, tokenizer: Tokenizer, max_positions: int) -> pa.Table:
    text_tokens = [encode_prompt(problem, config, tokenizer, max_positions) for problem in problems]
    columns = {
        "group": list(range(len(problems))),
        "prompt_id": [problem.prompt_id for problem in problems],
        "text": [text for text, _ in text_tokens],
        "tokens": [tokens for _, tokens in text_tokens],
        "reference": [problem.reference for problem in problems],
    }
    schema = PROMPTS
    if config.data.columns:
        columns["columns"] = [problem.columns for problem in problems]
        schema = schema.append(COLUMNS)
    if config.environment is not None:
        columns["messages"] = [messages_of(problem, config) for problem in problems]
        schema = schema.append(MESSAGES)
    return pa.table(columns, schema=schema)


def groups_of(prompts: Iterable[Mapping[str, Any]], seed: int, index: int, samples: int) -> list[PromptGroup]:
    numbers = tuple(range(samples))
    return [
        PromptGroup(
            group=row["group"],
            prompt_id=row["prompt_id"],
            prompt=tuple(row["tokens"]),
            samples=numbers,
            seeds=tuple(sample_seed(seed, index, row["group"], sample) for sample in numbers),
        )
        for row in prompts
    ]


def row_of(episode: Episode, row: Row, tokenizer: Tokenizer) -> Row:
    """`row`: place, prompt and seed of the episode."""
    completion = episode.completion
    return replace(
        row,
        prompt_tokens=[*episode.prompt],
        tokens=completion.tokens,
        logprobs=completion.logprobs,
        finish="" if episode.goes_on else completion.finish,
        written=[True] * len(completion.tokens) if completion.policy_mask is None else completion.policy_mask,
        turns=turn_rows(episode, tokenizer),
        experts=completion.experts,
    )


def row_tables(rows: Sequence[Row], config: RunConfig, tokenizer: Tokenizer) -> tuple[pa.Table, pa.Table | None]:
    """Tables of kinds `rollouts`, and `turns` with an environment."""
    row_dicts = [
        {
            **vars(row),
            "written": row.written or [True] * len(row.tokens),
            "text": completion_text(row.tokens, row.finish, tokenizer, config.rollout.stop_strings),
        }
        for row in rows
    ]
    # Where nothing may be stale, tokens are of one version.
    stale = config.pipeline.mode != "synchronous" and config.pipeline.max_staleness > 0
    table = pa.Table.from_pylist(row_dicts, schema=ROLLOUTS.append(VERSIONS) if stale else ROLLOUTS)
    if experts := [row.experts for row in rows if row.experts is not None]:
        table = table.append_column(EXPERTS, routes_column(experts))
    return table, turn_table(rows, config)


def turn_table(rows: Sequence[Row], config: RunConfig) -> pa.Table | None:
    """None without an environment."""
    if config.environment is None:
        return None
    turns = [{"group": row.group, "sample": row.sample, **turn} for row in rows for turn in row.turns]
    return pa.Table.from_pylist(turns, schema=TURNS)


def tables_of(
    episodes: Sequence[Episode], groups: Sequence[PromptGroup], config: RunConfig, tokenizer: Tokenizer
) -> tuple[pa.Table, pa.Table | None]:
    """`row_tables` of whole episodes; `groups`: what was asked."""
    rows = {
        (group.group, sample): Row(0, group.group, sample, group.prompt_id, seed, [*group.prompt])
        for group in groups
        for sample, seed in zip(group.samples, group.seeds, strict=True)
    }
    return row_tables([row_of(one, rows[one.key], tokenizer) for one in episodes], config, tokenizer)


def written_sample(run: RunContext, index: int) -> tuple[str, str, float] | None:
    """Prompt, text and reward of the first completion of a step."""
    store = run.store
    refs = {ref.kind: ref for ref in run.directory.ledger.artifacts(index).values()}
    if not {"prompts", "rollouts", "rewards"} <= refs.keys():
        return None
    # Tables of completions are in one order, and the first prompt is answered first.
    text, prompt, reward = (
        store.get_table(refs[kind], [column])[column][0].as_py()
        for kind, column in (("rollouts", "text"), ("prompts", "text"), ("rewards", "reward"))
    )
    return prompt, text, reward


def check_episodes(run: StepContext, index: int, rows: Sequence[Row]) -> None:
    """As `check_outcomes`; where it raises, a run that goes on plays the episodes again."""
    try:
        check_outcomes(run.config, turn_table(rows, run.config))
    except UserError:
        run.store.shards(index).clear()
        raise


def while_going(run: StepContext, batches: Generator[list[Episode], None, None]) -> Iterator[list[Episode]]:
    """Episodes as they finish, until another task of the step fails."""
    # The error holds this frame: open episodes would stay with the environment.
    with closing(batches):
        for batch in batches:
            if batch:
                yield batch
            run.check_halted()


def all_of(batches: Iterable[list[Episode]], count: int, progress: Progress = tell_progress) -> list[Episode]:
    episodes = list[Episode]()
    progress(0, count)
    for batch in batches:
        episodes += batch
        progress(len(episodes), count)
    return sorted(episodes, key=lambda one: one.key)


def heldout_artifacts(run: StepContext, index: int) -> dict[str, Ref]:
    def read_turns() -> pa.Table:
        assert run.replayed is not None, "only a replay has no environment"
        # A pipeline may rename what its steps provide; the first evaluation is before them.
        name = "heldout_turns" if index == START else run.graph.artifact_of("heldout_turns")
        return run.store.get_table(run.replayed.artifacts(index)[name])

    pool = pool_of(run, read_turns)
    return stored_evaluation(run, *heldout_accuracy(run, run.engine, run.config.evaluation.prompts, pool))


def stored_evaluation(run: StepContext, content: dict[str, Any], turns: pa.Table | None) -> dict[str, Ref]:
    store = run.store
    artifacts = {} if turns is None else {"heldout_turns": store.put_table("turns", turns)}
    return {**artifacts, "evaluation": store.put_json("evaluation", content)}


def heldout_accuracy(
    run: StepContext, engine: RolloutEngine, count: int, pool: Pool | None = None
) -> tuple[dict[str, Any], pa.Table | None]:
    """The content of an artifact of kind `evaluation` for the first held-out prompts, and their turns."""
    prompts = prompt_table(run, run.source.heldout(run.config.evaluation.prompts)[:count])
    rows = prompts.to_pylist()
    groups = groups_of(rows, run.config.seed, START, 1)
    player = EpisodePlayer.of(run.config, run.tokenizer, run.arch)
    batches = player.play(engine, groups, rows, player.evaluation_sampling(0.0), pool)
    episodes = all_of(while_going(run, batches), len(groups))
    rollouts, turns = tables_of(episodes, groups, run.config, run.tokenizer)
    check_outcomes(run.config, turns)
    verdicts = [episode.verdict for episode in score(run.verifier.main, rows, stored_endings(rollouts, turns))]
    tell_failures(run, "held-out prompts", verdicts)
    outcomes = Counter(verdict.outcome for verdict in verdicts)
    texts = rollouts["text"].to_pylist()
    content = {
        "accuracy": sum(verdict.score for verdict in verdicts) / len(verdicts),
        "prompts": len(verdicts),
        "length_mean": sum(one.completion.length for one in episodes) / len(episodes),
        "outcomes": {name: outcomes[name] for name in OUTCOMES},
        "scores": {row["prompt_id"]: verdict.score for row, verdict in zip(rows, verdicts, strict=True)},
        "samples": [
            {
                "prompt_id": rows[i]["prompt_id"],
                "prompt": rows[i]["text"][-SAMPLE_CHARACTERS:],
                "text": texts[i][:SAMPLE_CHARACTERS],
                "length": len(episodes[i].completion.tokens),
                "score": verdicts[i].score,
            }
            for i in range(min(HELDOUT_SAMPLES, len(rows)))
        ],
    }
    if turns is not None:
        by_episode = groupby(turns.to_pylist(), key=itemgetter("group"))
        content["episodes"] = episode_means([[*rows] for _, rows in by_episode])
    return content, turns


def counts(outcome: str, config: RunConfig) -> bool:
    """True if a completion with this outcome counts in the loss and in the baseline of its group."""
    left_out = config.environment is not None and config.environment.failed == "leave_out"
    return not (left_out and outcome in UNCHECKED_OUTCOMES)


class Ending(NamedTuple):
    group: int
    outcome: str
    reward: float
    detail: str
    text: str
    finish: str


def stored_endings(rollouts: pa.Table, turns: pa.Table | None) -> list[Ending]:
    rows = rollouts.select([*COMPLETION_KEY, "text", "finish"]).to_pylist()
    if turns is None:
        return [Ending(row["group"], JUDGE, 0.0, "", row["text"], row["finish"]) for row in rows]
    turns_of: dict[Key, list[dict[str, Any]]] = {}
    for turn in turns.select([*COMPLETION_KEY, "text", "reward", "outcome", "detail"]).to_pylist():
        turns_of.setdefault(key_of(turn), []).append(turn)

    def ending(row: Mapping[str, Any]) -> Ending:
        episode_turns = turns_of[key_of(row)]
        total = sum(turn["reward"] for turn in episode_turns)
        last = episode_turns[-1]
        return Ending(row["group"], last["outcome"], total, last["detail"], last["text"], row["finish"])

    return [ending(row) for row in rows]


class ScoredEpisode(NamedTuple):
    """`score` is the reward without what other verifiers add."""

    verdict: Verdict
    reward: float
    score: float


def answers(prompts: Sequence[Mapping[str, Any]], endings: Sequence[Ending]) -> list[Answer]:
    result = list[Answer]()
    rows = {row["group"]: row for row in prompts}
    for one in endings:
        if one.outcome == JUDGE:
            row = rows[one.group]
            finish = "stop" if one.finish == "stop_string" else one.finish
            result.append(Answer(row["text"], one.text, row["reference"], finish, row.get("columns", "")))
    return result


def score(verifier: Verifier, prompts: Sequence[Mapping[str, Any]], endings: Sequence[Ending]) -> list[ScoredEpisode]:
    verdicts = iter(verifier.verify(answers(prompts, endings)))
    scores = []
    for one in endings:
        if one.outcome == JUDGE:
            verdict = next(verdicts)
            # Adding 0 would take the sign off a score of -0.
            both = (verdict.reward, verdict.score)
            scores.append(ScoredEpisode(verdict, *(value + one.reward if one.reward else value for value in both)))
        else:
            right = float(one.outcome == "right")
            scores.append(
                ScoredEpisode(Verdict(right, cast(VerdictOutcome, one.outcome), one.detail), one.reward, one.reward)
            )
    return scores


def tell_failures(run: StepContext, what: str, verdicts: Sequence[Verdict]) -> None:
    if (text := failures(run.config, verdicts)) is not None:
        run.console.note(f"{what}: {text}")


def check_outcomes(config: RunConfig, turns: pa.Table | None) -> None:
    """Raises UserError: every episode ended before the policy's first turn, or by a failure of the environment."""
    if turns is None:
        return
    ends = turns.filter(pc.not_equal(turns["outcome"], "")).select(["turn", "outcome", "detail"]).to_pylist()
    for is_fault, where in (
        (not any(row["turn"] for row in ends), "before the policy's first turn"),
        (all(row["outcome"] in UNCHECKED_OUTCOMES for row in ends), "in the environment"),
    ):
        if ends and is_fault:
            assert config.environment is not None, "without one the policy speaks"
            first = f"{ends[0]['outcome']}: {ends[0]['detail']}".removesuffix(": ")
            name = config.environment.name
            raise UserError(
                f"environment.name={name}: all {len(ends)} episodes ended {where}, the first of them as {first}"
            )


def failures(config: RunConfig, verdicts: Sequence[Verdict]) -> str | None:
    """A line on answers that a verifier could not check. Raises UserError: none could be checked."""
    unchecked = [verdict for verdict in verdicts if verdict.outcome in UNCHECKED_OUTCOMES]
    lines = list[str]()
    total = len(verdicts)
    if unchecked:
        ends = Counter(verdict.outcome for verdict in unchecked)
        how = ", ".join(f"{ends[outcome]} {word}" for outcome, word in UNCHECKED_OUTCOMES.items() if ends[outcome])
        lines.append(f"{len(unchecked)} of {total} answers could not be checked ({how}): {unchecked[0].detail}")
    if unchecked and len(unchecked) == total:
        settings = [] if config.environment is None else [f"environment.name={config.environment.name}"]
        raise UserError(f"{', '.join([*settings, f'reward.verifier={config.reward.verifier}'])}: {lines[0]}")
    others = [(part.name, each) for each in verdicts for part in each.added if part.outcome in UNCHECKED_OUTCOMES]
    if others:
        counts_by_name = Counter(name for name, _ in others)
        parts = ", ".join(f"{count} of {total} by reward.others.{name}" for name, count in counts_by_name.items())
        lines.append(f"not checked: {parts}: {others[0][1].detail}")
    return "; ".join(lines) or None
