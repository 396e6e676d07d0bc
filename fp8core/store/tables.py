"""Columns of the tables that steps exchange; one row is one prompt or one completion.

`group` is the prompt's index within the step, `sample` the completion's within its group; tables are sorted by both.
Two columns are masks of `rl.batch`. `written` is `policy_mask`, the tokens of a completion that the policy wrote;
`keep` is `row_mask`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from fp8core.errors import StoredFileError, UserError, first_line, printable
from fp8core.models.safetensors_files import StoredTensor, read_header
from fp8core.rewards.scorer import Key
from fp8core.store.json_text import mistake, parse_json

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
        ("reference", pa.string()),  # The answer of the data.
    ]
)

# With `data.columns`: these columns of each row, as a JSON object.
COLUMNS = pa.field("columns", pa.string())

# With a list of data sources, of prompts and of rewards: the name of a row's source.
SOURCE = pa.field("source", pa.string())

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

# With `environment`, a judge or a reward model: the messages of each row, a JSON list of [role, content] whose last is
# the question.
MESSAGES = pa.field("messages", pa.string())

# With `rollout.router_replay`: the experts of every position, sparse layer by sparse layer (`Completion.experts`).
EXPERTS = pa.field("experts", pa.list_(pa.list_(pa.list_(pa.int16()))))

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

_TURN = pa.struct([field for field in TURNS if field.name not in COMPLETION_KEY])

# Completions that a run which generates ahead has begun (`run.stream`); `batch` is the step of their prompt.
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

# With `environment`: the tokens that the policy wrote, and the turns of the episode.
STREAM_OF_EPISODES = STREAM.append(ROLLOUTS.field("written")).append(pa.field("turns", pa.list_(_TURN)))

# An episode that is over, and the parts in which it was played: tokens before a part -> tokens after it.
PLAYED_EPISODES = STREAM_OF_EPISODES.append(pa.field("parts", pa.map_(pa.int32(), pa.int32())))

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

# Replies of judges; `request` is the SHA-256 of what was asked.
JUDGEMENTS = pa.schema(
    [
        ("request", pa.string()),
        ("reply", pa.string()),
        ("score", pa.float64()),
        ("outcome", pa.string()),
        ("detail", pa.string()),
    ]
)

# The factors of the loss of the step's update (`objective.row_advantages`).
ADVANTAGES = pa.schema([("group", pa.int32()), ("sample", pa.int32()), ("advantage", pa.float64())])

# With refill or `rollout.retire_after`: the prompts that a step completed, with those whose group it dropped.
VISITS = pa.schema(
    [
        ("group", pa.int32()),
        ("draw", pa.int64()),  # Its number in the run.
        ("prompt_id", pa.string()),
        ("tokens", pa.int64()),  # That the policy wrote.
        ("reward", pa.float64()),  # The mean of the group.
        ("right", pa.bool_()),  # All that count.
        ("signal", pa.bool_()),
        ("dropped", pa.bool_()),
    ]
)

SCORE = "score_"
"""Begins the name of a column of `rewards` with the scores of one of several verifiers."""

LOGPROBS = pa.schema([("group", pa.int32()), ("sample", pa.int32()), ("logprobs", _LOGPROBS), ("entropy", _LOGPROBS)])


def key_of(row: Mapping[str, Any]) -> Key:
    return row["group"], row["sample"]


def keys_of(table: pa.Table) -> list[Key]:
    return list(zip(*(table[name].to_pylist() for name in COMPLETION_KEY), strict=True))


def row_numbers(table: pa.Table) -> dict[Key, int]:
    return {key: number for number, key in enumerate(keys_of(table))}


def scores_of(rewards: pa.Table) -> pa.ChunkedArray:
    """Where a table of kind `rewards` has none, the reward is the score."""
    if _SCORE.name not in rewards.column_names:
        return rewards["reward"]
    return pc.coalesce(rewards[_SCORE.name], rewards["reward"])


class TableSchema(NamedTuple):
    columns: pa.Schema
    optional: Sequence[pa.Field] = ()


TABLES = {
    "prompts": TableSchema(PROMPTS, [COLUMNS, SOURCE, MESSAGES]),
    "rollouts": TableSchema(ROLLOUTS, [EXPERTS, VERSIONS]),
    "turns": TableSchema(TURNS),
    "stream": TableSchema(STREAM, [STREAM_OF_EPISODES.field(name) for name in ("written", "turns")]),
    "dropped": TableSchema(STREAM, [STREAM_OF_EPISODES.field(name) for name in ("written", "turns")]),
    "visits": TableSchema(VISITS),
    "rewards": TableSchema(pa.schema([field for field in REWARDS if field != _SCORE]), [_SCORE, SOURCE]),
    "judgements": TableSchema(JUDGEMENTS),
    "advantages": TableSchema(ADVANTAGES),
    "logprobs": TableSchema(LOGPROBS),
    "behaviour": TableSchema(LOGPROBS),
}
"""Kind of artifact -> schema. Tables of other kinds are a step's own."""


def read_table(source: Any, kind: str, place: object, columns: Sequence[str] | None = None) -> pa.Table:
    """Raises StoredFileError: `place: column: problem`."""
    try:
        file = pq.ParquetFile(source)
        if kind in TABLES:
            _check_columns(file.schema_arrow, TABLES[kind], place)
        # Threads would take new memory each, and columns are decoded within milliseconds.
        table = file.read(columns=columns, use_threads=False)
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StoredFileError(f"{place}: not a table: {printable(first_line(error))}") from error
    return table


def _check_columns(columns: pa.Schema, schema: TableSchema, place: object) -> None:
    for column in [*schema.columns, *schema.optional]:
        if column.name not in columns.names:
            if column in schema.optional:
                continue
            raise StoredFileError(f"{place}: {column.name}: the column is missing")
        # Lists are of one type whatever the items are called: `item` when built, `element` when read.
        inner = columns.field(column.name).type
        column_type = column.type
        while pa.types.is_list(inner) and pa.types.is_list(column_type):
            inner = inner.value_type
            column_type = column_type.value_type
        if not inner.equals(column_type):
            raise StoredFileError(f"{place}: {column.name}: of type {inner}, expected {column_type}")


HELDOUT_SAMPLES = 8
SAMPLE_CHARACTERS = 800
"""What an evaluation keeps of texts: the first held-out prompts, the same ones each time, and characters of a text."""

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class HeldoutSample(BaseModel):
    """A held-out prompt, the end of its text, and the beginning of the greedy completion, of `length` tokens."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    prompt_id: str
    prompt: str
    text: str
    length: Annotated[int, Field(ge=0)]
    score: Number


_METRICS = TypeAdapter(dict[str, Number])


def read_json(data: bytes, kind: str, place: object) -> Any:
    value = parse_json(data, place)
    if kind == "metrics":
        try:
            _METRICS.validate_python(value)
        except ValidationError as error:
            raise StoredFileError(f"{place}: not of kind {kind}: {mistake(error)}") from error
    return value


def tensor_header(path: Path) -> dict[str, StoredTensor]:
    try:
        return read_header(path)
    except UserError as error:
        raise StoredFileError(printable(str(error))) from error
