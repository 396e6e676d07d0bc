"""Problems as requests, completions as tables, and how well held-out prompts are answered."""

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import groupby
from operator import itemgetter
from typing import Any

import pyarrow as pa

from fp8core.config.run import RunConfig
from fp8core.data.prompt import Problem, encode_prompt
from fp8core.errors import UserError
from fp8core.models.tokenizer import Tokenizer
from fp8core.progress import tell_progress
from fp8core.rewards.scorer import OUTCOMES
from fp8core.rl.batch import routes_column
from fp8core.rollout.engine import Completion, PromptGroup, RolloutEngine, sample_seed
from fp8core.rollout.episode import Episode
from fp8core.rollout.episodes import Pool
from fp8core.rollout.registry import longest_row
from fp8core.run.context import RunContext
from fp8core.run.episodes import EpisodePlayer, RecordedPool, completion_text, episode_means, messages_of, turns_table
from fp8core.run.verdicts import ending_of, score, tell_endings, tell_failures
from fp8core.store.artifacts import Ref, RolloutShards
from fp8core.store.layout import shards_place
from fp8core.store.ledger import START
from fp8core.store.tables import (
    HELDOUT_SAMPLES,
    PROMPTS,
    PROMPTS_WITH_COLUMNS,
    PROMPTS_WITH_MESSAGES,
    ROLLOUTS,
    SAMPLE_CHARACTERS,
)


def prompt_table(run: RunContext, problems: list[Problem]) -> pa.Table:
    return problem_table(problems, run.config, run.tokenizer, longest_row(run.config, run.arch))


def problem_table(problems: Sequence[Problem], config: RunConfig, tokenizer: Tokenizer, max_positions: int) -> pa.Table:
    encoded = [encode_prompt(problem, config, tokenizer, max_positions) for problem in problems]
    columns = {
        "group": list(range(len(problems))),
        "prompt_id": [problem.prompt_id for problem in problems],
        "text": [text for text, _ in encoded],
        "tokens": [tokens for _, tokens in encoded],
        "reference": [problem.reference for problem in problems],
    }
    schema = PROMPTS
    if config.data.columns:
        columns["columns"] = [problem.columns for problem in problems]
        schema = PROMPTS_WITH_COLUMNS
    if config.environment is not None:
        columns["messages"] = [messages_of(problem, config) for problem in problems]
        schema = schema.append(PROMPTS_WITH_MESSAGES.field("messages"))
    return pa.table(columns, schema=schema)


def shards_of(run: RunContext, index: int, kind: str = "rollouts") -> RolloutShards:
    return RolloutShards(run.directory.path / shards_place(index), kind)


def prompt_groups(run: RunContext, index: int, prompts: pa.Table, size: int | None = None) -> list[PromptGroup]:
    """Requests of an iteration, with one seed a sample; `size`: samples of a prompt, else `rollout.group_size`."""
    samples = run.config.rollout.group_size if size is None else size
    return groups_of(prompts.to_pylist(), run.config.seed, index, samples)


def groups_of(prompts: Iterable[Mapping[str, Any]], seed: int, index: int, samples: int) -> list[PromptGroup]:
    """Requests for so many samples of each row of kind `prompts`; a seed depends on `seed` and its place alone."""
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


def rollout_table(
    run: RunContext,
    completions: Sequence[Completion],
    groups: list[PromptGroup],
    schema: pa.Schema,
    prompts: Sequence[Sequence[int]],
) -> pa.Table:
    """Completions as a table of kind `rollouts`; `prompts`: token ids that each was asked with."""
    by_number = {group.group: group for group in groups}
    rows = [
        {
            "group": done.group,
            "sample": done.sample,
            "prompt_id": by_number[done.group].prompt_id,
            "seed": by_number[done.group].seeds[done.sample],
            "prompt_tokens": list(prompt),
            "tokens": done.tokens,
            "logprobs": done.logprobs,
            "written": [True] * len(done.tokens) if done.written is None else done.written,
            "finish": done.finish,
            "text": completion_text(done, run.tokenizer, run.config.rollout.stop_strings),
        }
        for done, prompt in zip(completions, prompts, strict=True)
    ]
    table = pa.Table.from_pylist(rows, schema=ROLLOUTS)
    if "experts" not in schema.names:
        return table
    chosen = [done.experts for done in completions if done.experts is not None]
    assert len(chosen) == len(completions), "the engine was asked for experts and reported none"
    return table.append_column(schema.field("experts"), routes_column(chosen))


def written_sample(run: RunContext, index: int) -> tuple[str, str, float] | None:
    """Prompt, text and reward of the first completion of a step; None where its plan has no such tables."""
    store, found = run.directory.store, {ref.kind: ref for ref in run.directory.ledger.artifacts(index).values()}
    if not {"prompts", "rollouts", "rewards"} <= found.keys():
        return None
    # Tables of completions are in one order, and the first prompt is answered first.
    text, prompt, reward = (
        store.get_table(found[kind], [column])[column][0].as_py()
        for kind, column in (("rollouts", "text"), ("prompts", "text"), ("rewards", "reward"))
    )
    return prompt, text, reward


def check_episodes(run: RunContext, index: int, what: str, turns: pa.Table) -> None:
    """As `tell_endings`; where it raises, a run that goes on plays the episodes again."""
    if not len(turns):
        return
    try:
        tell_endings(run, what, turns)
    except UserError:
        shards_of(run, index).clear()
        raise


@contextmanager
def environment_of(run: RunContext, index: int, port: str) -> Iterator[Pool | None]:
    """The environments of a step's episodes; in a replay the recorded answers, which the output `port` has."""
    if run.config.environment is None:
        yield None
    elif run.replayed is None:
        yield run.environment
    else:
        # A pipeline may rename what its steps provide; the first evaluation is before them.
        recorded = port if index == START else run.graph.artifact_of(port)
        yield RecordedPool(run.directory.store.get_table(run.replayed.artifacts(index)[recorded]))


def while_going(run: RunContext, played: Generator[list[Episode], None, None]) -> Iterator[list[Episode]]:
    """Episodes as they finish, until another task of the step fails."""
    # The error holds this frame: open episodes would stay with the environment.
    with closing(played):
        for batch in played:
            if batch:
                yield batch
            run.refuse_halted()


def heldout_episodes(run: RunContext, index: int) -> dict[str, Ref]:
    store = run.directory.store
    with environment_of(run, index, "heldout_turns") as pool:
        content, turns = heldout_accuracy(run, run.ready_engine(), run.config.evaluation.prompts, pool)
    assert turns is not None, "an environment answered"
    return {
        "heldout_turns": store.put_table("turns", turns),
        "evaluation": store.put_json("evaluation", content),
    }


def heldout_accuracy(
    run: RunContext, engine: RolloutEngine, count: int, pool: Pool | None = None
) -> tuple[dict[str, Any], pa.Table | None]:
    """The content of an artifact of kind `evaluation` for the first held-out prompts, and their turns in order of
    group.

    Lengths are of what the policy wrote. The engine answers greedily. Without an environment there are no turns."""
    prompts = prompt_table(run, run.source.heldout(run.config.evaluation.prompts)[:count])
    asked, groups = prompts.to_pylist(), prompt_groups(run, START, prompts, 1)
    player = EpisodePlayer.of(run.config, run.tokenizer, run.arch)
    played = player.play(engine, groups, asked, player.evaluation_sampling(0.0), pool)
    found = list[Episode]()
    tell_progress(0, len(groups))
    for batch in while_going(run, played):
        found += batch
        tell_progress(len(found), len(groups))
    episodes = sorted(found, key=lambda one: one.completion.group)
    endings = [ending_of(one, run.config, run.tokenizer) for one in episodes]
    turns = None if run.config.environment is None else turns_table(episodes, run.tokenizer)
    if turns is not None:
        tell_endings(run, "held-out prompts", turns)
    verdicts = [found.verdict for found in score(run.verifier.main, asked, endings)]
    tell_failures(run, "held-out prompts", verdicts)
    outcomes = Counter(verdict.outcome for verdict in verdicts)
    completions = [one.completion for one in episodes]
    content = {
        "accuracy": sum(verdict.score for verdict in verdicts) / len(verdicts),
        "prompts": len(verdicts),
        "length_mean": sum(done.length for done in completions) / len(completions),
        "outcomes": {name: outcomes[name] for name in OUTCOMES},
        "scores": {row["prompt_id"]: verdict.score for row, verdict in zip(asked, verdicts, strict=True)},
        "samples": [
            {
                "prompt_id": row["prompt_id"],
                "prompt": row["text"][-SAMPLE_CHARACTERS:],
                "text": completion_text(done, run.tokenizer, run.config.rollout.stop_strings)[:SAMPLE_CHARACTERS],
                "length": len(done.tokens),
                "score": verdict.score,
            }
            for row, done, verdict in list(zip(asked, completions, verdicts, strict=True))[:HELDOUT_SAMPLES]
        ],
    }
    if turns is not None:
        by_episode = groupby(turns.to_pylist(), key=itemgetter("group"))
        content["episodes"] = episode_means([[*rows] for _, rows in by_episode])
    return content, turns
