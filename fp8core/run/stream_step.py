"""The stream of completions in a step: opened, its pace beside the update, and as tables."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

import pyarrow as pa
import torch

from fp8core.rl.batch import column, pad, padded
from fp8core.rollout.engine import Completion, Finish
from fp8core.rollout.stream import Pace, Row, Stream, chunks_of, group_of
from fp8core.run.behaviour import behaviour_logprobs, verified_rows
from fp8core.run.context import RunContext
from fp8core.run.rollouts import rollout_table
from fp8core.run.scoring import token_batch
from fp8core.run.stream_writers import stream_rows, stream_table
from fp8core.store.artifacts import Ref
from fp8core.store.tables import LOGPROBS, ROLLOUTS, STREAM, STREAM_OF_EPISODES, TURNS, VERSIONS
from fp8core.training.trainer import LogprobError, first_differing


def opened_stream(run: RunContext, stream: Ref, left: int) -> Stream:
    """The stream that step `left` stored, to go on with under the settings of the run."""
    pipeline, prompts = run.config.pipeline, run.config.rollout.drawn_prompts
    # One step ahead, episodes are played to their end: those of the next step enter when all of this step are over.
    whole = run.config.environment is not None and pipeline.mode == "one_step_off"
    most = prompts if whole else pipeline.max_inflight_prompts
    pace = Pace(prompts, pipeline.max_staleness, most)
    rows = stream_rows(run.directory.store.get_table(stream))
    return Stream(rows, pace, left)


def chunks_ahead(run: RunContext, index: int, has_more: Callable[[], bool]) -> Iterable[int | None]:
    """Tokens beside the update of a step, chunk by chunk; `has_more`: more of them are durable than the stream has."""
    pipeline = run.config.pipeline
    if pipeline.mode == "one_step_off":
        return itertools.repeat(None)
    if pipeline.ahead_tokens is not None:
        return chunks_of(pipeline.ahead_tokens, pipeline.chunk_tokens)
    for ledger in (*(() if run.replayed is None else (run.replayed.ledger,)), run.directory.ledger):
        stored = {ref.kind: ref for ref in ledger.artifacts(index).values()}
        if "schedule" in stored:
            chunks: list[int] = run.directory.store.get_json(stored["schedule"])["chunks"]
            return chunks
    return _until_updated(run, index, has_more)


def _until_updated(run: RunContext, index: int, has_more: Callable[[], bool]) -> Iterator[int]:
    """Chunks until the ledger has the policy that the step makes, and the stream all that a killed process wrote."""
    updated, chunks = run.graph.carries["policy"], until_halted(run)
    yield run.config.pipeline.chunk_tokens
    while updated not in run.directory.ledger.artifacts(index) or has_more():
        yield next(chunks)


def until_halted(run: RunContext) -> Iterator[int]:
    """Chunks without an end (errors: `RunContext.refuse_halted`)."""
    while True:
        run.refuse_halted()
        yield run.config.pipeline.chunk_tokens


def turns_of(rows: Sequence[Row]) -> pa.Table:
    found = [{"group": row.group, "sample": row.sample, **turn} for row in rows for turn in row.turns]
    return pa.Table.from_pylist(found, schema=TURNS)


def table_in_flight(run: RunContext, rows: Sequence[Row]) -> pa.Table:
    schema = STREAM if run.config.environment is None else STREAM_OF_EPISODES
    return stream_table(rows, schema)


def _completion(row: Row) -> Completion:
    written = row.written or None
    return Completion(row.group, row.sample, row.tokens, row.logprobs, cast(Finish, row.finish), written=written)


def stream_rollouts(run: RunContext, rows: Sequence[Row]) -> pa.Table:
    """The completions of a step as a table of kind `rollouts`; versions only where they can differ."""
    completions = [_completion(row) for row in rows]
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    answered = [group_of(group, each) for group, each in groups.items()]
    table = rollout_table(run, completions, answered, ROLLOUTS, [row.prompt_tokens for row in rows])
    if run.config.pipeline.max_staleness == 0:
        return table
    return table.append_column(VERSIONS, pa.array([row.versions for row in rows], VERSIONS.type))


def behaviour_table(run: RunContext, index: int, rollouts: pa.Table, rows: Sequence[Row]) -> pa.Table:
    """Log-probs and entropies of a share of the completions under the versions that wrote their tokens.

    Raises LogprobError: the loss takes the rollout's log-probs as they are, and one of these is not equal.
    """
    chosen = verified_rows(run, index, padded(rollouts["written"], torch.bool, False))
    versions = pad([rows[i].versions for i in chosen], torch.int64, -1)
    taken = rollouts.take(chosen)
    scored = behaviour_logprobs(run, token_batch(taken), versions)
    if run.config.logprobs.source == "rollout":
        for row, ours in zip(taken.to_pylist(), scored[0], strict=True):
            theirs, written = torch.tensor(row["logprobs"]), torch.tensor(row["written"])
            if differing := first_differing(theirs, ours[: len(theirs)], written):
                raise LogprobError(f"group {row['group']}, sample {row['sample']}, {differing}; no update was begun")
    lengths = (versions >= 0).sum(dim=1).numpy()
    columns = {
        "group": pa.array([rows[i].group for i in chosen], pa.int32()),
        "sample": pa.array([rows[i].sample for i in chosen], pa.int32()),
        "logprobs": column(scored[0], lengths),
        "entropy": column(scored[1], lengths),
    }
    return pa.table(columns, schema=LOGPROBS)
