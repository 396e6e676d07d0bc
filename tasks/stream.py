"""Generate ahead of the update: the stream of completions, and what leaves it for a step (`rollout.stream`)."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import pyarrow as pa
import torch

from fp8core.config.steps import NoOptions
from fp8core.rl.batch import column, pad, padded
from fp8core.rollout.stream import (
    Row,
    Stream,
    StreamLimits,
    chunks_of,
    run_ahead,
)
from fp8core.run.batches import token_batch
from fp8core.run.context import RunContext
from fp8core.run.resume import behaviour_logprobs, verified_rows
from fp8core.run.rollouts import check_episodes, row_tables, turns_of
from fp8core.run.stream_writer import StreamPrompts, StreamWriter, stream_rows, stream_table
from fp8core.store.artifacts import Ref
from fp8core.store.tables import LOGPROBS, STREAM, STREAM_OF_EPISODES
from fp8core.training.trainer import LogprobError, first_differing
from tasks.step import step

_FINISHED = {
    "prompts": "prompts",
    "rollouts": "rollouts",
    "left": "stream",
    "behaviour": "behaviour",
}


@step(inputs={"stream": "stream", "policy": "policy", "scales": "scales"}, outputs=_FINISHED)
def finish(run: RunContext, index: int, options: NoOptions, stream: Ref, policy: Ref, scales: Ref) -> dict[str, Ref]:
    """Complete the prompts of a step under the newest policy; what else is in flight writes as long."""
    return _finished(run, index, stream)[0]


@step(inputs={"stream": "stream", "policy": "policy", "scales": "scales"}, outputs={"turns": "turns", **_FINISHED})
def finish_episodes(
    run: RunContext, index: int, options: NoOptions, stream: Ref, policy: Ref, scales: Ref
) -> dict[str, Ref]:
    outputs, rows = _finished(run, index, stream)
    return {"turns": run.directory.store.put_table("turns", turns_of(rows)), **outputs}


def _finished(run: RunContext, index: int, stream: Ref) -> tuple[dict[str, Ref], list[Row]]:
    store, source = run.directory.store, StreamPrompts(run)
    opened = opened_stream(run, stream, index - 1)
    written, judged = StreamWriter(run, index, source, opened.rows), opened.whole()
    pipeline = run.config.pipeline
    # No episode can be cut where the longest one of others ends.
    together = pipeline.mode == "asynchronous" and run.config.environment is None
    rows = opened.complete(index, pipeline.chunk_tokens if together else None, written, source.enter)
    written.attach_turns([*rows, *opened.rows])
    # Before the log-probs are verified: some episode must have a token for that.
    if index not in judged:
        check_episodes(run, index, turns_of(rows))
    places = sorted({(row.batch, row.group) for row in rows})
    rows = [replace(row, group=places.index((row.batch, row.group))) for row in rows]
    rollouts, _ = row_tables(rows, run.config, run.tokenizer)
    outputs = {
        "prompts": store.put_table("prompts", source.table(places)),
        "rollouts": store.put_table("rollouts", rollouts),
        "left": store.put_table("stream", table_in_flight(run, opened.rows)),
        "behaviour": store.put_table("behaviour", behaviour_table(run, index, rollouts, rows)),
    }
    return outputs, rows


@step(
    inputs={"left": "stream", "policy": "policy", "scales": "scales"},
    outputs={"next_stream": "stream", "schedule": "schedule"},
)
def ahead(run: RunContext, index: int, options: NoOptions, left: Ref, policy: Ref, scales: Ref) -> dict[str, Ref]:
    """Write beside the update, under the policy that it starts from.

    `schedule` has what was written, which the clock may have decided: whoever makes the step again follows it."""
    store, opened, source = run.directory.store, opened_stream(run, left, index), StreamPrompts(run)
    written, judged = StreamWriter(run, index, source, opened.rows), opened.whole()
    schedule = chunks_ahead(run, index, lambda: written.has_more(opened.rows))
    chunks = run_ahead(opened, index - 1, schedule, written, source.enter)
    written.attach_turns(opened.rows)
    # A run cannot play again those of a stored stream. One prompt may well fail, so only whole steps are judged.
    for batch in opened.whole():
        if batch not in judged:
            rows = [row for row in opened.rows if row.batch == batch]
            check_episodes(run, index, turns_of(rows))
    return {
        "next_stream": store.put_table("stream", table_in_flight(run, opened.rows)),
        "schedule": store.put_json("schedule", {"version": index - 1, "chunks": chunks}),
    }


def opened_stream(run: RunContext, stream: Ref, left: int) -> Stream:
    pipeline, prompts = run.config.pipeline, run.config.rollout.drawn_prompts
    # One step ahead, episodes are played to their end: those of the next step enter when all of this step are over.
    whole = run.config.environment is not None and pipeline.mode == "one_step_off"
    most = prompts if whole else pipeline.max_inflight_prompts
    pace = StreamLimits(prompts, pipeline.max_staleness, most)
    rows = stream_rows(run.directory.store.get_table(stream))
    return Stream(rows, pace, left)


def chunks_ahead(run: RunContext, index: int, has_more: Callable[[], bool]) -> Iterable[int | None]:
    """`has_more`: more of them are durable than the stream has."""
    pipeline = run.config.pipeline
    if pipeline.mode == "one_step_off":
        return itertools.repeat(None)
    if pipeline.ahead_tokens is not None:
        return chunks_of(pipeline.ahead_tokens, pipeline.chunk_tokens)
    stored = {ref.kind: ref for ref in (run.replayed or run.directory.ledger).artifacts(index).values()}
    if "schedule" in stored:
        chunks: list[int] = run.directory.store.get_json(stored["schedule"])["chunks"]
        return chunks
    return _until_updated(run, index, has_more)


def _until_updated(run: RunContext, index: int, has_more: Callable[[], bool]) -> Iterator[int]:
    updated, chunks = run.graph.carries["policy"], until_halted(run)
    yield run.config.pipeline.chunk_tokens
    while updated not in run.directory.ledger.artifacts(index) or has_more():
        yield next(chunks)


def until_halted(run: RunContext) -> Iterator[int]:
    while True:
        run.check_halted()
        yield run.config.pipeline.chunk_tokens


def table_in_flight(run: RunContext, rows: Sequence[Row]) -> pa.Table:
    schema = STREAM if run.config.environment is None else STREAM_OF_EPISODES
    return stream_table(rows, schema)


def behaviour_table(run: RunContext, index: int, rollouts: pa.Table, rows: Sequence[Row]) -> pa.Table:
    """Raises LogprobError: the loss takes the rollout's log-probs as they are, and one of these is not equal."""
    chosen = verified_rows(run, index, padded(rollouts["written"], torch.bool, False))
    versions = pad([rows[i].versions for i in chosen], torch.int64, -1)
    taken = rollouts.take(chosen)
    scored = behaviour_logprobs(run, token_batch(taken), versions)
    if run.config.logprobs.source == "rollout":
        for row, ours in zip(taken.to_pylist(), scored[0], strict=True):
            theirs, policy_mask = torch.tensor(row["logprobs"]), torch.tensor(row["written"])
            if differing := first_differing(theirs, ours[: len(theirs)], policy_mask):
                raise LogprobError(f"group {row['group']}, sample {row['sample']}, {differing}; no update was begun")
    lengths = (versions >= 0).sum(dim=1).numpy()
    columns = {
        "group": pa.array([rows[i].group for i in chosen], pa.int32()),
        "sample": pa.array([rows[i].sample for i in chosen], pa.int32()),
        "logprobs": column(scored[0], lengths),
        "entropy": column(scored[1], lengths),
    }
    return pa.table(columns, schema=LOGPROBS)
