"""Generate ahead of the update: the stream of completions, and what leaves it for a step (`rollout.stream`)."""

from dataclasses import replace

from fp8core.config.steps import NoOptions
from fp8core.rollout.stream import Row, run_ahead
from fp8core.run.context import RunContext
from fp8core.run.rollouts import check_episodes
from fp8core.run.stream_step import (
    behaviour_table,
    chunks_ahead,
    opened_stream,
    stream_rollouts,
    table_in_flight,
    turns_of,
)
from fp8core.run.stream_writers import StreamPrompts, writer_of
from fp8core.store.artifacts import Ref
from tasks.step import step

_FINISHED = {
    "prompts": "prompts",
    "rollouts": "rollouts",
    "left": "stream",
    "behaviour": "behaviour",
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
    return {"turns": run.directory.store.put_table("turns", turns_of(rows)), **outputs}


def _finished(run: RunContext, index: int, stream: Ref) -> tuple[dict[str, Ref], list[Row]]:
    store, source = run.directory.store, StreamPrompts(run)
    opened = opened_stream(run, stream, index - 1)
    written, judged = writer_of(run, index, source, opened.rows), opened.whole()
    pipeline = run.config.pipeline
    # No episode can be cut where the longest one of others ends.
    together = pipeline.mode == "asynchronous" and run.config.environment is None
    rows = opened.complete(index, pipeline.chunk_tokens if together else None, written, source.enter)
    written.attach_turns([*rows, *opened.rows])
    # Before the log-probs are verified: some episode must have a token for that.
    if index not in judged:
        check_episodes(run, index, "rollouts", turns_of(rows))
    places = sorted({(row.batch, row.group) for row in rows})
    rows = [replace(row, group=places.index((row.batch, row.group))) for row in rows]
    rollouts = stream_rollouts(run, rows)
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
    """Write beside the update, under the policy that it starts from: it runs while reward, log-probs and train do.

    `schedule` has what was written, which the clock may have decided: whoever makes the step again follows it.
    """
    store, opened, source = run.directory.store, opened_stream(run, left, index), StreamPrompts(run)
    written, judged = writer_of(run, index, source, opened.rows), opened.whole()
    schedule = chunks_ahead(run, index, lambda: written.has_more(opened.rows))
    chunks = run_ahead(opened, index - 1, schedule, written, source.enter)
    written.attach_turns(opened.rows)
    # A run cannot play again those of a stored stream. One prompt may well fail, so only whole steps are judged.
    for batch in opened.whole():
        if batch not in judged:
            rows = [row for row in opened.rows if row.batch == batch]
            check_episodes(run, index, f"rollouts of step {batch}", turns_of(rows))
    return {
        "next_stream": store.put_table("stream", table_in_flight(run, opened.rows)),
        "schedule": store.put_json("schedule", {"version": index - 1, "chunks": chunks}),
    }
