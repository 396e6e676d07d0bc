"""Episodes in flight after a restart: their environments are asked the same again before the step goes on.

One that answers otherwise is no function of its task and the actions, so nobody can go on with its episode. That begins
anew, and the ledger has the stream with which the run goes on.
"""

from dataclasses import asdict

import pyarrow as pa

from fp8core.rollout.stream import Row
from fp8core.run.context import RunContext
from fp8core.run.execute import carried, finished_steps
from fp8core.run.stream_writers import EpisodeWriter, StreamPrompts
from fp8core.store.artifacts import Ref
from fp8core.store.ledger import RedoEntry


def begin_differing_anew(run: RunContext, index: int) -> None:
    """Let episodes begin anew, of the newest stream before or in the open step, whose environment answers otherwise.

    Those that are over and durable are not asked. A run that has no step to do is left as it is.
    """
    environment = run.config.environment
    if environment is None or "stream" not in run.plan.carries or index > run.config.steps:
        return
    step, task, artifact, stored = _newest_stream(run, index)
    table = run.directory.store.get_table(stored)
    rows = [Row(**row) for row in table.to_pylist()]
    differing = EpisodeWriter(run, index, StreamPrompts(run), rows).answered_otherwise(rows)
    if not differing:
        return
    begun = [row.anew() if (row.batch, row.group, row.sample) in differing else row for row in rows]
    made = run.directory.store.put_table("stream", pa.Table.from_pylist([*map(asdict, begun)], schema=table.schema))
    ledger, outputs = run.directory.ledger, {artifact: made}
    redo = RedoEntry(step=step, task=task, outputs=outputs, code_version=run.code_version)
    if ledger.step(step) is None:
        # Its next task is to find this stream. A kill leaves both lines or none.
        entry = ledger.tasks(step)[task]
        ledger.append(entry.model_copy(update={"outputs": {**entry.outputs, **outputs}}), redo)
    else:
        ledger.append(redo)
    in_flight = sum(bool(row.turns) and not row.finish for row in rows)
    run.console.note(
        f"step {index}: {len(differing)} of {in_flight} episodes in flight begin anew: environment.name="
        f"{environment.name} answered otherwise when it was asked the same again; the run is inexact"
    )


def _newest_stream(run: RunContext, index: int) -> tuple[int, str, str, Ref]:
    """Step, task and name of the stream that the next task reads, and the stream."""
    start = carried(run, index)
    for planned in reversed(finished_steps(run, index, start)):
        for artifact, ref in run.directory.ledger.tasks(index)[planned.name].outputs.items():
            if ref.kind == "stream":
                return index, planned.name, artifact, ref
    artifact = run.plan.carries["stream"]
    if index == 1:
        return 0, "stream", "stream", start["stream"]
    producer = next(planned for planned in run.plan.steps if artifact in planned.outputs.values())
    return index - 1, producer.name, artifact, start["stream"]
