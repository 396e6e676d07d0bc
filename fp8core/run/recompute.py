"""Bring the trainer to a version of the policy, and make damaged artifacts of steps again on the way.

Version n is the policy after step n. The trainer goes back by a checkpoint (`load_state`) and forward by redone
updates, whose outputs are compared with the ledger. Outputs that differ stop an exact run (`RedoError`). A tolerant
run, or other code, enters them in the ledger as a redo, and later steps start from them (`effective_outputs`).
"""

from collections.abc import Callable, Mapping, Sequence, Set

import pyarrow as pa
import torch
from torch import Tensor

from fp8core.alignment.bounds import unverifiable
from fp8core.config.step_graph import PlannedStep
from fp8core.config.steps import import_step
from fp8core.errors import StoredFileError
from fp8core.rl.batch import TokenBatch, drawn_rows
from fp8core.run.checkpoint import load_state
from fp8core.run.context import RunContext
from fp8core.run.execute import attempt, carried, code_of, stored_manifest
from fp8core.run.policy import keep_policy, push
from fp8core.run.rollouts import shards_of
from fp8core.run.scoring import read_scales
from fp8core.store.artifacts import ArtifactError, Ref
from fp8core.store.ledger import START, RedoEntry
from fp8core.training.trainer import ScoringTrainer


class RedoError(RuntimeError):
    """A redone update did not give the weights that the ledger names."""


def rewind_to(run: RunContext, version: int) -> None:
    if run.ready_trainer().version > version:
        load_state(run, version)
    for index in range(run.ready_trainer().version + 1, version + 1):
        stored = run.directory.ledger.tasks(index)
        for planned in run.graph.steps:
            if planned.spec.redo and planned.name in stored:
                _redo(run, index, planned)


def rewind_from_newest_checkpoint(run: RunContext, version: int) -> None:
    """`rewind_to`, by a checkpoint even where updates alone would do: redone, they may give another policy."""
    begun, directory = run.ready_trainer().version, run.directory
    passed = (entry for entry in directory.ledger.last_checkpoints() if begun < entry.step <= version)
    if any(directory.checkpoint(entry).is_dir() for entry in passed):
        load_state(run, version)
    rewind_to(run, version)


def rewind_with_engine(run: RunContext, version: int) -> None:
    """`rewind_to`, and the engine too where its scales are stored."""
    rewind_to(run, version)
    first = carried(run, START + 1)["scales"] if version == START else None
    scales = first or run.directory.ledger.effective_outputs(version).get(run.graph.carries["scales"])
    if scales is not None:
        push(run, read_scales(run, scales))


def redo_step(run: RunContext, index: int, tasks: list[PlannedStep]) -> None:
    """Redo the updates among the finished tasks of a step, and recompute the tasks with damaged outputs."""
    for planned in tasks:
        if planned.spec.redo:
            rewind_to(run, index)
        elif _damaged_outputs(run, index, planned):
            _recompute(run, index, planned)


def first_damaged_step(run: RunContext, since: int) -> int | None:
    """The first iteration with a damaged artifact that a resume reads: any from step `since` on, metrics before."""
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
    if index in (run.replayed or ledger).removed():
        read = {name: ref for name, ref in read.items() if run.directory.store.path(ref).exists()}
    return damages(run, read)


def _redo(run: RunContext, index: int, planned: PlannedStep) -> None:
    expected = _stored_outputs(run, index, planned)
    made = _run_again(run, index, planned.name, expected, _body(run, index, planned))
    differing = next((name for name, ref in expected.items() if made[name].digest != ref.digest), None)
    if differing is not None:
        text = (
            f"step {index}, task {planned.name}: redoing it gave {differing} {made[differing].digest[:16]}, "
            f"the ledger says {expected[differing].digest[:16]}"
        )
        _differs(run, index, planned.name, made, text)


def _differs(run: RunContext, index: int, task: str, outputs: dict[str, Ref], text: str) -> None:
    """Enter outputs that differ in the ledger; the run goes on from them.
    Raises RedoError, with `text`: an exact run redid what its own code made."""
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
        # The shards of the open step are of the policy that is replaced.
        shards_of(run, max(ledger.steps()) + 1).clear()
        ledger.append(redo)
    other = "" if made_by == run.code_version else f"; code version {made_by[:12]} made it, this is other code"
    run.console.note(f"{text}{other}: the run goes on from the new policy and is inexact")


def _recompute(run: RunContext, index: int, planned: PlannedStep) -> None:
    """Run a task with damaged outputs again, by the newest policy among its inputs."""
    inputs, store, version = _inputs(run, index, planned), run.directory.store, run.ready_trainer().version
    read = max((store.get_json(ref)["version"] for ref in inputs.values() if ref.kind == "policy"), default=None)
    if read is not None:
        rewind_to(run, read)
    for ref in inputs.values():
        if ref.kind == "scales" and read is not None and store.get_json(ref)["version"] == read:
            push(run, read_scales(run, ref))
    recompute_damaged(run, index, planned.name, _stored_outputs(run, index, planned), _body(run, index, planned))
    rewind_to(run, version)
    if run.directory.ledger.step(index) is not None:
        shards_of(run, index).clear()


def _body(run: RunContext, index: int, planned: PlannedStep) -> Callable[[], dict[str, Ref]]:
    def body() -> dict[str, Ref]:
        inputs = _inputs(run, index, planned)
        made: dict[str, Ref] = import_step(planned.uses)(run, index, planned.options, **inputs)
        return {planned.outputs[port]: ref for port, ref in made.items()}

    return body


def _stored_outputs(run: RunContext, index: int, planned: PlannedStep) -> dict[str, Ref]:
    """The stored outputs of a finished task; for an update that was redone, those of its redo."""
    ledger = run.directory.ledger
    stored = ledger.effective_outputs(index) if planned.spec.redo else ledger.artifacts(index)
    return {artifact: stored[artifact] for artifact in planned.outputs.values() if artifact in stored}


def _inputs(run: RunContext, index: int, planned: PlannedStep) -> dict[str, Ref]:
    """Of its own step a task reads what was stored then, even where a redo gave something else to those after it."""
    before, own = carried(run, index), run.directory.ledger.artifacts(index)
    return {port: (before if name in run.graph.carries else own)[name] for port, name in planned.inputs.items()}


def producer_of(run: RunContext, artifact: str) -> PlannedStep:
    return next(planned for planned in run.graph.steps if artifact in planned.outputs.values())


def recompute_damaged(
    run: RunContext, index: int, task: str, expected: Mapping[str, Ref], body: Callable[[], dict[str, Ref]]
) -> None:
    """Run a finished task again where one of its files is damaged. Raises StoredFileError: it comes out otherwise."""
    if not damages(run, expected):
        return
    made = _run_again(run, index, task, expected, body)
    for name, error in damages(run, expected).items():
        raise StoredFileError(
            f"step {index}: artifact {name} is damaged and cannot be restored: {error}; running {task} again gave "
            f"{made[name].digest}, the ledger says {expected[name].digest}"
        )


def _run_again(
    run: RunContext, index: int, task: str, expected: Mapping[str, Ref], body: Callable[[], dict[str, Ref]]
) -> dict[str, Ref]:
    """The outputs of a finished task, made again: storing those that are equal replaces damaged files."""
    damaged = damages(run, expected)
    made = attempt(f"step {index}, task {task}", body)
    for name, error in damaged.items():
        if made[name].digest == expected[name].digest:
            run.console.note(f"step {index}: artifact {name} was damaged ({error}); made again by {task}, equal")
    return made


def damages(run: RunContext, refs: Mapping[str, Ref]) -> dict[str, ArtifactError]:
    found = {name: run.directory.store.damage(ref) for name, ref in refs.items()}
    return {name: error for name, error in found.items() if error is not None}


def behaviour_logprobs(run: RunContext, batch: TokenBatch, versions: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of every token of completions under the version that wrote it, FP32 [B, longest].

    The trainer holds its version again afterwards. `versions`: int64 [B, longest], -1 where there is no token."""
    # One that is made again may leave the run another trainer, and another copy of those before it.
    needed = sorted(set(versions[versions >= 0].tolist()))
    run.sleep_engine()
    rebuild_kept_policies(run, needed)
    policies = {version: run.kept_policies[version] for version in needed}
    trainer, found = run.ready_trainer(), (torch.zeros(versions.shape), torch.zeros(versions.shape))
    assert isinstance(trainer, ScoringTrainer), "the configuration was checked"
    for version, policy in policies.items():
        rows = (versions == version).any(dim=1).nonzero()[:, 0]
        chosen = TokenBatch(batch.tokens[rows], batch.valid[rows], batch.completion[rows])
        scored = trainer.logprobs_of(policy.tensors, chosen, run.config.rollout.temperature, policy.scales.layers)
        for into, part in zip(found, (scored.logprobs, scored.entropy), strict=True):
            longest = part.shape[1]
            written = versions[rows, :longest] == version
            into[rows, :longest] = torch.where(written, part, into[rows, :longest])
    return found


def verified_rows(run: RunContext, index: int, written: Tensor) -> list[int]:
    return drawn_rows(written, run.config.pipeline.verified_share, f"behaviour/{run.config.seed}/{index}")


def rebuild_kept_policies(run: RunContext, versions: Sequence[int]) -> None:
    """Keep policies that the engine held (ascending versions), rebuilt from checkpoints and redone updates.

    The trainer returns to its version, and the engine gets that. Raises RedoError: an update gave another policy."""
    missing, held = [version for version in versions if version not in run.kept_policies], run.ready_trainer().version
    if not missing:
        return
    replaced = list[int]()
    try:
        for version in missing:
            scales = carried(run, version + 1)["scales"]
            rewind_from_newest_checkpoint(run, version)
            if run.replayed is None and is_replaced(run, version):
                # The later ones follow from it: they are rebuilt too, to find which of them differ.
                replaced.append(version)
                continue
            keep_policy(run, run.ready_trainer().export(), read_scales(run, scales))
    except RedoError:
        # A tolerant run goes on. Where a process was lost, nothing is left that could go anywhere.
        rewind_from_newest_checkpoint(run, held)
        raise
    rewind_from_newest_checkpoint(run, held)
    # An update that lacks its rollouts has them generated again, by the engine with an older policy.
    rewind_with_engine(run, held)
    run.sleep_engine()
    if replaced:
        raise RedoError(
            f"policy {replaced[0]} wrote tokens of this step, and was not had again bit for bit; resume the run: its "
            "completions in flight begin anew then"
        )


def versions_in_flight(run: RunContext, index: int) -> list[int]:
    """The policies that wrote tokens of the stream that iteration `index` starts from."""
    if "stream" not in run.graph.carries:
        return []
    return versions_of(run.directory.store.get_table(carried(run, index)["stream"]))


def versions_of(stream: pa.Table) -> list[int]:
    return sorted({version for row in stream["versions"].to_pylist() for version in row})


def is_replaced(run: RunContext, version: int) -> bool:
    """True if the run has another policy of this version now than the one that wrote beside the update after it."""
    if run.directory.ledger.step(version + 1) is None or unverifiable(run.config) is not None:
        return False
    writer = producer_of(run, run.graph.carries["stream"]).name
    wrote = stored_manifest(run, version + 1).record.inputs[writer]["policy"]
    return wrote.digest != carried(run, version + 1)["policy"].digest
