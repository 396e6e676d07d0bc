"""Generate ahead of the update: the stream of completions that later steps learn from (`rollout.stream`)."""

import itertools
from collections.abc import Callable, Iterable, Iterator

from fp8core.config.steps import NoOptions
from fp8core.rollout.stream import chunks_of, run_ahead
from fp8core.run.context import RunContext
from fp8core.run.rollouts import check_episodes
from fp8core.run.stream_writer import StreamPrompts, StreamWriter, opened_stream, table_in_flight
from fp8core.store.artifacts import Ref
from tasks.step import step


@step(
    inputs={"left": "stream", "policy": "policy", "scales": "scales"},
    outputs={"next_stream": "stream", "schedule": "schedule"},
    carries={"stream": "next_stream"},
)
def ahead(run: RunContext, index: int, options: NoOptions, left: Ref, policy: Ref, scales: Ref) -> dict[str, Ref]:
    """Write beside the update, under the policy that it starts from.

    `schedule` has what was written, which the clock may have decided: whoever makes the step again follows it."""
    store = run.store
    opened = opened_stream(run, left, index)
    source = StreamPrompts(run)
    written = StreamWriter(run, index, source, opened.rows)
    judged = opened.whole()
    schedule = chunks_ahead(run, index, lambda: written.has_more(opened.rows))
    chunks = run_ahead(opened, index - 1, schedule, written, source.enter)
    written.attach_turns(opened.rows)
    # A run cannot play again those of a stored stream. One prompt may well fail, so only whole steps are judged.
    for batch in opened.whole():
        if batch not in judged:
            check_episodes(run, index, [row for row in opened.rows if row.batch == batch])
    return {
        "next_stream": store.put_table("stream", table_in_flight(run, opened.rows)),
        "schedule": store.put_json("schedule", {"version": index - 1, "chunks": chunks}),
    }


def chunks_ahead(run: RunContext, index: int, has_more: Callable[[], bool]) -> Iterable[int | None]:
    """`has_more`: more of them are durable than the stream has."""
    pipeline = run.config.pipeline
    if pipeline.mode == "one_step_off":
        return itertools.repeat(None)
    if pipeline.ahead_tokens is not None:
        return chunks_of(pipeline.ahead_tokens, pipeline.chunk_tokens)
    stored = {ref.kind: ref for ref in (run.replayed or run.directory.ledger).artifacts(index).values()}
    if "schedule" in stored:
        chunks: list[int] = run.store.get_json(stored["schedule"])["chunks"]
        return chunks
    return _until_updated(run, index, has_more)


def _until_updated(run: RunContext, index: int, has_more: Callable[[], bool]) -> Iterator[int]:
    updated = run.graph.carries["policy"]
    chunks = until_halted(run)
    yield run.config.pipeline.chunk_tokens
    while updated not in run.directory.ledger.artifacts(index) or has_more():
        yield next(chunks)


def until_halted(run: RunContext) -> Iterator[int]:
    while True:
        run.check_halted()
        yield run.config.pipeline.chunk_tokens
