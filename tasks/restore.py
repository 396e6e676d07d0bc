"""Bring a run that stopped back to where it was: last checkpoint, then the later updates from their stored batches.

The trainer can be brought to any version of the policy that the run has gone through (`stand_at`). Damaged artifacts
are therefore made again where they are needed: the trainer goes to the version that made them, and their task runs once
more. Where files are whole none of this happens.
"""

from fp8core.config.check import PlannedStep
from fp8core.config.steps import import_step
from fp8core.store.artifacts import Ref
from fp8core.store.ledger import START, RedoEntry, TaskEntry
from fp8core.store.shards import RolloutShards
from fp8core.workers.live import LiveRun
from tasks.calibrate import read_scales
from tasks.checkpoint import load_state
from tasks.execute import attempt, finished_steps
from tasks.repair import check_mended, code_of, damages, mend, stored_manifest
from tasks.rollout import shard_folder
from tasks.sync import push


class RedoError(RuntimeError):
    """A redone update did not give the weights that the ledger names."""


def restore(run: LiveRun) -> int:
    """Restore trainer and engine, and make whole what the next step reads; returns how many updates were redone.

    Raises:
        RedoError: an update gave something else, and neither `replay.level` nor other code explains it.
        UserError: something that is needed is damaged and cannot be made again.
    """
    last = run.directory.ledger.last_step()
    assert last is not None, "step 0 is committed before anything is restored"
    stored_manifest(run, last)  # The next manifest names this one.
    load_state(run, last)
    begun = run.ready_trainer().version
    stand_at(run, last)
    for artifact in run.plan.carries:
        _whole(run, last + 1, artifact)
    _stand_with_engine(run, _restore_open_step(run, last + 1))
    return run.ready_trainer().version - begun


def carried(run: LiveRun, index: int) -> dict[str, Ref]:
    """What iteration `index` starts from: outputs of the one before it, or of step 0."""
    if index == START + 1:
        tasks = run.directory.ledger.tasks(START)
        return {"policy": tasks["warm_start"].outputs["policy"], "scales": tasks["calibrate"].outputs["scales"]}
    before = run.directory.ledger.handed_over(index - 1)
    return {artifact: before[source] for artifact, source in run.plan.carries.items()}


def ensure(run: LiveRun, index: int, kinds: set[str]) -> None:
    """Make damaged artifacts of these kinds of a committed step whole; trainer and engine stay at their policy.

    Raises:
        RedoError, UserError: as `restore` does.
    """
    if index == START:
        return  # Made whole when the process began.
    version = run.ready_trainer().version
    tasks = [planned for planned in run.plan.steps if kinds.intersection(planned.spec.outputs.values())]
    if any([_make_whole(run, index, planned) for planned in tasks]):
        _stand_with_engine(run, version)


def stand_at(run: LiveRun, version: int) -> None:
    """Bring the trainer to a version of the policy that the run has gone through; the engine is left as it is."""
    if run.ready_trainer().version > version:
        load_state(run, version)
    for index in range(run.ready_trainer().version + 1, version + 1):
        stored = run.directory.ledger.tasks(index)
        for planned in run.plan.steps:
            if planned.spec.redo and planned.name in stored:
                _redo(run, index, planned)


def _restore_open_step(run: LiveRun, index: int) -> int:
    """Redo the update of the step that was cut, if it was reached, and make whole what its tasks have stored.

    Returns the version of the policy that its next task expects.
    """
    version = index - 1
    for planned in run.plan.steps:
        # Asked anew each time: an update that gave something else undoes what was made from the old policy.
        if planned in finished_steps(run, index, carried(run, index)):
            _make_whole(run, index, planned)
            if planned.spec.redo:
                version = index
                stand_at(run, version)
    return version


def _stand_with_engine(run: LiveRun, version: int) -> None:
    stand_at(run, version)
    scales = _scales_of(run, version)
    if scales is not None:
        push(run, read_scales(run, scales))


def _redo(run: LiveRun, index: int, planned: PlannedStep) -> None:
    """Execute a stored update again, from inputs that are whole, and compare."""
    inputs = _whole_inputs(run, index, planned)
    stand_at(run, index - 1)
    before = run.directory.ledger.handed_over(index)
    expected = {artifact: before[artifact] for artifact in planned.outputs.values()}
    damaged = damages(run, expected)
    outputs = _run_again(run, index, planned, inputs)
    differing = [artifact for artifact, ref in expected.items() if outputs[artifact].digest != ref.digest]
    if differing:
        _differs(run, index, planned.name, expected, outputs, differing[0])
    else:
        check_mended(run, index, planned.name, damaged, expected, outputs)


def _differs(
    run: LiveRun, index: int, task: str, expected: dict[str, Ref], outputs: dict[str, Ref], artifact: str
) -> None:
    """Record that a redo gave something else, where that may be; the run goes on from what it gave."""
    ledger = run.directory.ledger
    text = (
        f"step {index}, task {task}: redoing it gave {artifact} {outputs[artifact].digest[:16]}, "
        f"the ledger says {expected[artifact].digest[:16]}"
    )
    known = ledger.redone(index).get(task)
    made_by = known.code_version if known is not None else code_of(run, index)
    if run.config.replay.level != "tolerant" and made_by == run.code_version:
        raise RedoError(text)
    if ledger.step(index) is None:
        # Its later tasks have yet to run, and are to find this policy.
        stored: TaskEntry = ledger.tasks(index)[task]
        ledger.append(stored.model_copy(update={"outputs": outputs}))
    ledger.append(RedoEntry(step=index, task=task, outputs=outputs, code_version=run.code_version))
    other = "" if made_by == run.code_version else f"; code version {made_by[:12]} made it, this is other code"
    run.console.note(f"{text}{other}: the run goes on from the new policy and is inexact")


def _make_whole(run: LiveRun, index: int, planned: PlannedStep) -> bool:
    """Make the outputs of a finished task again if one is damaged; returns whether one was."""
    ledger = run.directory.ledger
    stored = ledger.handed_over(index) if planned.spec.redo else ledger.artifacts(index)
    expected = {artifact: stored[artifact] for artifact in planned.outputs.values()}
    if not damages(run, expected):
        return False
    if planned.spec.redo:
        stand_at(run, index - 1)
        stand_at(run, index)
        return True
    inputs = _whole_inputs(run, index, planned)
    _stand_for(run, inputs)
    mend(run, index, planned.name, expected, lambda: _run_again(run, index, planned, inputs))
    if ledger.step(index) is not None:
        RolloutShards(shard_folder(run, index)).clear()
    return True


def _stand_for(run: LiveRun, inputs: dict[str, Ref]) -> None:
    """Bring the trainer to the policy among a task's inputs, and the engine too where its scales are among them."""
    store = run.directory.store
    versions = [store.get_json(ref)["version"] for ref in inputs.values() if ref.kind == "policy"]
    if not versions:
        return
    stand_at(run, max(versions))
    for ref in inputs.values():
        if ref.kind == "scales" and store.get_json(ref)["version"] == max(versions):
            push(run, read_scales(run, ref))


def _run_again(run: LiveRun, index: int, planned: PlannedStep, inputs: dict[str, Ref]) -> dict[str, Ref]:
    """The outputs of a step by artifact."""

    def body() -> dict[str, Ref]:
        made: dict[str, Ref] = import_step(planned.uses)(run, index, planned.options, **inputs)
        return {planned.outputs[port]: ref for port, ref in made.items()}

    return attempt(f"step {index}, task {planned.name}", body)


def _whole_inputs(run: LiveRun, index: int, planned: PlannedStep) -> dict[str, Ref]:
    return {port: _whole(run, index, artifact) for port, artifact in planned.inputs.items()}


def _whole(run: LiveRun, index: int, artifact: str) -> Ref:
    """An artifact that step `index` reads; when it is damaged, its task makes it again first."""
    if artifact in run.plan.carries:
        if index > START + 1:  # What step 0 stored was made whole when the process began.
            _make_whole(run, index - 1, _producer(run, run.plan.carries[artifact]))
        return carried(run, index)[artifact]
    _make_whole(run, index, _producer(run, artifact))
    # Of its own step a task read what was stored then, even where a redo gave something else to those after it.
    return run.directory.ledger.artifacts(index)[artifact]


def _producer(run: LiveRun, artifact: str) -> PlannedStep:
    return next(planned for planned in run.plan.steps if artifact in planned.outputs.values())


def _scales_of(run: LiveRun, version: int) -> Ref | None:
    """The stored scales of a policy version, or None when its calibration was not reached."""
    if version == START:
        return carried(run, START + 1)["scales"]
    return run.directory.ledger.handed_over(version).get(run.plan.carries["scales"])
