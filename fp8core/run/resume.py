"""Return trainer and engine to where a ledger ends, or to an earlier version of the policy.

Version n is the policy after step n. The trainer goes back by a checkpoint (`load_state`) and forward by redone
updates, whose outputs are compared with the ledger. Outputs that differ stop an exact run (`RedoError`). A tolerant
run, or other code, enters them in the ledger as a redo, and later steps start from them (`effective_outputs`).
"""

from collections.abc import Sequence

import torch
from pydantic import JsonValue
from torch import Tensor

from fp8core.alignment.bounds import unverifiable
from fp8core.config.step_graph import PlannedStep
from fp8core.config.steps import import_step
from fp8core.rl.batch import TokenBatch, sampled_rows
from fp8core.run.batches import read_scales
from fp8core.run.checkpoint import load_state
from fp8core.run.context import RunContext, StepContext
from fp8core.run.execute import carried_artifacts, code_of, finished_steps, intact, stored_manifest, task_errors
from fp8core.run.policy import keep_policy, push
from fp8core.run.stream import stream_rows, stream_table
from fp8core.store.artifacts import Ref
from fp8core.store.json_text import value_differences
from fp8core.store.ledger import START, RedoEntry
from fp8core.store.manifest import StepRecord, library_versions
from fp8core.training.trainer import ScoringTrainer


class RedoError(RuntimeError):
    """A redone task did not give what the ledger names."""


def restore(run: RunContext) -> int:
    """Returns how many updates were redone. Raises RedoError: a task came out otherwise in an exact run."""
    ledger = run.directory.ledger
    last = ledger.last_step()
    assert last is not None, "step 0 is committed before anything is restored"
    _tell_changes(run, last, stored_manifest(run, last).record)
    damaged_step = next(
        (step for step in range(_first_step_read(run, last), last + 1) if not _is_intact(run, step)), None
    )
    load_state(run, last if damaged_step is None else damaged_step - 1)
    first = run.trainer.version
    ledger.check_no_gap(first, last)
    rewind_to(run, last if damaged_step is None else damaged_step - 1)
    for index in () if damaged_step is None else range(damaged_step, last + 1):
        _make_again(run, index)
    if run.replayed is None and "stream" in run.graph.carries:
        _restart_completions_of_lost_policies(run, last)
    for planned in run.graph.steps:
        # Asked anew each time: an update that gave something else undoes what was made from the old policy.
        if planned.spec.redo and planned in finished_steps(run, last + 1, carried_artifacts(run, last + 1)):
            rewind_to(run, last + 1)
    version = run.trainer.version
    if version > last and _generates(run, last + 1):
        # The old policy writes the tokens that are missing, although its update is over.
        rewind_with_engine(run, last)
        rewind_to(run, version)
    else:
        rewind_with_engine(run, version)
    return run.trainer.version - first


def rewind_to(run: RunContext, version: int) -> None:
    if run.trainer.version > version:
        load_state(run, version)
    for index in range(run.trainer.version + 1, version + 1):
        entries = run.directory.ledger.tasks(index)
        for planned in run.graph.steps:
            if planned.spec.redo and planned.name in entries:
                _redo(run, index, planned)


def rewind_with_engine(run: RunContext, version: int) -> None:
    rewind_to(run, version)
    first = carried_artifacts(run, START + 1)["scales"] if version == START else None
    scales = first or run.directory.ledger.effective_outputs(version).get(run.graph.carries["scales"])
    # Where those of a step that was cut are damaged, its tasks make and push them again.
    if scales is not None and run.store.is_intact(scales):
        push(run, read_scales(run, scales))


def _first_step_read(run: RunContext, last: int) -> int:
    newest = last - run.config.pipeline.reach
    folders = ((entry.step, run.directory.checkpoint(entry)) for entry in run.directory.ledger.last_checkpoints())
    return max(START + 1, next((step for step, folder in folders if step <= newest and folder.is_dir()), START + 1))


def _is_intact(run: RunContext, index: int) -> bool:
    ledger = run.directory.ledger
    return index in (run.replayed or ledger).removed_steps() or intact(run, ledger.effective_outputs(index))


def _make_again(run: RunContext, index: int) -> None:
    rewind_with_engine(run, index - 1)
    for planned in run.graph.steps:
        _redo(run, index, planned)
    run.store.shards(index).clear()
    run.console.note(f"step {index}: artifacts were damaged; all of its tasks ran again")


def _redo(run: RunContext, index: int, planned: PlannedStep) -> None:
    """Run a finished task again. Raises RedoError: an exact run redid otherwise what its own code made."""
    ledger = run.directory.ledger
    before = carried_artifacts(run, index)
    # Of its own step a task reads what was stored then, even where a redo gave something else to those after it.
    own = ledger.artifacts(index)
    inputs = {port: (before if name in before else own)[name] for port, name in planned.inputs.items()}
    outputs = ledger.effective_outputs(index) if planned.spec.redo else own
    expected = {name: outputs[name] for name in planned.outputs.values() if name in outputs}

    with task_errors(index, planned.name):
        ports: dict[str, Ref] = import_step(planned.uses)(run, index, planned.options, **inputs)
    remade = {planned.outputs[port]: ref for port, ref in ports.items()}
    # Of many steps that are redone, no commit would let them go.
    run.store.forget_tables()
    differing = next((name for name, ref in expected.items() if remade[name].digest != ref.digest), None)
    if differing is None:
        return
    text = (
        f"step {index}, task {planned.name}: redoing it gave {differing} {remade[differing].digest[:16]}, "
        f"the ledger says {expected[differing].digest[:16]}"
    )
    redone = ledger.redone(index).get(planned.name)
    made_by = redone.code_version if redone is not None else code_of(run, index)
    if run.config.replay.level != "tolerant" and made_by == run.code_version:
        raise RedoError(text)
    redo = RedoEntry(step=index, task=planned.name, outputs=remade, code_version=run.code_version)
    if ledger.step(index) is None:
        # Its later tasks have yet to run, and are to find this policy. A kill leaves both lines or none.
        ledger.append(ledger.tasks(index)[planned.name].model_copy(update={"outputs": remade}), redo)
    else:
        # The shards of the open step are of the policy that is replaced.
        run.store.shards(max(ledger.steps()) + 1).clear()
        ledger.append(redo)
    other = "" if made_by == run.code_version else f"; code version {made_by[:12]} made it, this is other code"
    run.console.note(f"{text}{other}: the run goes on from the new policy and is inexact")


def _generates(run: RunContext, index: int) -> bool:
    start = carried_artifacts(run, index)
    steps = finished_steps(run, index, start)
    if any("sync_report" in each.spec.outputs.values() for each in steps):
        return False
    if run.config.pipeline.ahead_tokens == 0:
        # In turn, the engine sleeps beside the update.
        steps = [*steps, _stream_writer(run)]
    return any({"policy", "scales"} <= set(each.inputs.values()) for each in run.graph.steps if each not in steps)


def _stream_writer(run: RunContext) -> PlannedStep:
    return next(each for each in run.graph.steps if run.graph.carries["stream"] in each.outputs.values())


def _restart_completions_of_lost_policies(run: RunContext, last: int) -> None:
    """Restart completions in flight whose policy was replaced or is of other code: no pass would score their tokens."""
    store = run.store
    artifact = run.graph.carries["stream"]
    stream = carried_artifacts(run, last + 1)["stream"]
    table = store.get_table(stream)
    same_code = code_of(run, last) == run.code_version
    versions = {version for row in table["versions"].to_pylist() for version in row}
    lost_versions = {each for each in versions if not same_code or _is_replaced(run, each)}
    rows = stream_rows(table)
    restarted_rows = [row.anew() if lost_versions.intersection(row.versions) else row for row in rows]
    new_stream = store.put_table("stream", stream_table(restarted_rows, table.schema))
    if new_stream == stream:
        return
    # They go on from what begins anew.
    run.store.shards(last + 1).clear()
    task = _stream_writer(run).name
    redo = RedoEntry(step=last, task=task, outputs={artifact: new_stream}, code_version=run.code_version)
    run.directory.ledger.append(redo)
    policies = ", ".join(map(str, sorted(lost_versions)))
    run.console.note(
        f"step {last + 1}: completions begin anew whose policy ({policies}) was replaced or is of other code"
    )


def _tell_changes(run: RunContext, last: int, before: StepRecord) -> None:
    now: dict[str, JsonValue] = {"environment": {**run.environment_description}, "reward": run.verifier.describe()}
    verifiers = dict.fromkeys(setting.partition("=")[0] for setting in run.config.verifier_settings.values())
    settings = {"environment": "environment.name", "reward": ", ".join(verifiers)}
    for part, description in now.items():
        if before.executed.get(part, {}) != description:
            run.console.note(f"{settings[part]}: its code or libraries are others than at step {last}")
    libraries = value_differences("", {**before.versions}, {**library_versions()})
    if changes := ", ".join(each.change("") for each in libraries):
        run.console.note(f"libraries differ from those of step {last}: {changes}; steps redone may differ")


def behaviour_logprobs(run: StepContext, batch: TokenBatch, versions: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of every token of completions under the version that wrote it, FP32 [B, longest].

    The trainer holds its version again afterwards. `versions`: int64 [B, longest], -1 where there is no token."""
    # One that is made again may leave the run another trainer, and another copy of those before it.
    policy_versions = sorted(set(versions[versions >= 0].tolist()))
    run.sleep_engine()
    run.rebuild_policies(policy_versions)
    policies = {version: run.workers.policy_versions[version] for version in policy_versions}
    trainer = run.trainer
    scores = (torch.zeros(versions.shape), torch.zeros(versions.shape))
    assert isinstance(trainer, ScoringTrainer), "the configuration was checked"
    for version, policy in policies.items():
        rows = (versions == version).any(dim=1).nonzero()[:, 0]
        score = trainer.logprobs_of(
            policy.tensors, batch.part(rows.tolist()), run.config.rollout.temperature, policy.scales.layers
        )
        for into, part in zip(scores, (score.logprobs, score.entropy), strict=True):
            longest = part.shape[1]
            of_version = versions[rows, :longest] == version
            into[rows, :longest] = torch.where(of_version, part, into[rows, :longest])
    return scores


def verified_rows(run: StepContext, index: int, policy_mask: Tensor) -> list[int]:
    return sampled_rows(policy_mask, run.config.pipeline.verified_share, f"behaviour/{run.config.seed}/{index}")


def rebuild_policies(run: RunContext, versions: Sequence[int]) -> None:
    """`versions`: ascending. Raises RedoError: an update gave another policy."""
    missing = [version for version in versions if version not in run.workers.policy_versions]
    newest = run.trainer.version
    if not missing:
        return
    for version in missing:
        scales = carried_artifacts(run, version + 1)["scales"]
        rewind_to(run, version)
        if run.replayed is None and _is_replaced(run, version):
            raise RedoError(
                f"policy {version} wrote tokens of this step, and was not had again bit for bit; resume the run: its "
                "completions in flight begin anew then"
            )
        keep_policy(run, run.trainer.export(), read_scales(run, scales))
    rewind_with_engine(run, newest)
    run.sleep_engine()


def _is_replaced(run: RunContext, version: int) -> bool:
    """True if the run has another policy of this version now than the one that wrote beside the update after it."""
    if run.directory.ledger.step(version + 1) is None or unverifiable(run.config) is not None:
        return False
    wrote = stored_manifest(run, version + 1).record.inputs[_stream_writer(run).name]["policy"]
    return wrote.digest != carried_artifacts(run, version + 1)["policy"].digest
