"""Resume a run that stopped: trainer and engine return to where its ledger ends.

`restore` loads a checkpoint that is undamaged and of the run's own policies, and redoes the later updates. That is the
newest one, or the newest before a step with a damaged artifact, which is made again on the way (`recompute`). The
trainer then holds the last committed version, or the next one where the open step has finished its update. Completions
that nothing can continue restart. The engine gets the trainer's version at the end, or the one before it where tokens
of the open step are still missing. Where all files are whole, only the updates are run again.
"""

from pydantic import JsonValue

from fp8core.run.checkpoint import load_state
from fp8core.run.commit import step_metrics, stored_manifest
from fp8core.run.context import RunContext
from fp8core.run.execute import carried, finished_steps
from fp8core.run.recompute import first_damaged_step, producer_of, redo_step, rewind_to, rewind_with_engine
from fp8core.run.restart_completions import restart_completions_of_lost_policies, restart_episodes_answered_otherwise
from fp8core.store.checkpoints import last_written
from fp8core.store.json_text import value_differences
from fp8core.store.ledger import START
from fp8core.store.manifest import StepRecord, library_versions
from fp8core.store.metrics import STEP
from fp8core.store.step_manifests import restore_manifest


def restore(run: RunContext) -> int:
    """Restore trainer and engine, and make damaged artifacts again; returns how many updates were redone.

    Raises:
        RedoError: an update gave something else, and neither `replay.level` nor other code explains it.
        UserError: something that is needed is damaged and cannot be made again.
    """
    ledger = run.directory.ledger
    last = ledger.last_step()
    assert last is not None, "step 0 is committed before anything is restored"
    for entry in ledger.steps().values():
        if restore_manifest(run.directory.store, run.directory.path, entry):
            run.console.note(f"step {entry.step}: the manifest was damaged; put back from its second copy")
    # The next manifest names this one.
    before = stored_manifest(run, last).record
    _tell_changes(run, last, before)
    damaged = first_damaged_step(run, _first_step_read(run, last))
    load_state(run, last if damaged is None else min(last, damaged - 1))
    begun = run.ready_trainer().version
    ledger.refuse_gap(begun, last)
    for index in range(begun + 1, last + 1):
        redo_step(run, index, [planned for planned in run.graph.steps if planned.name in ledger.tasks(index)])
    if run.replayed is None:
        restart_completions_of_lost_policies(run, last)
    for planned in run.graph.steps:
        # Asked anew each time: an update that gave something else undoes what was made from the old policy.
        if planned in finished_steps(run, last + 1, carried(run, last + 1)):
            redo_step(run, last + 1, [planned])
    if run.replayed is None:
        restart_episodes_answered_otherwise(run, last + 1)
    version = run.ready_trainer().version
    if version > last and _generates(run, last + 1):
        # The old policy writes the tokens that are missing, although its update is over.
        rewind_with_engine(run, last)
        rewind_to(run, version)
    else:
        rewind_with_engine(run, version)
    return run.ready_trainer().version - begun


def _first_step_read(run: RunContext, last: int) -> int:
    """The first step of which a resume reads all artifacts: the one of the checkpoint that its redos begin with.

    A run that generates ahead scores tokens with older policies, which follow from an older checkpoint.
    """
    reached = last - run.config.pipeline.reach
    folders = ((entry.step, run.directory.checkpoint(entry)) for entry in last_written(run.directory.ledger))
    return next((step for step, folder in folders if step <= reached and folder.is_dir()), START)


def _generates(run: RunContext, index: int) -> bool:
    """True if a step of an iteration that is not finished reads the policy and the scales that it starts from.

    After the sync of that iteration the engine has the next policy, whatever else reads the old one.
    """
    start = carried(run, index)
    finished = finished_steps(run, index, start)
    if any("sync_report" in each.spec.outputs.values() for each in finished):
        return False
    if run.config.pipeline.ahead_tokens == 0:
        # In turn, the engine sleeps beside the update.
        finished = [*finished, producer_of(run, run.graph.carries["stream"])]
    return any({"policy", "scales"} <= set(each.inputs.values()) for each in run.graph.steps if each not in finished)


def _tell_changes(run: RunContext, last: int, before: StepRecord) -> None:
    """Name code of the user's, and libraries, that differ from the record of the last committed step."""
    now: dict[str, JsonValue] = {"environment": {**run.environment_description}, "reward": run.verifier.describe()}
    named = {"environment": "environment.name", "reward": "reward.verifier"}
    for part, described in now.items():
        if before.executed.get(part, {}) != described:
            run.console.note(f"{named[part]}: its code or libraries are others than at step {last}")
    libraries = value_differences("", {**before.versions}, {**library_versions()})
    if changed := ", ".join(each.change("") for each in libraries):
        run.console.note(f"libraries differ from those of step {last}: {changed}; steps redone may differ")


def history(run: RunContext) -> list[dict[str, float]]:
    """Metrics of every committed iteration in order; step 0 is the state before the first update."""
    return [{**step_metrics(run, index), STEP: index} for index in sorted(run.directory.ledger.steps())]
