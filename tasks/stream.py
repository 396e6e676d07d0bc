"""Generate ahead of the update: the stream of completions that later steps learn from (`run.stream`)."""

import itertools
from collections.abc import Callable, Iterable, Iterator

from fp8core.config.steps import NoOptions
from fp8core.run.context import StepContext
from fp8core.run.draws import Draws
from fp8core.run.rollouts import check_episodes
from fp8core.run.stream import StreamWriter, chunks_of, open_stream, run_ahead, table_in_flight
from fp8core.store.artifacts import Ref
from tasks.step import step


@step(
    inputs={"left": "stream", "policy": "policy", "scales": "scales"},
    inputs_where={"by_use": {"drawn": "draws"}},
    outputs={"next_stream": "stream", "schedule": "schedule"},
    outputs_where={"by_use": {"next_draws": "draws"}},
    carries={"stream": "next_stream", "draws": "next_draws"},
)
def ahead(
    run: StepContext, index: int, options: NoOptions, left: Ref, policy: Ref, scales: Ref, drawn: Ref | None = None
) -> dict[str, Ref]:
    """Write beside the update, under the policy that it starts from.

    `schedule` has what was written, which the clock may have decided: whoever makes the step again follows it."""
    store = run.store
    open_rows = open_stream(run, left, index)
    draws = None if drawn is None else Draws(run, drawn)
    writer = StreamWriter(run, index, open_rows.rows, draws=draws)
    judged_batches = open_rows.whole()
    schedule = chunks_ahead(run, index, lambda: writer.has_more(open_rows.rows))
    chunks = run_ahead(open_rows, index - 1, schedule, writer, writer.enter)
    writer.attach_turns(open_rows.rows)
    # A run cannot play again those of a stored stream. One prompt may well fail, so only whole steps are judged.
    for batch in open_rows.whole():
        if batch not in judged_batches:
            check_episodes(run, index, [row for row in open_rows.rows if row.batch == batch])
    next_draws = {} if draws is None else {"next_draws": draws.stored()}
    return next_draws | {
        "next_stream": store.put_table("stream", table_in_flight(run, open_rows.rows)),
        "schedule": store.put_json("schedule", {"version": index - 1, "chunks": chunks}),
    }


def chunks_ahead(run: StepContext, index: int, has_more: Callable[[], bool]) -> Iterable[int | None]:
    """`has_more`: more of them are durable than the stream has."""
    pipeline = run.config.pipeline
    if pipeline.mode == "one_step_off":
        return itertools.repeat(None)
    if pipeline.ahead_tokens is not None:
        return chunks_of(pipeline.ahead_tokens, pipeline.chunk_tokens)
    refs = {ref.kind: ref for ref in (run.replayed or run.ledger).artifacts(index).values()}
    if "schedule" in refs:
        chunks: list[int] = run.store.get_json(refs["schedule"])["chunks"]
        return chunks
    return _chunks_until_update(run, index, has_more)


def _chunks_until_update(run: StepContext, index: int, has_more: Callable[[], bool]) -> Iterator[int]:
    policy_artifact = run.graph.carries["policy"]
    chunks = chunks_until_halt(run)
    yield run.config.pipeline.chunk_tokens
    while policy_artifact not in run.ledger.artifacts(index) or has_more():
        yield next(chunks)


def chunks_until_halt(run: StepContext) -> Iterator[int]:
    while True:
        run.check_halted()
        yield run.config.pipeline.chunk_tokens
