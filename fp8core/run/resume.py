"""Resume a run that stopped: trainer and engine return to where its ledger ends.

`restore` loads a checkpoint that is undamaged and of the run's own policies, and redoes the later updates. That is the
newest one, or the newest before a step with a damaged artifact, which is made again on the way (`recompute`).
"""

from contextlib import suppress

from pydantic import JsonValue

from fp8core.run.checkpoint import load_state
from fp8core.run.context import RunContext
from fp8core.run.execute import carried, code_of, finished_steps, step_metrics, stored_manifest
from fp8core.run.recompute import (
    RedoError,
    first_damaged_step,
    is_replaced,
    producer_of,
    rebuild_kept_policies,
    redo_step,
    rewind_to,
    rewind_with_engine,
    versions_of,
)
from fp8core.run.rollouts import shards_of
from fp8core.run.stream_writers import stream_rows, stream_table
from fp8core.store.json_text import value_differences
from fp8core.store.ledger import START, RedoEntry
from fp8core.store.manifest import StepRecord, library_versions
from fp8core.store.metrics import STEP


def restore(run: RunContext) -> int:
    """Restore trainer and engine, and make damaged artifacts again; returns how many updates were redone.

    Raises RedoError: an update came out otherwise in an exact run. Raises UserError: a damaged file cannot be made
    again."""
    ledger = run.directory.ledger
    last = ledger.last_step()
    assert last is not None, "step 0 is committed before anything is restored"
    _tell_changes(run, last, stored_manifest(run, last).record)
    damaged = first_damaged_step(run, _first_step_read(run, last))
    load_state(run, last if damaged is None else min(last, damaged - 1))
    begun = run.ready_trainer().version
    ledger.refuse_gap(begun, last)
    for index in range(begun + 1, last + 1):
        redo_step(run, index, [planned for planned in run.graph.steps if planned.name in ledger.tasks(index)])
    if run.replayed is None and "stream" in run.graph.carries:
        _restart_completions_of_lost_policies(run, last)
    for planned in run.graph.steps:
        # Asked anew each time: an update that gave something else undoes what was made from the old policy.
        if planned in finished_steps(run, last + 1, carried(run, last + 1)):
            redo_step(run, last + 1, [planned])
    version = run.ready_trainer().version
    if version > last and _generates(run, last + 1):
        # The old policy writes the tokens that are missing, although its update is over.
        rewind_with_engine(run, last)
        rewind_to(run, version)
    else:
        rewind_with_engine(run, version)
    return run.ready_trainer().version - begun


def _first_step_read(run: RunContext, last: int) -> int:
    """The first step of which a resume reads all artifacts: that of the checkpoint that its redos begin with."""
    reached = last - run.config.pipeline.reach
    folders = ((entry.step, run.directory.checkpoint(entry)) for entry in run.directory.ledger.last_checkpoints())
    return next((step for step, folder in folders if step <= reached and folder.is_dir()), START)


def _generates(run: RunContext, index: int) -> bool:
    """True if a step of an iteration that is not finished reads the policy and the scales that it starts from."""
    start = carried(run, index)
    finished = finished_steps(run, index, start)
    if any("sync_report" in each.spec.outputs.values() for each in finished):
        return False
    if run.config.pipeline.ahead_tokens == 0:
        # In turn, the engine sleeps beside the update.
        finished = [*finished, producer_of(run, run.graph.carries["stream"])]
    return any({"policy", "scales"} <= set(each.inputs.values()) for each in run.graph.steps if each not in finished)


def _restart_completions_of_lost_policies(run: RunContext, last: int) -> None:
    """Restart completions in flight whose policy was replaced or is of other code: no pass would score their tokens.

    A redo entry of the ledger names the new stream in place of the stored one."""
    store, artifact = run.directory.store, run.graph.carries["stream"]
    stored = carried(run, last + 1)["stream"]
    table = store.get_table(stored)
    lost = set(versions_of(table))
    if code_of(run, last) == run.code_version:
        if run.config.replay.level == "tolerant" or any(code_of(run, each) != run.code_version for each in lost):
            with suppress(RedoError):
                rebuild_kept_policies(run, sorted(lost))
        lost = {version for version in lost if is_replaced(run, version)}
    rows = stream_rows(table)
    begun = [row.anew() if lost.intersection(row.versions) else row for row in rows]
    made = store.put_table("stream", stream_table(begun, table.schema))
    if made == stored:
        return
    # They go on from what begins anew.
    shards_of(run, last + 1).clear()
    producer = producer_of(run, artifact).name
    run.directory.ledger.append(
        RedoEntry(step=last, task=producer, outputs={artifact: made}, code_version=run.code_version)
    )
    count = sum(ours is not theirs for ours, theirs in zip(rows, begun, strict=True))
    run.console.note(
        f"step {last + 1}: {count} of {len(rows)} completions begin anew: policy {', '.join(map(str, sorted(lost)))}, "
        "which wrote tokens of them, was replaced or is of other code"
    )


def _tell_changes(run: RunContext, last: int, before: StepRecord) -> None:
    now: dict[str, JsonValue] = {"environment": {**run.environment_description}, "reward": run.verifier.describe()}
    named = {"environment": "environment.name", "reward": "reward.verifier"}
    for part, described in now.items():
        if before.executed.get(part, {}) != described:
            run.console.note(f"{named[part]}: its code or libraries are others than at step {last}")
    libraries = value_differences("", {**before.versions}, {**library_versions()})
    if changed := ", ".join(each.change("") for each in libraries):
        run.console.note(f"libraries differ from those of step {last}: {changed}; steps redone may differ")


def history(run: RunContext) -> list[dict[str, float]]:
    return [{**step_metrics(run, index), STEP: index} for index in sorted(run.directory.ledger.steps())]
