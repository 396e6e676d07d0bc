"""Recompute damaged artifacts and bring the trainer to a version of the policy: a list of work, one loop.

- Version n is the policy after step n; version 0 is the policy before the first step.
- The trainer holds one version. It goes back by a checkpoint (`load_state`) and forward by redone updates.
- To redo an update is to run it again from its stored inputs and to compare its outputs with the ledger.
- Outputs that differ stop an exact run (`RedoError`). A tolerant run, or other code, enters them in the ledger as a
  redo, and later steps start from them (`effective_outputs`).
- To recompute a task is to run it again because a file of its outputs is damaged. Its outputs must be equal.
- A task is recomputed with the trainer at the newest policy among its inputs, from inputs that are undamaged.
- The engine holds the version that was pushed last. Only `rewind_with_engine` and tasks that read scales push one.

`work_needed` and `work_before` only read files and the ledger. `_carry_out` does the work, and alone redoes updates.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
from fp8core.store.ledger import START, RedoEntry, TaskEntry


class RedoError(RuntimeError):
    """A redone update did not give the weights that the ledger names."""


@dataclass(frozen=True)
class TrainerAt:
    version: int


@dataclass(frozen=True)
class RunAgain:
    index: int
    planned: PlannedStep


Work = TrainerAt | RunAgain


def recompute_input_if_damaged(run: RunContext, index: int, artifact: str) -> Ref:
    """An artifact that step `index` reads; its task runs again first if the file is damaged.

    Trainer and engine may hold another version afterwards.
    """
    _carry_out(run, _work_for_input(run, index, artifact))
    return _input(run, index, artifact)


def recompute_if_damaged(run: RunContext, index: int, planned: PlannedStep) -> bool:
    """Run a finished task again if one of its outputs is damaged; returns whether one was.

    Trainer and engine may hold another version afterwards.
    """
    needed = work_needed(run, index, planned)
    _carry_out(run, needed)
    return bool(needed)


def recompute_kinds_if_damaged(run: RunContext, index: int, kinds: set[str]) -> None:
    """Recompute damaged artifacts of these kinds of a committed step; trainer and engine return to their version.
    Raises RedoError, UserError: as `resume.restore` does."""
    if index == START:
        return  # Recomputed when the process began.
    version = run.ready_trainer().version
    tasks = [planned for planned in run.graph.steps if kinds.intersection(planned.spec.outputs.values())]
    if any([recompute_if_damaged(run, index, planned) for planned in tasks]):
        rewind_with_engine(run, version)


def rewind_to(run: RunContext, version: int) -> None:
    """Bring the trainer to a version of the policy that the run has gone through, by a checkpoint and redone updates.

    The engine moves only where a damaged input has to be generated again.
    """
    _carry_out(run, [TrainerAt(version)])


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


def work_needed(run: RunContext, index: int, planned: PlannedStep) -> list[Work]:
    """The work that replaces the damaged outputs of a finished task, in order; empty when none is damaged."""
    if not damages(run, _stored_outputs(run, index, planned)):
        return []
    if planned.spec.redo:
        return [TrainerAt(index - 1), TrainerAt(index)]
    return [RunAgain(index, planned)]


def work_before(run: RunContext, work: Work) -> list[Work]:
    """The work that must come directly before `work`, in order; asked again after it, until nothing is left."""
    if isinstance(work, TrainerAt):
        return []
    index, planned, held = work.index, work.planned, run.ready_trainer().version
    # Before the inputs: a checkpoint that is loaded also puts back the file of its policy, which is an input.
    if planned.spec.redo and held != (version := _version_before(run, index, planned)):
        return [TrainerAt(version)]
    for artifact in planned.inputs.values():
        if needed := _work_for_input(run, index, artifact):
            return needed
    if planned.spec.redo:
        return []
    read = _version_read(run, _inputs(run, index, planned))
    return [] if read in (None, held) else [TrainerAt(read)]


def _work_for_input(run: RunContext, index: int, artifact: str) -> list[Work]:
    if artifact not in run.graph.carries:
        return work_needed(run, index, producer_of(run, artifact))
    # Those of step 0 were recomputed when the process began.
    if index == START + 1 or _is_superseded(run, index - 1, artifact):
        return []
    return work_needed(run, index - 1, producer_of(run, run.graph.carries[artifact]))


def _carry_out(run: RunContext, wanted: list[Work]) -> None:
    left = wanted[::-1]
    while left:
        if before := work_before(run, left[-1]):
            left += before[::-1]
            continue
        match left.pop():
            case TrainerAt(version):
                left += _updates_to(run, version)[::-1]
            case RunAgain(index, planned) if planned.spec.redo:
                _redo(run, index, planned)
            case RunAgain(index, planned):
                _recompute(run, index, planned)


def _updates_to(run: RunContext, version: int) -> list[Work]:
    """Load a checkpoint where the trainer is beyond a version; returns the updates that lead from there to it."""
    if run.ready_trainer().version > version:
        load_state(run, version)
    updates = list[Work]()
    for index in range(run.ready_trainer().version + 1, version + 1):
        stored = run.directory.ledger.tasks(index)
        updates += [RunAgain(index, each) for each in run.graph.steps if each.spec.redo and each.name in stored]
    return updates


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
        stored: TaskEntry = ledger.tasks(index)[task]
        ledger.append(stored.model_copy(update={"outputs": outputs}), redo)
    else:
        last = ledger.last_step()
        assert last is not None, "this step is committed"
        # The shards of the open step are of the policy that is replaced.
        shards_of(run, last + 1).clear()
        ledger.append(redo)
    other = "" if made_by == run.code_version else f"; code version {made_by[:12]} made it, this is other code"
    run.console.note(f"{text}{other}: the run goes on from the new policy and is inexact")


def _version_before(run: RunContext, index: int, update: PlannedStep) -> int:
    """The version that an update of step `index` starts from: `index` only where an earlier one gave the policy."""
    earlier = run.graph.steps[: run.graph.steps.index(update)]
    return index if any(each.spec.redo and "policy" in each.spec.outputs.values() for each in earlier) else index - 1


def _recompute(run: RunContext, index: int, planned: PlannedStep) -> None:
    """Run a task with damaged outputs again; the trainer holds the policy among its inputs, the engine gets it here."""
    inputs = _inputs(run, index, planned)
    _push_read(run, inputs)
    expected = _stored_outputs(run, index, planned)
    recompute_damaged(run, index, planned.name, expected, lambda: _run_again(run, index, planned, inputs))
    if run.directory.ledger.step(index) is not None:
        shards_of(run, index).clear()


def _version_read(run: RunContext, inputs: Mapping[str, Ref]) -> int | None:
    """The newest version among the policies that a task reads; None where it reads none."""
    store = run.directory.store
    return max((store.get_json(ref)["version"] for ref in inputs.values() if ref.kind == "policy"), default=None)


def _push_read(run: RunContext, inputs: Mapping[str, Ref]) -> None:
    """Push the policy that a task reads, if the task reads its scales too."""
    store, version = run.directory.store, _version_read(run, inputs)
    for ref in inputs.values():
        if ref.kind == "scales" and version is not None and store.get_json(ref)["version"] == version:
            push(run, read_scales(run, ref))


def _run_again(run: RunContext, index: int, planned: PlannedStep, inputs: dict[str, Ref]) -> dict[str, Ref]:
    def body() -> dict[str, Ref]:
        made: dict[str, Ref] = import_step(planned.uses)(run, index, planned.options, **inputs)
        return {planned.outputs[port]: ref for port, ref in made.items()}

    return attempt(f"step {index}, task {planned.name}", body)


def _stored_outputs(run: RunContext, index: int, planned: PlannedStep) -> dict[str, Ref]:
    """The stored outputs of a finished task, by artifact; for an update that was redone, those of its redo."""
    ledger = run.directory.ledger
    stored = ledger.effective_outputs(index) if planned.spec.redo else ledger.artifacts(index)
    # Updates of earlier versions stored no advantages.
    return {artifact: stored[artifact] for artifact in planned.outputs.values() if artifact in stored}


def _inputs(run: RunContext, index: int, planned: PlannedStep) -> dict[str, Ref]:
    return {port: _input(run, index, artifact) for port, artifact in planned.inputs.items()}


def _input(run: RunContext, index: int, artifact: str) -> Ref:
    if artifact in run.graph.carries:
        return carried(run, index)[artifact]
    # Of its own step a task read what was stored then, even where a redo gave something else to those after it.
    return run.directory.ledger.artifacts(index)[artifact]


def _is_superseded(run: RunContext, last: int, artifact: str) -> bool:
    """True if completions began anew after step `last`, so that nothing reads the stream it stored any more."""
    source = run.graph.carries[artifact]
    producer = producer_of(run, source)
    redo = run.directory.ledger.redone(last).get(producer.name)
    return redo is not None and not producer.spec.redo and run.directory.store.damage(redo.outputs[source]) is None


def producer_of(run: RunContext, artifact: str) -> PlannedStep:
    return next(planned for planned in run.graph.steps if artifact in planned.outputs.values())


def _scales_of(run: RunContext, version: int) -> Ref | None:
    """The stored scales of a policy version, or None when its calibration was not reached."""
    if version == START:
        return carried(run, START + 1)["scales"]
    return run.directory.ledger.effective_outputs(version).get(run.graph.carries["scales"])


def recompute_damaged(
    run: RunContext, index: int, task: str, expected: Mapping[str, Ref], body: Callable[[], dict[str, Ref]]
) -> bool:
    """Run a finished task again when one of its files is damaged; returns whether it was.

    `body` makes the outputs that are `expected`, and in storing them replaces the damaged files; called at most once.
    Raises UserError: what `body` makes is not what a damaged file held.
    """
    damaged = damages(run, expected)
    if damaged:
        check_recomputed(run, index, task, damaged, expected, body())
    return bool(damaged)


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
            raise StoredFileError(
                f"step {index}: artifact {name} is damaged and cannot be restored: {error}; running {task} again gave "
                f"{made[name].digest}, the ledger says {expected[name].digest}{_other_code(run, index)}"
            )
        run.console.note(f"step {index}: artifact {name} was damaged ({error}); made again by {task}, equal")


def _other_code(run: RunContext, index: int) -> str:
    made_by = code_of(run, index)
    if made_by == run.code_version:
        return ""
    return f" (made by code version {made_by[:12]}, this is {run.code_version[:12]})"
