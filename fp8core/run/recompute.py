"""Bring the trainer to a version of the policy, and make damaged artifacts of steps again on the way.

- Version n is the policy after step n; version 0 is the policy before the first step.
- The trainer holds one version. It goes back by a checkpoint (`load_state`) and forward by redone updates.
- To redo an update is to run it again from its stored inputs and to compare its outputs with the ledger.
- Outputs that differ stop an exact run (`RedoError`). A tolerant run, or other code, enters them in the ledger as a
  redo, and later steps start from them (`effective_outputs`).
- A damaged artifact is made again from a checkpoint before its step. From there on, `redo_step` redoes the updates and
  runs every task with a damaged output again. That output must be equal; whole outputs are read.
"""

from collections.abc import Callable, Mapping, Set

from fp8core.config.step_graph import PlannedStep
from fp8core.config.steps import import_step
from fp8core.errors import StoredFileError
from fp8core.run.checkpoint import load_state
from fp8core.run.commit import code_of
from fp8core.run.context import RunContext
from fp8core.run.execute import attempt, carried
from fp8core.run.policy import push
from fp8core.run.rollouts import shards_of
from fp8core.run.scales import read_scales
from fp8core.store.artifacts import ArtifactError, Ref
from fp8core.store.ledger import START, RedoEntry


class RedoError(RuntimeError):
    """A redone update did not give the weights that the ledger names."""


def rewind_to(run: RunContext, version: int) -> None:
    """Bring the trainer to a version that the run has gone through, by a checkpoint and redone updates."""
    if run.ready_trainer().version > version:
        load_state(run, version)
    for index in range(run.ready_trainer().version + 1, version + 1):
        stored = run.directory.ledger.tasks(index)
        for planned in run.graph.steps:
            if planned.spec.redo and planned.name in stored:
                _redo(run, index, planned)


def rewind_from_newest_checkpoint(run: RunContext, version: int) -> None:
    """`rewind_to`, by a checkpoint even where the trainer could go forward by updates alone.

    A redone update may give another policy than the one that the checkpoint holds.
    """
    begun, directory = run.ready_trainer().version, run.directory
    passed = (entry for entry in directory.ledger.newest_checkpoints() if begun < entry.step <= version)
    if any(directory.checkpoint(entry).is_dir() for entry in passed):
        load_state(run, version)
    rewind_to(run, version)


def rewind_with_engine(run: RunContext, version: int) -> None:
    """Bring the trainer to a version, and the engine too where its scales are stored."""
    rewind_to(run, version)
    scales = _scales_of(run, version)
    if scales is not None:
        push(run, read_scales(run, scales))


def redo_step(run: RunContext, index: int, tasks: list[PlannedStep]) -> None:
    """Redo the updates among the finished tasks of a step, and recompute the tasks with damaged outputs.

    The trainer comes from the version before the step, and holds that of its update afterwards, if it has one. No
    artifact of an earlier step that the tasks read is damaged.
    """
    for planned in tasks:
        if planned.spec.redo:
            rewind_to(run, index)
        elif _damaged_outputs(run, index, planned):
            _recompute(run, index, planned)


def first_damaged_step(run: RunContext, since: int) -> int | None:
    """The first iteration with a damaged artifact that a resume reads; None: there is none.

    Those are all artifacts of the steps from `since` on, and the metrics of the steps before.
    """
    for index in run.directory.ledger.begun():
        kinds = {"metrics"} if index < since else None
        if index > START and any(_damaged_outputs(run, index, planned, kinds) for planned in run.graph.steps):
            return index
    return None


def _damaged_outputs(
    run: RunContext, index: int, planned: PlannedStep, kinds: Set[str] | None = None
) -> dict[str, ArtifactError]:
    """The damaged outputs (None: of all kinds) of a task that are read: not removed by gc, nor replaced by a redo."""
    ledger = run.directory.ledger
    stored, effective = _stored_outputs(run, index, planned), ledger.effective_outputs(index)
    read = {name: ref for name, ref in stored.items() if effective[name] == ref and (not kinds or ref.kind in kinds)}
    removed = (ledger if run.replayed is None else run.replayed.ledger).removed()
    if index in removed:
        read = {name: ref for name, ref in read.items() if run.directory.store.path(ref).exists()}
    return damages(run, read)


def _redo(run: RunContext, index: int, planned: PlannedStep) -> None:
    """Run a stored update again and compare its outputs; the trainer moves from `index` - 1 to `index`."""
    expected = _stored_outputs(run, index, planned)
    damaged = damages(run, expected)
    outputs = _run_again(run, index, planned, _inputs(run, index, planned))
    differing = [artifact for artifact, ref in expected.items() if outputs[artifact].digest != ref.digest]
    if differing:
        stored = f"{expected[differing[0]].digest[:16]}"
        if (damage := damaged.get(differing[0])) is not None:
            stored += f", of a file that is damaged ({damage})"
        text = (
            f"step {index}, task {planned.name}: redoing it gave {differing[0]} "
            f"{outputs[differing[0]].digest[:16]}, the ledger says {stored}"
        )
        _differs(run, index, planned.name, outputs, text)
    else:
        check_recomputed(run, index, planned.name, damaged, expected, outputs)


def _differs(run: RunContext, index: int, task: str, outputs: dict[str, Ref], text: str) -> None:
    """Enter outputs that differ in the ledger, and `text` on the console; the run goes on from them.

    Raises RedoError, with `text`: an exact run redid what its own code made.
    """
    ledger = run.directory.ledger
    known = ledger.redone(index).get(task)
    made_by = known.code_version if known is not None else code_of(run, index)
    if run.config.replay.level != "tolerant" and made_by == run.code_version:
        raise RedoError(text)
    redo = RedoEntry(step=index, task=task, outputs=outputs, code_version=run.code_version)
    if ledger.step(index) is None:
        # Its later tasks have yet to run, and are to find this policy. A kill leaves both lines or none.
        ledger.append(ledger.tasks(index)[task].model_copy(update={"outputs": outputs}), redo)
    else:
        last = ledger.last_step()
        assert last is not None, "this step is committed"
        # The shards of the open step are of the policy that is replaced.
        shards_of(run, last + 1).clear()
        ledger.append(redo)
    other = "" if made_by == run.code_version else f"; code version {made_by[:12]} made it, this is other code"
    run.console.note(f"{text}{other}: the run goes on from the new policy and is inexact")


def _recompute(run: RunContext, index: int, planned: PlannedStep) -> None:
    """Run a task with damaged outputs again, by the newest policy among its inputs; the trainer returns afterwards."""
    inputs, store, version = _inputs(run, index, planned), run.directory.store, run.ready_trainer().version
    read = max((store.get_json(ref)["version"] for ref in inputs.values() if ref.kind == "policy"), default=None)
    if read is not None:
        rewind_to(run, read)
    for ref in inputs.values():
        if ref.kind == "scales" and read is not None and store.get_json(ref)["version"] == read:
            push(run, read_scales(run, ref))
    expected = _stored_outputs(run, index, planned)
    damaged = damages(run, expected)
    check_recomputed(run, index, planned.name, damaged, expected, _run_again(run, index, planned, inputs))
    rewind_to(run, version)
    if run.directory.ledger.step(index) is not None:
        shards_of(run, index).clear()


def _run_again(run: RunContext, index: int, planned: PlannedStep, inputs: dict[str, Ref]) -> dict[str, Ref]:
    def body() -> dict[str, Ref]:
        made: dict[str, Ref] = import_step(planned.uses)(run, index, planned.options, **inputs)
        return {planned.outputs[port]: ref for port, ref in made.items()}

    return attempt(f"step {index}, task {planned.name}", body)


def _stored_outputs(run: RunContext, index: int, planned: PlannedStep) -> dict[str, Ref]:
    """The stored outputs of a finished task, by artifact; for an update that was redone, those of its redo."""
    ledger = run.directory.ledger
    stored = ledger.effective_outputs(index) if planned.spec.redo else ledger.artifacts(index)
    return {artifact: stored[artifact] for artifact in planned.outputs.values() if artifact in stored}


def _inputs(run: RunContext, index: int, planned: PlannedStep) -> dict[str, Ref]:
    """Of its own step a task reads what was stored then, even where a redo gave something else to those after it."""
    before, own = carried(run, index), run.directory.ledger.artifacts(index)
    return {port: (before if name in run.graph.carries else own)[name] for port, name in planned.inputs.items()}


def producer_of(run: RunContext, artifact: str) -> PlannedStep:
    return next(planned for planned in run.graph.steps if artifact in planned.outputs.values())


def _scales_of(run: RunContext, version: int) -> Ref | None:
    """The stored scales of a policy version, or None when its calibration was not reached."""
    if version == START:
        return carried(run, START + 1)["scales"]
    return run.directory.ledger.effective_outputs(version).get(run.graph.carries["scales"])


def recompute_damaged(
    run: RunContext, index: int, task: str, expected: Mapping[str, Ref], body: Callable[[], dict[str, Ref]]
) -> None:
    """Run a finished task again when one of its files is damaged.

    `body` makes the outputs that are `expected`, and in storing them replaces the damaged files; called at most once.
    Raises UserError: what `body` makes is not what a damaged file held.
    """
    damaged = damages(run, expected)
    if damaged:
        check_recomputed(run, index, task, damaged, expected, body())


def damages(run: RunContext, refs: Mapping[str, Ref]) -> dict[str, ArtifactError]:
    found = {name: run.directory.store.damage(ref) for name, ref in refs.items()}
    return {name: error for name, error in found.items() if error is not None}


def check_recomputed(
    run: RunContext,
    index: int,
    task: str,
    damaged: Mapping[str, ArtifactError],
    expected: Mapping[str, Ref],
    made: Mapping[str, Ref],
) -> None:
    """Note each damaged file that was replaced; raises UserError where what was made is not what the file held."""
    for name, error in damaged.items():
        if made[name].digest != expected[name].digest:
            made_by = code_of(run, index)
            other = f" (made by code {made_by[:12]}, this is {run.code_version[:12]})"
            raise StoredFileError(
                f"step {index}: artifact {name} is damaged and cannot be restored: {error}; running {task} again gave "
                f"{made[name].digest}, the ledger says {expected[name].digest}"
                f"{other if made_by != run.code_version else ''}"
            )
        run.console.note(f"step {index}: artifact {name} was damaged ({error}); made again by {task}, equal")
