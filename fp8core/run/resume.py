"""Resume a run that stopped: trainer and engine return to where its ledger ends.

`restore` loads the newest checkpoint that is undamaged and of the run's own policies, and redoes the later updates. The
trainer then holds the last committed version, or the next one where the open step has finished its update. Damaged
artifacts that the next task reads are recomputed on the way (`fp8core.run.recompute` defines these terms). Completions
that nothing can continue restart. The engine gets the trainer's version at the end, or the one before it where tokens
of the open step are still missing. Where all files are whole, only the updates are run again.
"""

from pydantic import JsonValue

from fp8core.errors import UserError
from fp8core.run.checkpoint import load_state
from fp8core.run.commit import step_metrics, stored_manifest
from fp8core.run.context import RunContext
from fp8core.run.execute import carried, finished_steps
from fp8core.run.recompute import (
    producer_of,
    recompute_if_damaged,
    recompute_input_if_damaged,
    recompute_kinds_if_damaged,
    rewind_to,
    rewind_with_engine,
)
from fp8core.run.restart_completions import restart_completions_of_lost_policies, restart_episodes_answered_otherwise
from fp8core.store.json_text import value_differences
from fp8core.store.manifest import StepRecord, library_versions
from fp8core.store.metrics import STEP


def restore(run: RunContext) -> int:
    """Restore trainer and engine, and recompute what the next step reads; returns how many updates were redone.

    Raises:
        RedoError: an update gave something else, and neither `replay.level` nor other code explains it.
        UserError: something that is needed is damaged and cannot be made again.
    """
    last = run.directory.ledger.last_step()
    assert last is not None, "step 0 is committed before anything is restored"
    # The next manifest names this one.
    before = stored_manifest(run, last).record
    _refuse_narrow_base(run, last, before)
    _tell_changes(run, last, before)
    load_state(run, last)
    begun = run.ready_trainer().version
    run.directory.ledger.refuse_gap(begun, last)
    rewind_to(run, last)
    for artifact in run.graph.carries:
        recompute_input_if_damaged(run, last + 1, artifact)
    if run.replayed is None:
        restart_completions_of_lost_policies(run, last)
    version = _restore_open_step(run, last + 1)
    if run.replayed is None:
        restart_episodes_answered_otherwise(run, last + 1)
    if version > last and _generates(run, last + 1):
        # The old policy writes the tokens that are missing, although its update is over.
        rewind_with_engine(run, last)
        rewind_to(run, version)
    else:
        rewind_with_engine(run, version)
    return run.ready_trainer().version - begun


def _restore_open_step(run: RunContext, index: int) -> int:
    """Redo the update of the step that was cut, if it was reached, and recompute damaged outputs of its tasks.

    Returns the version of the policy that its next task expects.
    """
    version = index - 1
    for planned in run.graph.steps:
        # Asked anew each time: an update that gave something else undoes what was made from the old policy.
        if planned in finished_steps(run, index, carried(run, index)):
            recompute_if_damaged(run, index, planned)
            if planned.spec.redo:
                version = index
                rewind_to(run, version)
    return version


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


def _refuse_narrow_base(run: RunContext, last: int, before: StepRecord) -> None:
    """Raises UserError: earlier code froze linears in block FP8 under adapters; no trainer has such a base any more."""
    match before.executed.get("training"):
        case {"lora": {"frozen": {"fp8_block": _}}}:
            raise UserError(
                f"run {run.directory.path.name}: the weights under its adapters were frozen in FP8 up to step {last}, "
                "now they are in BF16: replay and continue it with the code that made it, or begin another run"
            )


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
    for index in run.directory.ledger.steps():
        recompute_kinds_if_damaged(run, index, {"metrics"})
    return [{**step_metrics(run, index), STEP: index} for index in sorted(run.directory.ledger.steps())]
