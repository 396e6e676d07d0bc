"""Bring a run that stopped back to where it was: last checkpoint, then the later updates from their stored batches."""

from collections.abc import Mapping

from fp8core.config.check import PlannedStep
from fp8core.config.steps import import_step
from fp8core.store.artifacts import Ref
from fp8core.store.ledger import START, TaskEntry
from fp8core.workers.live import LiveRun
from tasks.calibrate import read_scales
from tasks.sync import push


class RedoError(RuntimeError):
    """A redone update did not give the weights that the ledger names."""


def restore(run: LiveRun) -> int:
    """Restore trainer and engine; returns how many updates were redone."""
    trainer = run.ready_trainer()
    newest = run.directory.ledger.newest_checkpoints()
    checkpoint = next((entry for entry in newest if (run.directory.path / entry.uri).is_dir()), None)
    if checkpoint is not None:
        trainer.load(run.directory.path / checkpoint.uri)
    redone = 0
    while _redo(run, trainer.version + 1):
        redone += 1
    scales = _scales_of(run, trainer.version)
    if scales is not None:
        push(run, read_scales(run, scales))
    return redone


def carried(run: LiveRun, index: int) -> dict[str, Ref]:
    """What iteration `index` starts from: outputs of the one before it, or of step 0."""
    if index == START + 1:
        tasks = run.directory.ledger.tasks(START)
        return {"policy": tasks["warm_start"].outputs["policy"], "scales": tasks["calibrate"].outputs["scales"]}
    before = run.directory.ledger.handed_over(index - 1)
    return {artifact: before[source] for artifact, source in run.plan.carries.items()}


def _redo(run: LiveRun, index: int) -> bool:
    """Redo the stored updates of one iteration and compare; False when none is stored."""
    stored = run.directory.ledger.tasks(index)
    steps = [planned for planned in run.plan.steps if planned.spec.redo and planned.name in stored]
    if not steps:
        return False
    available: Mapping[str, Ref] = {**carried(run, index), **run.directory.ledger.artifacts(index)}
    for planned in steps:
        _redo_step(run, index, planned, stored[planned.name], available)
    return True


def _redo_step(run: LiveRun, index: int, planned: PlannedStep, stored: TaskEntry, available: Mapping[str, Ref]) -> None:
    inputs = {port: available[artifact] for port, artifact in planned.inputs.items()}
    outputs = import_step(planned.uses)(run, index, planned.options, **inputs)
    for port, artifact in planned.outputs.items():
        if outputs[port].digest != stored.outputs[artifact].digest:
            raise RedoError(
                f"step {index}, task {planned.name}: redoing it gave {artifact} {outputs[port].digest[:16]}, "
                f"the ledger says {stored.outputs[artifact].digest[:16]}"
            )


def _scales_of(run: LiveRun, version: int) -> Ref | None:
    """The stored scales of a policy version, or None when its calibration was not reached."""
    if version == START:
        return carried(run, START + 1)["scales"]
    return run.directory.ledger.artifacts(version).get(run.plan.carries["scales"])
