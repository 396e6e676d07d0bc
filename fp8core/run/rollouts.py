"""Problems as requests, completions as tables, and their rewards."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from fp8core.config.run import RunConfig
from fp8core.data.prompt import Problem, encode_prompt, messages_of
from fp8core.environments.pool import Pool, RecordedPool
from fp8core.environments.protocol import TurnRecord
from fp8core.errors import UserError
from fp8core.models.tokenizer import Tokenizer
from fp8core.rewards.scorer import Judgement, Key, ScoreRequest, Verdict, VerdictOutcome
from fp8core.rewards.verifier import Verifier, reward_of
from fp8core.rl.batch import routes_column
from fp8core.rollout.engine import Completion, PromptGroup, sample_seed
from fp8core.rollout.registry import longest_row
from fp8core.run.context import RunContext, StepContext
from fp8core.store.tables import (
    COLUMNS,
    COMPLETION_KEY,
    EXPERTS,
    JUDGEMENTS,
    MESSAGES,
    PROMPTS,
    REWARDS,
    ROLLOUTS,
    SCORE,
    SOURCE,
    TURNS,
    VERSIONS,
    key_of,
    keys_of,
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
        "reference": [problem.answer for problem in problems],
    }
    schema = PROMPTS
    if any(data.columns for data in config.sources.values()):
        columns["columns"] = [problem.columns for problem in problems]
        schema = schema.append(COLUMNS)
    if config.listed_sources:
        columns[SOURCE.name] = [problem.source for problem in problems]
        schema = schema.append(SOURCE)
    if config.environment is not None or config.messages_are_scored:
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


def row_tables(rows: Sequence[Completion], config: RunConfig, tokenizer: Tokenizer) -> tuple[pa.Table, pa.Table | None]:
    """Tables of kinds `rollouts`, and `turns` with an environment."""
    strings = config.rollout.stop_strings
    row_dicts = [{**row.row(), "text": completion_text(row.tokens, row.finish, tokenizer, strings)} for row in rows]
    # Where nothing may be stale, tokens are of one version.
    stale = config.pipeline.mode != "synchronous" and config.pipeline.max_staleness > 0
    table = pa.Table.from_pylist(row_dicts, schema=ROLLOUTS.append(VERSIONS) if stale else ROLLOUTS)
    return with_experts(table, rows), turn_table(rows, config)


def with_experts(table: pa.Table, rows: Sequence[Completion]) -> pa.Table:
    experts = [row.experts for row in rows if row.experts is not None]
    return table.append_column(EXPERTS, routes_column(experts)) if experts else table


def turn_table(rows: Sequence[Completion], config: RunConfig) -> pa.Table | None:
    """None without an environment."""
    if config.environment is None:
        return None
    turns = [{"group": row.group, "sample": row.sample, **vars(turn)} for row in rows for turn in row.turns]
    return pa.Table.from_pylist(turns, schema=TURNS)


def turn_records(turns: pa.Table) -> dict[Key, list[TurnRecord]]:
    """From a table of kind `turns`, by episode."""
    records: dict[Key, list[TurnRecord]] = {}
    for key, row in zip(keys_of(turns), turns.drop_columns([*COMPLETION_KEY]).to_pylist(), strict=True):
        records.setdefault(key, []).append(TurnRecord(**row))
    return records


def pool_of(run: StepContext, read_turns: Callable[[], Mapping[Key, Sequence[TurnRecord]]]) -> Pool | None:
    """The run's environments, or in a replay the turns that it recorded; None without an environment."""
    if run.config.environment is None:
        return None
    return RecordedPool(read_turns()) if run.environment is None else run.environment


def completion_text(tokens: Sequence[int], finish: str, tokenizer: Tokenizer, stop_strings: Sequence[str] = ()) -> str:
    return text_until(tokenizer.decode(tokens[:-1] if finish == "stop" else tokens), stop_strings)


def text_until(text: str, strings: Sequence[str]) -> str:
    ends = [text.index(string) + len(string) for string in strings if string in text]
    return text[: min(ends, default=len(text))]


def written_sample(run: RunContext, index: int) -> tuple[str, str, float] | None:
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


def check_episodes(run: StepContext, index: int, rows: Sequence[Completion]) -> None:
    """As `check_outcomes`; where it raises, a run that goes on plays the episodes again."""
    try:
        check_outcomes(run.config, turn_table(rows, run.config))
    except UserError:
        run.store.shards(index).clear()
        raise


def counts(outcome: str, config: RunConfig) -> bool:
    """True if a completion with this outcome counts in the loss and in the baseline of its group."""
    left_out = config.environment is not None and config.environment.failed == "leave_out"
    return not (left_out and outcome in UNCHECKED_OUTCOMES)


def ends_of(
    prompts: Iterable[Mapping[str, Any]], rollouts: pa.Table, turns: pa.Table | None
) -> list[ScoreRequest | Verdict]:
    """For each completion the texts for the verifier, or the verdict of its environment."""
    by_group = {row["group"]: row for row in prompts}
    records = {} if turns is None else turn_records(turns)
    ends = list[ScoreRequest | Verdict]()
    for row in rollouts.select([*COMPLETION_KEY, "text", "finish"]).to_pylist():
        played = records.get(key_of(row), [TurnRecord(1, text=row["text"], outcome=JUDGE)])
        last = played[-1]
        if last.outcome == JUDGE:
            prompt = by_group[row["group"]]
            finish = "stop" if row["finish"] == "stop_string" else row["finish"]
            further = (prompt.get(name, "") for name in (COLUMNS.name, SOURCE.name, MESSAGES.name))
            ends.append(ScoreRequest(prompt["text"], last.text, prompt["reference"], finish, *further))
        else:
            ends.append(Verdict(float(last.outcome == "right"), cast(VerdictOutcome, last.outcome), last.detail))
    return ends


def verdicts_of(verifier: Verifier, ends: Sequence[ScoreRequest | Verdict]) -> list[Verdict]:
    judged = iter(verifier.verify([end for end in ends if isinstance(end, ScoreRequest)]))
    return [next(judged) if isinstance(end, ScoreRequest) else end for end in ends]


def reward_tables(
    run: StepContext, index: int, prompts: pa.Table, rollouts: pa.Table, turns: pa.Table | None = None
) -> tuple[pa.Table, pa.Table | None]:
    """Of kinds `rewards`, and `judgements` with a judge. `score` is the reward without what other verifiers add."""
    prompt_rows = prompts.drop_columns(["tokens"]).to_pylist()
    ends = ends_of(prompt_rows, rollouts, turns)
    recall_judgements(run, index)
    verdicts = verdicts_of(run.verifier, ends)
    tell_failures(run, "rewards", verdicts)
    played = {} if turns is None else turn_records(turns)
    keys = keys_of(rollouts)
    turn_rewards = [sum(turn.reward for turn in played.get(key, ())) for key in keys]
    rewards = rewards_of(run.config, prompt_rows, keys, ends, verdicts, turn_rewards)
    return rewards, judgement_table(run.config, verdicts)


def rewards_of(
    config: RunConfig,
    prompts: Iterable[Mapping[str, Any]],
    keys: Sequence[Key],
    ends: Sequence[ScoreRequest | Verdict],
    verdicts: Sequence[Verdict],
    turn_rewards: Sequence[float],
) -> pa.Table:
    """`turn_rewards`: what the turns of each completion earned."""
    sources = {row["group"]: {SOURCE.name: row[SOURCE.name]} for row in prompts if SOURCE.name in row}
    none = {f"{SCORE}{part.name}": 0.0 for verdict in verdicts for part in verdict.side_scores}
    rows = []
    for key, verdict, end, earned in zip(keys, verdicts, ends, turn_rewards, strict=True):
        if isinstance(end, ScoreRequest):
            # Adding 0 would take the sign off a score of -0.
            reward, own = (x + earned if earned else x for x in (reward_of(verdict), verdict.score))
        else:
            reward = own = earned
        check_reward(reward, key)
        scores = {f"{SCORE}{part.name}": part.score for part in verdict.side_scores} or none
        rows.append(
            {
                **dict(zip(COMPLETION_KEY, key, strict=True)),
                "reward": reward,
                "outcome": verdict.outcome,
                "detail": verdict.detail,
                "keep": counts(verdict.outcome, config),
                "score": own,
                **({f"{SCORE}verdict": verdict.score, **scores} if scores else {}),
                **sources.get(key[0], {}),
            }
        )
    columns = [pa.field(name, pa.float64()) for name in (rows[0] if rows else {}) if name.startswith(SCORE)]
    schema = pa.schema([*REWARDS, *columns, *([SOURCE] if sources else [])])
    return pa.Table.from_pylist(rows, schema=schema)


def judgement_table(config: RunConfig, verdicts: Sequence[Verdict]) -> pa.Table | None:
    """None without a judge. Equal requests have one reply."""
    if "judge" not in config.features:
        return None
    rows = {each.request: each._asdict() for verdict in verdicts for each in verdict.judgements}
    return pa.Table.from_pylist([rows[request] for request in sorted(rows)], schema=JUDGEMENTS)


def stored_judgements(run: StepContext, index: int) -> list[Judgement]:
    """Those of a step that was made already, here or in the run that is replayed."""
    refs = [ref for ref in (run.replayed or run.ledger).artifacts(index).values() if ref.kind == "judgements"]
    # Requests of damaged ones are made again.
    tables = [run.store.get_table(ref) for ref in refs if run.replayed is not None or run.store.is_intact(ref)]
    return [Judgement(**row) for table in tables for row in table.to_pylist()]


def recall_judgements(run: StepContext, index: int) -> None:
    run.answers.recall(stored_judgements(run, index))


def begin_verdicts(run: StepContext, index: int, ends: Sequence[ScoreRequest | Verdict]) -> None:
    recall_judgements(run, index)
    run.verifier.begin([end for end in ends if isinstance(end, ScoreRequest)])


def check_reward(value: float, key: Key) -> None:
    """Refuse a reward that would poison every advantage of its group. Raises UserError, which names the completion."""
    if not math.isfinite(value):
        group, sample = key
        raise UserError(f"the reward of group {group}, sample {sample} is {value}; rewards must be finite")


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
    """A line on answers that a verifier could not check. Raises UserError: one could check none."""
    unchecked = [verdict for verdict in verdicts if verdict.outcome in UNCHECKED_OUTCOMES]
    lines = list[str]()
    total = len(verdicts)
    if unchecked:
        ends = Counter(verdict.outcome for verdict in unchecked)
        how = ", ".join(f"{ends[outcome]} {word}" for outcome, word in UNCHECKED_OUTCOMES.items() if ends[outcome])
        lines.append(f"{len(unchecked)} of {total} answers could not be checked ({how}): {unchecked[0].detail}")
    if unchecked and len(unchecked) == total:
        settings = [] if config.environment is None else [f"environment.name={config.environment.name}"]
        settings += dict.fromkeys(config.verifier_settings.values())
        raise UserError(f"{', '.join(settings)}: {lines[0]}")
    others = [(part.name, each) for each in verdicts for part in each.side_scores if part.outcome in UNCHECKED_OUTCOMES]
    if others:
        counts_by_name = Counter(name for name, _ in others)
        scored = sum(bool(each.side_scores) for each in verdicts)
        for name, each in others:
            if counts_by_name[name] == scored:
                raise UserError(f"reward.others.{name}: no answer could be checked: {each.detail}")
        parts = ", ".join(f"{count} of {total} by reward.others.{name}" for name, count in counts_by_name.items())
        lines.append(f"not checked: {parts}: {others[0][1].detail}")
    return "; ".join(lines) or None
