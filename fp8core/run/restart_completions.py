"""Restart completions in flight that a resumed run cannot continue: their policy or their environment differs now.

Each restart stores a new stream, which a redo entry of the ledger names in place of the earlier one.
"""

from contextlib import suppress

from fp8core.run.behaviour import is_replaced, rebuild_kept_policies, versions_of
from fp8core.run.commit import code_of
from fp8core.run.context import RunContext
from fp8core.run.execute import carried, finished_steps
from fp8core.run.recompute import RedoError, producer_of
from fp8core.run.rollouts import shards_of
from fp8core.run.stream_writers import EpisodeWriter, StreamPrompts, stream_rows, stream_table
from fp8core.store.artifacts import Ref
from fp8core.store.ledger import RedoEntry


def restart_completions_of_lost_policies(run: RunContext, last: int) -> None:
    """Restart completions whose policy cannot be rebuilt: those that wait or are in flight after step `last`.

    No pass would give the log-probs of their tokens. A policy is lost if a redo replaced it by another one. All are
    lost if other code made step `last`: they may then come out different whenever they are needed.
    """
    if "stream" not in run.graph.carries:
        return
    store, artifact = run.directory.store, run.graph.carries["stream"]
    producer, ledger = producer_of(run, artifact).name, run.directory.ledger
    stored, makers = carried(run, last + 1)["stream"], {code_of(run, last)}
    if (damage := store.damage(stored)) is not None:
        # An earlier process let completions begin anew, and lost its file; the one that it replaced is whole.
        makers.add(ledger.redone(last)[producer].code_version)
        run.console.note(f"step {last}: artifact {artifact} was damaged ({damage}); completions begin anew once more")
    table = store.get_table(stored if damage is None else ledger.artifacts(last)[artifact])
    lost = set(versions_of(table))
    if makers == {run.code_version}:
        if run.config.replay.level == "tolerant" or any(code_of(run, each) != run.code_version for each in lost):
            with suppress(RedoError):
                rebuild_kept_policies(run, sorted(lost))
        lost = {version for version in lost if is_replaced(run, version)}
    if not lost and damage is None:
        return
    rows = stream_rows(table)
    begun = [row.anew() if lost.intersection(row.versions) else row for row in rows]
    made = store.put_table("stream", stream_table(begun, table.schema))
    if made == stored:
        return
    entry = RedoEntry(step=last, task=producer, outputs={artifact: made}, code_version=run.code_version)
    # They go on from what begins anew.
    shards_of(run, last + 1).clear()
    run.directory.ledger.append(entry)
    count = sum(ours is not theirs for ours, theirs in zip(rows, begun, strict=True))
    run.console.note(
        f"step {last + 1}: {count} of {len(rows)} completions begin anew: policy {', '.join(map(str, sorted(lost)))}, "
        "which wrote tokens of them, was replaced or is of other code"
    )


def restart_episodes_answered_otherwise(run: RunContext, index: int) -> None:
    """Restart episodes whose environment answers differently now, in the newest stream before or in the open step.

    Every episode in flight is asked again. An environment that answers differently is no function of its task and the
    actions, so nothing can continue the episode. Finished, durable episodes are not asked, nor those of a run without
    a step left to do.
    """
    environment = run.config.environment
    if environment is None or "stream" not in run.graph.carries or index > run.config.steps:
        return
    step, task, artifact, stored = _newest_stream(run, index)
    table = run.directory.store.get_table(stored)
    rows = stream_rows(table)
    differing = EpisodeWriter(run, index, StreamPrompts(run), rows).answered_otherwise()
    if not differing:
        return
    begun = [row.anew() if (row.batch, row.group, row.sample) in differing else row for row in rows]
    made = run.directory.store.put_table("stream", stream_table(begun, table.schema))
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
    artifact = run.graph.carries["stream"]
    if index == 1:
        return 0, "stream", "stream", start["stream"]
    return index - 1, producer_of(run, artifact).name, artifact, start["stream"]
