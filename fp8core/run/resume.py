"""Bring a run that stopped back to where it was: last checkpoint, then the later updates from their stored batches.

The trainer can be brought to any version of the policy that the run has gone through (`rewind_to`). Damaged artifacts
are therefore made again where they are needed: the trainer goes to the version that made them, and their task runs once
more. Where files are whole none of this happens.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import pyarrow as pa
from pydantic import JsonValue

from fp8core.alignment.bounds import unverifiable
from fp8core.config.step_graph import PlannedStep
from fp8core.config.steps import import_step
from fp8core.errors import StoredFileError
from fp8core.run.checkpoint import load_state
from fp8core.run.commit import code_of, step_metrics, stored_manifest
from fp8core.run.context import RunContext
from fp8core.run.execute import attempt, carried, finished_steps
from fp8core.run.policy import keep_policy, push
from fp8core.run.rollouts import shards_of
from fp8core.run.scales import read_scales
from fp8core.run.stream_writers import EpisodeWriter, StreamPrompts, stream_rows, stream_table
from fp8core.store.artifacts import ArtifactError, Ref
from fp8core.store.ledger import START, RedoEntry, TaskEntry
from fp8core.store.metrics import STEP


class RedoError(RuntimeError):
    """A redone update did not give the weights that the ledger names."""


def restore(run: RunContext) -> int:
    """Restore trainer and engine, and make whole what the next step reads; returns how many updates were redone.

    Raises:
        RedoError: an update gave something else, and neither `replay.level` nor other code explains it.
        UserError: something that is needed is damaged and cannot be made again.
    """
    last = run.directory.ledger.last_step()
    assert last is not None, "step 0 is committed before anything is restored"
    # The next manifest names this one.
    _tell_edited(run, last, stored_manifest(run, last).record.executed)
    load_state(run, last)
    begun = run.ready_trainer().version
    run.directory.ledger.refuse_gap(begun, last)
    rewind_to(run, last)
    for artifact in run.graph.carries:
        whole(run, last + 1, artifact)
    if run.followed is None:
        _begin_anew(run, last)
    version = _restore_open_step(run, last + 1)
    if run.followed is None:
        _begin_differing_anew(run, last + 1)
    if version > last and _generates(run, last + 1):
        # The old policy writes the tokens that are missing, although its update is over.
        rewind_with_engine(run, last)
        rewind_to(run, version)
    else:
        rewind_with_engine(run, version)
    return run.ready_trainer().version - begun


def versions_in_flight(run: RunContext, index: int) -> list[int]:
    """The policies that wrote tokens of the stream that iteration `index` starts from; none in a synchronous run."""
    if "stream" not in run.graph.carries:
        return []
    return _versions(run.directory.store.get_table(carried(run, index)["stream"]))


def _versions(stream: pa.Table) -> list[int]:
    return sorted({version for row in stream["versions"].to_pylist() for version in row})


def _replaced_whole(run: RunContext, last: int, artifact: str) -> bool:
    """True if completions began anew after the last step, so that nothing reads the stream it stored any more."""
    source = run.graph.carries[artifact]
    producer = _producer(run, source)
    redo = run.directory.ledger.redone(last).get(producer.name)
    return redo is not None and not producer.spec.redo and run.directory.store.damage(redo.outputs[source]) is None


def _is_replaced(run: RunContext, version: int) -> bool:
    """True if the run has another policy of this version now than the one that wrote beside the update after it.

    In an unverifiable run it has one that is near, as is what was sampled.
    """
    if run.directory.ledger.step(version + 1) is None or unverifiable(run.config) is not None:
        return False
    wrote = stored_manifest(run, version + 1).record.inputs[_producer(run, run.graph.carries["stream"]).name]["policy"]
    return wrote.digest != carried(run, version + 1)["policy"].digest


def hold_policies(run: RunContext, versions: Sequence[int]) -> None:
    """Keep policies that the engine held, in ascending order; the trainer holds afterwards what it held before.

    After a restart they are made again, from checkpoints and later updates.

    Raises RedoError: an update that led to one gave another policy.
    """
    missing, held = [version for version in versions if version not in run.kept_policies], run.ready_trainer().version
    if not missing:
        return
    replaced = list[int]()
    try:
        for version in missing:
            # Its task may need another version to make them again.
            scales = whole(run, version + 1, "scales")
            _go_to(run, version)
            if run.followed is None and _is_replaced(run, version):
                # The next ones follow from it: they are had again to know which of them differ.
                replaced.append(version)
                continue
            keep_policy(run, run.ready_trainer().export(), read_scales(run, scales))
    except RedoError:
        # A tolerant run goes on. Where a process was lost, nothing is left that could go anywhere.
        _go_to(run, held)
        raise
    _go_to(run, held)
    # An update that lacks its rollouts has them generated again, by the engine with an older policy.
    rewind_with_engine(run, held)
    run.sleep_engine()
    if replaced:
        raise RedoError(
            f"policy {replaced[0]} wrote tokens of this step, and was not had again bit for bit; resume the run: its "
            "completions in flight begin anew then"
        )


def _go_to(run: RunContext, version: int) -> None:
    """`rewind_to` from the newest checkpoint on the way: an update that is redone may give another policy."""
    begun, directory = run.ready_trainer().version, run.directory
    passed = (entry for entry in directory.ledger.newest_checkpoints() if begun < entry.step <= version)
    if any(directory.checkpoint(entry).is_dir() for entry in passed):
        load_state(run, version)
    rewind_to(run, version)


def _begin_anew(run: RunContext, last: int) -> None:
    """Let completions begin anew which wait or are in flight, and which a policy wrote that cannot be had again.

    No pass would give their log-probs. A redo with another outcome replaced it, or other code made it. Of the latter,
    an older policy may come out otherwise whenever it is needed.
    """
    if "stream" not in run.graph.carries:
        return
    store, artifact = run.directory.store, run.graph.carries["stream"]
    producer, ledger = _producer(run, artifact).name, run.directory.ledger
    stored, makers = carried(run, last + 1)["stream"], {code_of(run, last)}
    if (damage := store.damage(stored)) is not None:
        # An earlier process let completions begin anew, and lost its file; the one that it replaced is whole.
        makers.add(ledger.redone(last)[producer].code_version)
        run.console.note(f"step {last}: artifact {artifact} was damaged ({damage}); completions begin anew once more")
    table = store.get_table(stored if damage is None else ledger.artifacts(last)[artifact])
    lost = set(_versions(table))
    if makers == {run.code_version}:
        if run.config.replay.level == "tolerant" or any(code_of(run, each) != run.code_version for each in lost):
            with suppress(RedoError):
                hold_policies(run, sorted(lost))
        lost = {version for version in lost if _is_replaced(run, version)}
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


def _begin_differing_anew(run: RunContext, index: int) -> None:
    """Let episodes begin anew, of the newest stream before or in the open step, whose environment answers otherwise.

    It is asked the same again. Where it answers otherwise it is no function of its task and the actions, so nobody can
    go on with the episode. Those that are over and durable are not asked. A run without a step to do stays as it is.
    """
    environment = run.config.environment
    if environment is None or "stream" not in run.graph.carries or index > run.config.steps:
        return
    step, task, artifact, stored = _newest_stream(run, index)
    table = run.directory.store.get_table(stored)
    rows = stream_rows(table)
    differing = EpisodeWriter(run, index, StreamPrompts(run), rows).answered_otherwise(rows)
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
    return index - 1, _producer(run, artifact).name, artifact, start["stream"]


def _tell_edited(run: RunContext, last: int, executed: Mapping[str, JsonValue]) -> None:
    """Say what of the user's code is another than the last committed step had, by the description of that."""
    now: dict[str, JsonValue] = {"environment": {**run.environment_description}, "reward": run.verifier.describe()}
    named = {"environment": "environment.name", "reward": "reward.verifier"}
    for part, described in now.items():
        if executed.get(part, {}) != described:
            run.console.note(f"{named[part]}: its code or libraries are others than at step {last}")


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
        finished = [*finished, _producer(run, run.graph.carries["stream"])]
    return any({"policy", "scales"} <= set(each.inputs.values()) for each in run.graph.steps if each not in finished)


def ensure(run: RunContext, index: int, kinds: set[str]) -> None:
    """Make damaged artifacts of these kinds of a committed step whole; trainer and engine stay at their policy.

    Raises:
        RedoError, UserError: as `restore` does.
    """
    if index == START:
        return  # Made whole when the process began.
    version = run.ready_trainer().version
    tasks = [planned for planned in run.graph.steps if kinds.intersection(planned.spec.outputs.values())]
    if any([_recompute(run, index, planned) for planned in tasks]):
        rewind_with_engine(run, version)


def rewind_to(run: RunContext, version: int) -> None:
    """Bring the trainer to a version of the policy that the run has gone through; the engine is left as it is."""
    if run.ready_trainer().version > version:
        load_state(run, version)
    for index in range(run.ready_trainer().version + 1, version + 1):
        stored = run.directory.ledger.tasks(index)
        for planned in run.graph.steps:
            if planned.spec.redo and planned.name in stored:
                _redo(run, index, planned)


def _restore_open_step(run: RunContext, index: int) -> int:
    """Redo the update of the step that was cut, if it was reached, and make whole what its tasks have stored.

    Returns the version of the policy that its next task expects.
    """
    version = index - 1
    for planned in run.graph.steps:
        # Asked anew each time: an update that gave something else undoes what was made from the old policy.
        if planned in finished_steps(run, index, carried(run, index)):
            _recompute(run, index, planned)
            if planned.spec.redo:
                version = index
                rewind_to(run, version)
    return version


def rewind_with_engine(run: RunContext, version: int) -> None:
    """Bring the trainer to a version, and the engine too where its scales are stored."""
    rewind_to(run, version)
    scales = _scales_of(run, version)
    if scales is not None:
        push(run, read_scales(run, scales))


def _redo(run: RunContext, index: int, planned: PlannedStep) -> None:
    """Execute a stored update again, from inputs that are whole, and compare."""
    inputs = _whole_inputs(run, index, planned)
    rewind_to(run, index - 1)
    before = run.directory.ledger.effective_outputs(index)
    expected = {artifact: before[artifact] for artifact in planned.outputs.values()}
    damaged = damages(run, expected)
    outputs = _run_again(run, index, planned, inputs)
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
    """Record that a redo gave something else, where that may be, as `text`; the run goes on from what it gave."""
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


def _recompute(run: RunContext, index: int, planned: PlannedStep) -> bool:
    """Make the outputs of a finished task again if one is damaged; returns whether one was."""
    ledger = run.directory.ledger
    stored = ledger.effective_outputs(index) if planned.spec.redo else ledger.artifacts(index)
    expected = {artifact: stored[artifact] for artifact in planned.outputs.values()}
    if not damages(run, expected):
        return False
    if planned.spec.redo:
        rewind_to(run, index - 1)
        rewind_to(run, index)
        return True
    inputs = _whole_inputs(run, index, planned)
    _rewind_for(run, inputs)
    recompute_damaged(run, index, planned.name, expected, lambda: _run_again(run, index, planned, inputs))
    if ledger.step(index) is not None:
        shards_of(run, index).clear()
    return True


def _rewind_for(run: RunContext, inputs: dict[str, Ref]) -> None:
    """Bring the trainer to the policy among a task's inputs, and the engine too where its scales are among them."""
    store = run.directory.store
    versions = [store.get_json(ref)["version"] for ref in inputs.values() if ref.kind == "policy"]
    if not versions:
        return
    rewind_to(run, max(versions))
    for ref in inputs.values():
        if ref.kind == "scales" and store.get_json(ref)["version"] == max(versions):
            push(run, read_scales(run, ref))


def _run_again(run: RunContext, index: int, planned: PlannedStep, inputs: dict[str, Ref]) -> dict[str, Ref]:
    """The outputs of a step by artifact."""

    def body() -> dict[str, Ref]:
        made: dict[str, Ref] = import_step(planned.uses)(run, index, planned.options, **inputs)
        return {planned.outputs[port]: ref for port, ref in made.items()}

    return attempt(f"step {index}, task {planned.name}", body)


def _whole_inputs(run: RunContext, index: int, planned: PlannedStep) -> dict[str, Ref]:
    return {port: whole(run, index, artifact) for port, artifact in planned.inputs.items()}


def whole(run: RunContext, index: int, artifact: str) -> Ref:
    """An artifact that step `index` reads; when it is damaged, its task makes it again first."""
    if artifact in run.graph.carries:
        # Those of step 0 were recomputed when the process began.
        if index > START + 1 and not _replaced_whole(run, index - 1, artifact):
            _recompute(run, index - 1, _producer(run, run.graph.carries[artifact]))
        return carried(run, index)[artifact]
    _recompute(run, index, _producer(run, artifact))
    # Of its own step a task read what was stored then, even where a redo gave something else to those after it.
    return run.directory.ledger.artifacts(index)[artifact]


def _producer(run: RunContext, artifact: str) -> PlannedStep:
    return next(planned for planned in run.graph.steps if artifact in planned.outputs.values())


def _scales_of(run: RunContext, version: int) -> Ref | None:
    """The stored scales of a policy version, or None when its calibration was not reached."""
    if version == START:
        return carried(run, START + 1)["scales"]
    return run.directory.ledger.effective_outputs(version).get(run.graph.carries["scales"])


def history(run: RunContext) -> list[dict[str, float]]:
    """Metrics of every committed iteration in order; step 0 is the state before the first update."""
    for index in run.directory.ledger.steps():
        ensure(run, index, {"metrics"})
    return [{**step_metrics(run, index), STEP: index} for index in sorted(run.directory.ledger.steps())]


def recompute_damaged(
    run: RunContext, index: int, task: str, expected: Mapping[str, Ref], body: Callable[[], dict[str, Ref]]
) -> bool:
    """Run a finished task again when one of its files is damaged; returns whether it was.

    Args:
        run: the live run.
        index: the step of the task.
        task: its name.
        expected: what it stored, artifact name -> reference.
        body: makes the outputs, and in storing them replaces the damaged files; called at most once.

    Raises:
        UserError: what `body` makes is not what a damaged file held.
    """
    damaged = damages(run, expected)
    if damaged:
        check_recomputed(run, index, task, damaged, expected, body())
    return bool(damaged)


def damages(run: RunContext, refs: Mapping[str, Ref]) -> dict[str, ArtifactError]:
    """The error of each damaged file; empty when all are whole."""
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
    """Say for each damaged file that it is back; raises UserError when what was made is not what it held."""
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
