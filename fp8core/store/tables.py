"""Columns of the tables that steps exchange; one row is one prompt or one completion.

`group` is the prompt's index within the step, `sample` the completion's index within its group. Tables of
completions are sorted by both, so that their rows correspond. `written` marks the tokens of a completion that the
policy wrote. Those of tools and users in between are context, and stay out of loss, rewards, statistics and metrics.

The content of a stored table is not trusted: a reader gets rows of its kind's schema, or one line that names file and
column.
"""

import hashlib
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fp8core.durable import stored_file
from fp8core.errors import StoredFileError, first_line, printable
from fp8core.rewards.scorer import Key

COMPLETION_KEY = ("group", "sample")
"""Columns whose values are the `Key` of a completion, or of an episode."""

_TOKENS = pa.list_(pa.int32())
_LOGPROBS = pa.list_(pa.float32())

PROMPTS = pa.schema(
    [
        ("group", pa.int32()),
        ("prompt_id", pa.string()),
        ("text", pa.string()),
        ("tokens", _TOKENS),
        ("reference", pa.string()),
    ]
)

# With `data.columns`: these columns of each row, as a JSON object.
PROMPTS_WITH_COLUMNS = PROMPTS.append(pa.field("columns", pa.string()))

ROLLOUTS = pa.schema(
    [
        ("group", pa.int32()),
        ("sample", pa.int32()),
        ("prompt_id", pa.string()),
        ("seed", pa.int64()),
        ("prompt_tokens", _TOKENS),
        ("tokens", _TOKENS),
        ("logprobs", _LOGPROBS),
        ("written", pa.list_(pa.bool_())),
        ("finish", pa.string()),
        ("text", pa.string()),
    ]
)

# With `environment`: the messages of each row, a JSON list of [role, content] whose last is the question.
PROMPTS_WITH_MESSAGES = PROMPTS.append(pa.field("messages", pa.string()))

# With `rollout.router_replay`: the experts of every position, sparse layer by sparse layer (`Completion.experts`).
ROUTED_ROLLOUTS = ROLLOUTS.append(pa.field("experts", pa.list_(pa.list_(pa.list_(pa.int16())))))

# With `pipeline.mode`: of each token, the version of the policy that wrote it.
VERSIONS = pa.field("versions", _TOKENS)

# Turn 0 holds an environment's first messages. Each later row is a turn of the policy: tokens `begin` to `end` of its
# completion. The environment's answer follows, up to `observation_end`.
TURNS = pa.schema(
    [
        ("group", pa.int32()),
        ("sample", pa.int32()),
        ("turn", pa.int32()),
        # In this order a replay looks for a difference.
        ("text", pa.string()),
        ("calls", pa.string()),
        ("malformed", pa.string()),
        ("said", pa.string()),
        ("outcome", pa.string()),
        ("detail", pa.string()),
        ("reward", pa.float64()),
        ("failed", pa.int32()),
        ("info", pa.string()),
        ("observation", pa.string()),
        ("begin", pa.int32()),
        ("end", pa.int32()),
        ("observation_end", pa.int32()),
    ]
)

SHARD_TURNS = "turns"
"""A column of the shards of rollouts: the turns of each completion, so that one file has all of an episode."""
_SHARD_TURN = pa.struct([field for field in TURNS if field.name not in COMPLETION_KEY])

# Completions that a run which generates ahead has begun (`rollout.stream`); `batch` is the step of their prompt.
STREAM = pa.schema(
    [
        ("batch", pa.int32()),
        *(ROLLOUTS.field(name) for name in ("group", "sample", "prompt_id", "seed", "prompt_tokens")),
        *(ROLLOUTS.field(name) for name in ("tokens", "logprobs")),
        VERSIONS,
        ROLLOUTS.field("finish"),
        ("ended", pa.int64()),
    ]
)

# With `environment`: the tokens that the policy wrote, and the turns (`SHARD_TURNS`) of the episode.
STREAM_OF_EPISODES = STREAM.append(ROLLOUTS.field("written")).append(pa.field(SHARD_TURNS, pa.list_(_SHARD_TURN)))

# An episode that is over: where the parts end in which it was played, in tokens.
PLAYED_EPISODES = STREAM_OF_EPISODES.append(pa.field("parts", pa.list_(pa.int32())))

# Tokens that a segment has written to completions of the stream, from token `before` on.
SEGMENTS = pa.schema(
    [
        *(STREAM.field(name) for name in ("batch", "group", "sample")),
        ("before", pa.int32()),
        *(STREAM.field(name) for name in ("tokens", "logprobs", "finish")),
    ]
)

REWARDS = pa.schema(
    [
        ("group", pa.int32()),
        ("sample", pa.int32()),
        ("reward", pa.float64()),
        ("outcome", pa.string()),
        ("detail", pa.string()),
        ("keep", pa.bool_()),
        # The reward of the verifier or the environment (`scores_of`); `reward` may have other rewards and penalties.
        ("score", pa.float64()),
    ]
)
_SCORE = REWARDS.field("score")

# The factors of the loss of the step's update (`objective.row_advantages`).
ADVANTAGES = pa.schema([("group", pa.int32()), ("sample", pa.int32()), ("advantage", pa.float64())])

SCORE = "score_"
"""Begins the name of a column of `rewards` with the scores of one of several verifiers."""

LOGPROBS = pa.schema([("group", pa.int32()), ("sample", pa.int32()), ("logprobs", _LOGPROBS), ("entropy", _LOGPROBS)])

ORDER = [("group", "ascending"), ("sample", "ascending")]
TURN_ORDER = [*ORDER, ("turn", "ascending")]


def key_of(row: Mapping[str, Any]) -> Key:
    return row["group"], row["sample"]


def keys_of(table: pa.Table) -> list[Key]:
    return list(zip(*(table[name].to_pylist() for name in COMPLETION_KEY), strict=True))


def row_numbers(table: pa.Table) -> dict[Key, int]:
    return {key: number for number, key in enumerate(keys_of(table))}


def scores_of(rewards: pa.Table) -> pa.ChunkedArray:
    """The scores by which a group has a signal; where a table of kind `rewards` has none, the reward is the score."""
    if _SCORE.name not in rewards.column_names:
        return rewards["reward"]
    return pc.coalesce(rewards[_SCORE.name], rewards["reward"])


def nested_turns(rollouts: pa.Table, turns: pa.Table) -> pa.Array:
    """The turns of each completion as one value, in the order of the rollouts."""
    found: dict[Key, list[dict[str, Any]]] = {key: [] for key in keys_of(rollouts)}
    for row in turns.to_pylist():
        found[key_of(row)].append({name: row[name] for name in (field.name for field in _SHARD_TURN)})
    return pa.array([*found.values()], pa.list_(_SHARD_TURN))


def unnested_turns(rollouts: pa.Table) -> pa.Table:
    """The table of kind `turns` of completions that carry their turns (`SHARD_TURNS`)."""
    rows = [
        {"group": group, "sample": sample, **turn}
        for (group, sample), turns in zip(keys_of(rollouts), rollouts[SHARD_TURNS].to_pylist(), strict=True)
        for turn in turns
    ]
    return pa.Table.from_pylist(rows, schema=TURNS)


@dataclass(frozen=True)
class TableSchema:
    """The content of a table of one kind.

    Attributes:
        columns: names and types that it has; a step of the user's own may add others.
        optional: names and types of columns that it may have.
        key: columns by which its rows are sorted; no two rows are equal in all of them.
        tokens: columns of lists that have an item for each token: equal lengths row by row.
        missing: columns in which a value may be missing.
        empty: True where it may have no rows.
        whole: True where it has a row for each completion of its step, if it is of completions.
    """

    columns: pa.Schema
    optional: pa.Schema = field(default_factory=lambda: pa.schema([]))
    key: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    empty: bool = False
    whole: bool = True


TABLES = {
    "prompts": TableSchema(
        PROMPTS,
        pa.schema([PROMPTS_WITH_COLUMNS.field("columns"), PROMPTS_WITH_MESSAGES.field("messages")]),
        key=("group",),
    ),
    "rollouts": TableSchema(
        ROLLOUTS,
        pa.schema([ROUTED_ROLLOUTS.field("experts"), VERSIONS]),
        COMPLETION_KEY,
        ("tokens", "logprobs", "written", "versions"),
    ),
    "turns": TableSchema(TURNS, key=(*COMPLETION_KEY, "turn"), empty=True, whole=False),
    "stream": TableSchema(
        STREAM,
        pa.schema([STREAM_OF_EPISODES.field(name) for name in ("written", SHARD_TURNS)]),
        ("batch", *COMPLETION_KEY),
        ("tokens", "logprobs", "versions", "written"),
        empty=True,
        whole=False,
    ),
    "episodes": TableSchema(PLAYED_EPISODES, tokens=("tokens", "logprobs", "versions", "written"), whole=False),
    "segments": TableSchema(SEGMENTS, tokens=("tokens", "logprobs"), whole=False),
    "rewards": TableSchema(
        pa.schema([field for field in REWARDS if field != _SCORE]),
        pa.schema([_SCORE]),
        COMPLETION_KEY,
        missing=("detail", "score"),
    ),
    "advantages": TableSchema(ADVANTAGES, key=COMPLETION_KEY),
    "logprobs": TableSchema(LOGPROBS, key=COMPLETION_KEY, tokens=("logprobs", "entropy")),
    "behaviour": TableSchema(LOGPROBS, key=COMPLETION_KEY, tokens=("logprobs", "entropy"), whole=False),
}
"""Kind of artifact -> schema. Tables of other kinds are a step's own; they have `MOST_ROWS` and sound values."""

MOST_ROWS, MOST_COLUMNS = 10_000_000, 1_000
_INDICES = frozenset(
    {"batch", "group", "sample", "tokens", "prompt_tokens", "versions", "ended", "before", "parts"}
    | {"turn", "begin", "end", "observation_end", "failed"}
)


def open_table(source: Any, kind: str, place: object) -> pq.ParquetFile:
    """A parquet file whose columns and number of rows are those of its kind; no row is read.

    Raises StoredFileError: `place: column: problem`.
    """
    try:
        if isinstance(source, Path):
            os.close(stored_file(source, os.O_RDONLY))  # A FIFO would hold up the library.
        file = pq.ParquetFile(source)
        found, rows = file.schema_arrow, file.metadata.num_rows
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StoredFileError(f"{place}: not a parquet file: {printable(first_line(error))}") from error
    if not 0 <= rows <= MOST_ROWS or len(found) > MOST_COLUMNS:
        size = f"{rows} rows, {len(found)} columns"
        raise StoredFileError(f"{place}: {size}; a table has at most {MOST_ROWS} and {MOST_COLUMNS}")
    if kind in TABLES and not rows and not TABLES[kind].empty:
        raise StoredFileError(f"{place}: no rows")
    if len(set(found.names)) < len(found):
        raise StoredFileError(f"{place}: two columns have one name")
    schema = TABLES.get(kind)
    wanted = {} if schema is None else {column.name: column.type for column in [*schema.columns, *schema.optional]}
    for name, kind_of_values in wanted.items():
        if name in found.names:
            problem = _other_type(found.field(name).type, kind_of_values)
        else:
            problem = None if schema is None or name in schema.optional.names else "the column is missing"
        if problem is not None:
            raise StoredFileError(f"{place}: {name}: {problem}")
    return file


def refuse_other_rows(first: pa.Table, other: pa.Table, place: object) -> None:
    """Tables of one step's completions have the same rows, and as many items for each token of them.

    `place` is that of the other. Raises StoredFileError: `place: column: problem`.
    """
    for name in COMPLETION_KEY:
        if not first[name].equals(other[name]):
            raise StoredFileError(f"{place}: {name}: other rows than those of the step's rollouts")
    if "logprobs" in other.column_names:
        lengths = [pc.list_value_length(table["logprobs"]) for table in (first, other)]
        if not lengths[0].equals(lengths[1]):
            raise StoredFileError(f"{place}: logprobs: not as many items in every row as the step's rollouts have")


def read_columns(file: pq.ParquetFile, kind: str, place: object, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of an open table, or of some columns that it has, checked.

    Raises StoredFileError: `place: column: problem`.
    """
    try:
        # Threads would take new memory each, and columns are decoded within milliseconds.
        table = file.read(columns=columns, use_threads=False)
        # Texts of valid UTF-8, offsets within their lists.
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StoredFileError(f"{place}: the rows cannot be read: {printable(first_line(error))}") from error
    check_rows(table, kind, place)
    return table


def check_rows(table: pa.Table, kind: str, place: object) -> None:
    """Check the rules for the rows of a kind, of the columns that are there. Raises StoredFileError."""
    schema = TABLES.get(kind)
    if schema is None:
        return
    lengths: dict[str, Any] = {}
    for name in table.column_names:
        column = table[name]
        if name not in schema.columns.names and name not in schema.optional.names:
            continue
        if name not in schema.missing and _missing(column):
            raise StoredFileError(f"{place}: {name}: a value is missing")
        if name in _INDICES and len(values := column.combine_chunks()) and _smallest(values) < 0:
            raise StoredFileError(f"{place}: {name}: negative")
        if name in schema.tokens:
            lengths[name] = pc.list_value_length(column)
    for name, other in itertools.pairwise(lengths):
        if not lengths[name].equals(lengths[other]):
            raise StoredFileError(f"{place}: {other}: not as many items in every row as {name}")
    if "experts" in schema.optional.names and "experts" in table.column_names:
        _check_experts(table["experts"], place)
    if kind == "turns" and set(TURNS.names) <= set(table.column_names):
        _check_turns(table, place)
    if set(schema.key) <= set(table.column_names) and not _sorted(table, schema.key):
        raise StoredFileError(f"{place}: {', '.join(schema.key)}: the rows are not in this order, each once")


def _other_type(found: pa.DataType, wanted: pa.DataType) -> str | None:
    """Lists are of one type whatever the items are called: `item` when built, `element` when read."""
    inner, asked = found, wanted
    while pa.types.is_list(inner) and pa.types.is_list(asked):
        inner, asked = inner.value_type, asked.value_type
    return None if inner.equals(asked) else f"of type {printable(str(found))[:80]}, expected {wanted}"


def _missing(column: pa.ChunkedArray) -> bool:
    while True:
        if column.null_count:
            return True
        if not pa.types.is_list(column.type):
            return False
        column = pc.list_flatten(column)


def _smallest(values: pa.Array) -> int:
    while pa.types.is_list(values.type):
        values = values.flatten()
    smallest = pc.min(values).as_py()
    return 0 if smallest is None else int(smallest)


def _check_experts(column: pa.ChunkedArray, place: object) -> None:
    """As many layers at every position, as many experts in every layer."""
    rows = column.combine_chunks()
    for inner in (rows.flatten(), rows.flatten().flatten()):
        counts = pc.min_max(pc.list_value_length(inner)).as_py()
        if len(inner) and not 0 < counts["min"] == counts["max"]:
            raise StoredFileError(f"{place}: experts: not as many layers and experts at every position")


def _check_turns(table: pa.Table, place: object) -> None:
    """Ranges of tokens follow one another, JSON is such, and what was said has the digest that stands beside it."""
    for row, after in itertools.zip_longest(rows := table.to_pylist(), rows[1:]):
        if not row["begin"] <= row["end"] <= row["observation_end"]:
            raise StoredFileError(f"{place}: end: not between begin and observation_end")
        if after is not None and key_of(after) == key_of(row):
            if after["turn"] != row["turn"] + 1 or after["begin"] != row["observation_end"]:
                raise StoredFileError(f"{place}: turn: does not follow the turn before it")
            if row["outcome"]:
                raise StoredFileError(f"{place}: outcome: before the last turn of an episode")
        if row["observation"] != text_digest(row["said"]):
            raise StoredFileError(f"{place}: observation: not the digest of what was said")
        for name, kind in (("calls", list), ("info", dict), ("said", (list, dict))):
            value = _json(row[name]) if row[name] else None
            if row[name] and not isinstance(value, kind):
                raise StoredFileError(f"{place}: {name}: not the JSON that it should be")
        if not math.isfinite(row["reward"]):
            raise StoredFileError(f"{place}: reward: {row['reward']}, not finite")


def refuse_other_turns(rollouts: pa.Table, turns: pa.Table, place: object) -> None:
    """The turns of a step's episodes are those of its completions, and mark the tokens that the policy wrote.

    `place` is that of the turns. Raises StoredFileError: `place: column: problem`.
    """
    found: dict[Key, list[bool]] = {}
    for row in turns.select([*COMPLETION_KEY, "turn", "begin", "end", "observation_end"]).to_pylist():
        marks = found.setdefault(key_of(row), [])
        marks += [True] * (row["end"] - row["begin"]) + [False] * (row["observation_end"] - row["end"])
    written = dict(zip(keys_of(rollouts), rollouts["written"].to_pylist(), strict=True))
    if found.keys() != written.keys():
        raise StoredFileError(f"{place}: group, sample: other episodes than the step's rollouts")
    for episode, marks in found.items():
        if marks != written[episode]:
            raise StoredFileError(f"{place}: end: other tokens than those written in group {episode[0]}")


def text_digest(text: str) -> str:
    """SHA-256 (64 hex digits) of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _sorted(table: pa.Table, key: Sequence[str]) -> bool:
    # Not by NumPy: pyarrow would import pandas to see what it need not convert.
    rows = list(zip(*(table[name].to_pylist() for name in key), strict=True))
    return all(before < after for before, after in itertools.pairwise(rows))
