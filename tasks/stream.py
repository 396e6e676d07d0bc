"""Generate ahead of the update: the stream of completions, and what leaves it for a step (`rollout.stream`)."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import cast

import pyarrow as pa
import torch

from fp8core.config.steps import NoOptions
from fp8core.rl.batch import column, pad, padded
from fp8core.rollout.engine import Completion, Finish
from fp8core.rollout.stream import (
    DroppingStream,
    Eviction,
    Pace,
    Row,
    Stream,
    chunks_of,
    drain,
    finish_first,
    group_of,
    run_ahead,
)
from fp8core.rollout.stream import finish as finish_step
from fp8core.run.behaviour import behaviour_logprobs, verified_rows
from fp8core.run.context import RunContext
from fp8core.run.rollouts import check_episodes, rollout_table
from fp8core.run.scoring import token_batch
from fp8core.run.stream_writers import StreamPrompts, stream_rows, stream_table, writer_of
from fp8core.store.artifacts import Ref
from fp8core.store.tables import LOGPROBS, ROLLOUTS, STREAM, STREAM_OF_EPISODES, TURNS, VERSIONS
from fp8core.training.trainer import LogprobError, first_differing
from tasks.step import step

_FINISHED = {
    "prompts": "prompts",
    "rollouts": "rollouts",
    "left": "stream",
    "behaviour": "behaviour",
    "evictions": "evictions",
}


@step(inputs={"stream": "stream", "policy": "policy", "scales": "scales"}, outputs=_FINISHED)
def finish(run: RunContext, index: int, options: NoOptions, stream: Ref, policy: Ref, scales: Ref) -> dict[str, Ref]:
    """Complete the prompts of a step under the newest policy; what else is in flight writes as long.

    `behaviour` has the log-probs of a share of the completions, by the weights of the version that wrote each token.
    """
    return _finished(run, index, stream)[0]


@step(inputs={"stream": "stream", "policy": "policy", "scales": "scales"}, outputs={"turns": "turns", **_FINISHED})
def finish_episodes(
    run: RunContext, index: int, options: NoOptions, stream: Ref, policy: Ref, scales: Ref
) -> dict[str, Ref]:
    """As `finish`, with an environment that answers: each episode is played to its end under one policy.

    Raises UserError: every episode ended before the policy's first turn, or by a failure of the environment.
    """
    outputs, rows = _finished(run, index, stream)
    return {"turns": run.directory.store.put_table("turns", _turns_of(rows)), **outputs}


def _finished(run: RunContext, index: int, stream: Ref) -> tuple[dict[str, Ref], list[Row]]:
    """The outputs of `finish`, and the completions of the step in order."""
    store, source = run.directory.store, StreamPrompts(run)
    opened = _opened(run, stream, index - 1)
    written = writer_of(run, index, source, opened.rows)
    evicted = list[Eviction]()
    if isinstance(opened, DroppingStream):
        rows, evicted = finish_first(opened, index, run.config.pipeline.chunk_tokens, written, source.enter)
    else:
        pipeline = run.config.pipeline
        # A cache that is kept over updates is found by the tokens it is of: nothing of it may be written twice. Nor can
        # an episode be cut where the longest one of others ends.
        together = pipeline.mode == "asynchronous" and pipeline.recompute_kv_cache_after_weight_update
        together = together and run.config.environment is None
        rows = finish_step(opened, index, pipeline.chunk_tokens if together else None, written, source.enter)
    written.attach_turns([*rows, *opened.rows])
    # Before the log-probs are verified: some episode must have a token for that.
    check_episodes(run, index, _turns_of(rows))
    places = sorted({(row.batch, row.group) for row in rows})
    rows = [replace(row, group=places.index((row.batch, row.group))) for row in rows]
    rollouts = _rollouts(run, rows)
    outputs = {
        "prompts": store.put_table("prompts", source.table(places)),
        "rollouts": store.put_table("rollouts", rollouts),
        "left": store.put_table("stream", _table(run, opened.rows)),
        "behaviour": store.put_table("behaviour", _behaviour(run, index, rollouts, rows)),
        "evictions": store.put_json("evictions", [asdict(each) for each in evicted]),
    }
    return outputs, rows


@step(
    inputs={"left": "stream", "policy": "policy", "scales": "scales"},
    outputs={"next_stream": "stream", "schedule": "schedule"},
)
def ahead(run: RunContext, index: int, options: NoOptions, left: Ref, policy: Ref, scales: Ref) -> dict[str, Ref]:
    """Write beside the update, under the policy that it starts from: it runs while reward, log-probs and train do.

    `schedule` has what was written, which the clock may have decided: whoever makes the step again follows it.
    """
    store, opened, source = run.directory.store, _opened(run, left, index), StreamPrompts(run)
    written = writer_of(run, index, source, opened.rows)
    in_flight = run.config.pipeline.in_flight_weight_updates
    # `drain` gives what a killed process wrote of what has begun; with a further chunk more prompts would enter.
    schedule = _chunks(
        run, index, lambda: written.has_more(opened.rows) if in_flight else opened.has_unbegun(written.durable)
    )
    chunks = run_ahead(opened, index - 1, schedule, written, source.enter)
    if not in_flight:
        drain(opened, index - 1, _until_halted(run), written)
    written.attach_turns(opened.rows)
    # A run cannot play again those of a stored stream. One prompt may well fail, so only whole steps are judged.
    for batch in opened.whole():
        check_episodes(run, index, _turns_of([row for row in opened.rows if row.batch == batch]))
    return {
        "next_stream": store.put_table("stream", _table(run, opened.rows)),
        "schedule": store.put_json("schedule", {"version": index - 1, "chunks": chunks}),
    }


def _turns_of(rows: Sequence[Row]) -> pa.Table:
    """The turns of finished episodes, as kind `turns`."""
    found = [{"group": row.group, "sample": row.sample, **turn} for row in rows for turn in row.turns]
    return pa.Table.from_pylist(found, schema=TURNS)


def _chunks(run: RunContext, index: int, has_more: Callable[[], bool]) -> Iterable[int | None]:
    """Tokens beside the update of a step, chunk by chunk; `has_more`: more of them are durable than the stream has."""
    pipeline = run.config.pipeline
    if pipeline.mode == "one_step_off":
        return itertools.repeat(None)
    if pipeline.ahead_tokens is not None:
        return chunks_of(pipeline.ahead_tokens, pipeline.chunk_tokens)
    for ledger in (run.followed, run.directory.ledger):
        stored = {} if ledger is None else {ref.kind: ref for ref in ledger.artifacts(index).values()}
        if "schedule" in stored:
            return _recorded(run, index, stored["schedule"])
    return _until_updated(run, index, has_more)


def _until_updated(run: RunContext, index: int, has_more: Callable[[], bool]) -> Iterator[int]:
    """Chunks until the ledger has the policy that the step makes, and the stream all that a killed process wrote."""
    updated, chunks = run.graph.carries["policy"], _until_halted(run)
    yield run.config.pipeline.chunk_tokens
    while updated not in run.directory.ledger.artifacts(index) or has_more():
        yield next(chunks)


def _until_halted(run: RunContext) -> Iterator[int]:
    """Chunks without an end (errors: `RunContext.refuse_halted`)."""
    while True:
        run.refuse_halted()
        yield run.config.pipeline.chunk_tokens


def _recorded(run: RunContext, index: int, schedule: Ref) -> list[int]:
    """The chunks of a stored schedule. All are equal, so those of a damaged one are found by its digest."""
    store, pipeline = run.directory.store, run.config.pipeline
    if store.damage(schedule) is not None:
        for count in range((1 + pipeline.max_staleness) * run.config.rollout.drawn_prompts * _longest(run) + 1):
            chunks = [pipeline.chunk_tokens] * count
            if store.digest_json({"version": index - 1, "chunks": chunks}) == schedule.digest:
                return chunks
    found: list[int] = store.get_json(schedule)["chunks"]
    return found


def _longest(run: RunContext) -> int:
    """Chunks of the longest completion, or of all turns of an episode."""
    environment, most = run.config.environment, run.config.rollout.max_new_tokens
    chunks = -(-most // run.config.pipeline.chunk_tokens)
    return chunks if environment is None else min(most, chunks + environment.max_turns)


def _opened(run: RunContext, stream: Ref, left: int) -> Stream:
    pipeline, prompts = run.config.pipeline, run.config.rollout.drawn_prompts
    # One step ahead, episodes are played to their end: those of the next step enter when all of this step are over.
    whole = run.config.environment is not None and pipeline.mode == "one_step_off"
    most = prompts if whole else pipeline.max_inflight_prompts
    pace = Pace(prompts, pipeline.max_staleness, most)
    rows = stream_rows(run.directory.store.get_table(stream))
    return (Stream if pipeline.drop_or_wait == "wait" else DroppingStream)(rows, pace, left)


def _table(run: RunContext, rows: Sequence[Row]) -> pa.Table:
    schema = STREAM if run.config.environment is None else STREAM_OF_EPISODES
    return stream_table(rows, schema)


def _completion(row: Row) -> Completion:
    written = row.written or None
    return Completion(row.group, row.sample, row.tokens, row.logprobs, cast(Finish, row.finish), written=written)


def _rollouts(run: RunContext, rows: Sequence[Row]) -> pa.Table:
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


def _behaviour(run: RunContext, index: int, rollouts: pa.Table, rows: Sequence[Row]) -> pa.Table:
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
