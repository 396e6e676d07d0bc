"""Make steps of a run again, from its artifacts alone, and compare their records with the stored ones."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Literal

from fp8core.config.load import config_digest, numeric_differences
from fp8core.config.run import RunConfig, public_dump
from fp8core.errors import UserError, lost_process
from fp8core.report.console import Console
from fp8core.run.checks.settings import graph_of
from fp8core.run.commit import stored_manifest, stored_metrics
from fp8core.run.context import RunContext
from fp8core.run.execute import carried
from fp8core.run.loop import begin, iterate
from fp8core.run.recompute import RedoError
from fp8core.run.snapshot import FAILURES, RunSnapshot, restore_as_it_was, scratch_folder, scratch_run
from fp8core.store.artifacts import ArtifactError, ArtifactStore, Ref
from fp8core.store.diff import causes, content_difference, first_difference, metric_differences
from fp8core.store.json_text import Difference, shown, value_differences
from fp8core.store.ledger import START, LedgerView
from fp8core.store.manifest import StepManifest, StepRecord, current_code, hardware, library_versions
from fp8core.store.run_directory import RunDirectory
from fp8core.store.step_manifests import restore_manifest


@dataclass(frozen=True)
class ReplayResult:
    """The comparison of a step's replay with the stored step.

    Attributes:
        outcome: `equal` in every digest, `within` the bounds of a tolerant run, or `different`.
        level: the replay level that counted.
        seconds: what it took, without restoring the policy before.
        causes: circumstances that differ, one line each.
        difference: the first field that differs, then where its content does.
        asked_again: answers that environments gave anew; 0 where the recorded ones were taken.
    """

    step: int
    outcome: Literal["equal", "within", "different"]
    level: str
    artifacts: int
    seconds: float
    causes: tuple[str, ...] = ()
    difference: tuple[str, ...] = ()
    asked_again: int = 0


def replay(
    original: RunSnapshot,
    steps: range,
    overrides: Sequence[str],
    console: Console,
    repaired: RunDirectory | None,
    *,
    rerun_environments: bool = False,
) -> Iterator[ReplayResult]:
    """Replay consecutive steps and yield a verdict each; the first that is different is the last.

    Args:
        steps: numbers of committed steps.
        overrides: settings (`key=value`) that the steps are replayed under instead of the run's own; the policy that
            they start from is the run's own.
        repaired: the run's folder, locked by the caller; damaged files of it that were made again are put back.
        rerun_environments: ask environments again, instead of taking their recorded answers.

    Raises:
        UserError: a step is not committed, what it needs was removed or cannot be restored, an override is wrong, or a
            process of a cluster was lost.
    """
    for step in steps:
        original.refuse_unknown(step)
    own, changed = (original.config(steps[0], settings) for settings in ((), overrides))
    if changed.cluster.address != own.cluster.address:
        # The run's own one may be gone.
        own = own.model_copy(update={"cluster": changed.cluster})
    if rerun_environments and changed.environment is None:
        raise UserError(f"--rerun-environments: run {original.folder.name} has no environment")
    _refuse_other_model(own, changed, steps)
    _refuse_other_stream(own, changed, steps)
    if not rerun_environments:
        _refuse_unasked(own, changed)
    if steps[0] > START:
        # The first step may score tokens of policies that are as old as this.
        original.refuse_removed(steps[0] - 1, max(0, own.pipeline.reach - 1))
    with scratch_folder(original.folder, steps[0], own, changed) as folder:
        try:
            if overrides and steps[0] > START + 1:
                restore_as_it_was(own, original, folder, steps[0] - 1, console)
            recorded = None if rerun_environments else original.environment(steps[0])
            with scratch_run(changed, original.folder, folder, console, recorded) as run:
                yield from _replayed(original, run, steps, overrides)
        except (RedoError, *FAILURES) as error:
            yield _failed(original, changed, steps[0], "on the way to this step", error)
        finally:
            if repaired is not None:
                put_back(repaired, folder, steps, console)


def put_back(original: RunDirectory, scratch: Path, steps: range, console: Console) -> None:
    """Replace damaged artifacts of a run by what a replay made, and damaged manifests by their second copies."""
    made = ArtifactStore(scratch)
    removed = original.ledger.removed()
    for index in range(steps.stop):
        for name, ref in original.ledger.outputs(index):
            if index in removed and not original.store.path(ref).exists():
                continue  # `artifacts.keep` does not keep it.
            if made.path(ref).exists() and (damage := original.store.damage(ref)) is not None:
                original.store.put_back(ref, made)
                console.note(f"step {index}: artifact {name} was damaged ({damage}); put back")
    for entry in original.ledger.steps().values():
        if restore_manifest(original.store, original.path, entry):
            console.note(f"step {entry.step}: the manifest was damaged; put back from its second copy")


def _replayed(original: RunSnapshot, run: RunContext, steps: range, overrides: Sequence[str]) -> Iterator[ReplayResult]:
    began = time.perf_counter()
    begin(run)
    for index in steps:
        if index > START:
            began, asked = time.perf_counter(), original.config(index, overrides)
            run.config = run.config.model_copy(update={"steps": asked.steps, "replay": asked.replay})
            try:
                iterate(run, index, carried(run, index))
            except FAILURES as error:
                failed = _failed(original, run.config, index, "the replay fails", error)
                yield replace(failed, causes=(*_went_on(original, index, steps[0]), *failed.causes))
                return
        verdict = replace(_compare(original, run, index, time.perf_counter() - began), asked_again=_answers(run, index))
        if verdict.outcome == "different":
            verdict = replace(verdict, causes=(*_went_on(original, index, steps[0]), *verdict.causes))
        yield verdict
        if verdict.outcome == "different":
            return


def _went_on(original: RunSnapshot, index: int, first: int) -> Iterator[str]:
    """Lines about results that the run went on from, and a replay from `first` has not."""
    if index > first and original.ledger.redone(index - 1):
        yield f"the run went on from another outcome of step {index - 1}, which was redone: replay from {index}"
    stored = original.ledger.artifacts(index)
    redone = (redo for redo in original.ledger.redone(index).values() if not redo.gave_policy)
    # Between two tasks of the step: its record has the stream that they left.
    if any(stored.get(name) == ref for redo in redone for name, ref in redo.outputs.items()):
        yield f"episodes began anew within step {index}: after a restart an environment answered otherwise"


def _answers(run: RunContext, index: int) -> int:
    """Answers of environments in a step, its evaluation's among them; 0 where they are recorded ones."""
    if run.environment is None:
        return 0
    played = [ref for ref in run.directory.ledger.artifacts(index).values() if ref.kind == "turns"]
    return sum(run.directory.store.get_table(ref).num_rows for ref in played)


def _compare(original: RunSnapshot, run: RunContext, index: int, seconds: float) -> ReplayResult:
    stored, ours = original.manifest(index), stored_manifest(run, index)
    difference = first_difference(stored.record, ours.record, [planned.name for planned in run.graph.steps])
    level, made = run.config.replay.level, sum(len(outputs) for outputs in ours.record.outputs.values())
    why = tuple(_causes(original, run.config, stored.record, ours.record))
    if difference is None:
        return ReplayResult(index, "equal", level, made, seconds, why)
    why += tuple(_other_hardware(stored))
    if level == "tolerant":
        outcome, text = _tolerated(original, run, index)
        return ReplayResult(index, outcome, level, made, seconds, why, text)
    return ReplayResult(index, "different", level, made, seconds, why, _located(original, run, index, difference))


def _tolerated(
    original: RunSnapshot, run: RunContext, index: int
) -> tuple[Literal["within", "different"], tuple[str, ...]]:
    bounds = run.config.replay
    ours = stored_metrics(run.directory.ledger, run.directory.store, index)
    theirs = stored_metrics(original.ledger, original.store, index)
    beyond = metric_differences(theirs, ours, bounds.relative, bounds.absolute)
    if beyond:
        return "different", (f"{beyond[0]}, beyond replay.relative={bounds.relative}, absolute={bounds.absolute}",)
    largest = max(metric_differences(theirs, ours), key=lambda metric: metric.by or 0.0, default=None)
    return "within", (() if largest is None else (str(largest),))


def _located(original: RunSnapshot, run: RunContext, index: int, difference: Difference) -> tuple[str, ...]:
    theirs, ours = (
        _by_digest(ledger, index).get(value["digest"]) if isinstance(value, dict) and "digest" in value else None
        for ledger, value in (
            (original.ledger, difference.ours),
            (run.directory.ledger, difference.theirs),
        )
    )
    if theirs is None or ours is None:
        return (str(difference),)
    try:
        inside = content_difference(original.store, theirs, run.directory.store, ours)
    except ArtifactError as error:
        inside = str(error)
    return (str(difference),) if inside is None else (str(difference), inside)


def _by_digest(ledger: LedgerView, index: int) -> dict[object, Ref]:
    before = ledger.effective_outputs(index - 1) if index > START else {}
    return {ref.digest: ref for ref in (*before.values(), *ledger.artifacts(index).values())}


def _failed(original: RunSnapshot, config: RunConfig, step: int, where: str, error: Exception) -> ReplayResult:
    """Of a step that no record came of. Raises UserError: a process was lost, which is no result of a step."""
    if (lost := lost_process(error)) is not None:
        raise UserError(f"nothing was compared, as a process was lost: {lost}") from error
    stored = original.manifest(step)
    now = stored.record.model_copy(
        update={
            "config_digest": config_digest(config),
            "code_version": current_code(),
            "precision": config.precision.model_dump(mode="json"),
            "versions": library_versions(),
        }
    )
    why = (*_causes(original, config, stored.record, now), *_other_hardware(stored))
    return ReplayResult(step, "different", config.replay.level, 0, 0.0, why, (f"{where}: {error}",))


def _causes(original: RunSnapshot, config: RunConfig, stored: StepRecord, now: StepRecord) -> Iterator[str]:
    fields = defaultdict[str, list[Difference]](list)
    for difference in causes(stored, now):
        fields[difference.path.partition(".")[0]].append(difference)
    for field, differing in fields.items():
        changes = ", ".join(difference.change(field) for difference in differing)
        match field:
            case "code_version":
                yield f"code version differs: made by {shown(differing[0].ours)}, this is {shown(differing[0].theirs)}"
            case "config_digest":
                keys = numeric_differences(original.described.config, public_dump(config))
                if others := [key for key in keys if not key.startswith("precision.")]:
                    yield f"configuration differs: {'; '.join(others)}"
            case "versions":
                yield f"library versions differ: {changes}"
            case "executed" if "precision" in fields:
                pass  # The same said by engine and trainer.
            case _:
                yield f"{field.replace('_', ' ')} differs: {changes}"


def _other_hardware(stored: StepManifest) -> Iterator[str]:
    """Even exact numbers are promised for one family of processors only."""
    machine = list(value_differences("hardware", stored.observed.hardware, hardware()))
    if machine:
        yield f"hardware differs: {', '.join(difference.change('hardware') for difference in machine)}"


def _refuse_other_model(own: RunConfig, changed: RunConfig, steps: range) -> None:
    """The policy that a step starts from fits the run's own model only."""
    for key in ("model", "revision", "architecture"):
        if steps[0] > START and getattr(own, key) != getattr(changed, key):
            raise UserError(f"--set {key}: step {steps[0]} starts from a policy of the run's own model")
    if steps[0] > START + 1 and {*graph_of(own).carries} != {*graph_of(changed).carries}:
        raise UserError(f"--set pipeline: step {steps[0]} starts from what the run's own pipeline hands on")


def _refuse_unasked(own: RunConfig, changed: RunConfig) -> None:
    """Settings of an environment that answers nothing, since its recorded answers are taken."""
    if own.environment != changed.environment and None not in (own.environment, changed.environment):
        raise UserError(
            "--set environment: no environment is asked, since its recorded answers are taken; add --rerun-environments"
        )


_OF_STREAM = (
    *("seed", "environment", "data.max_prompt_tokens"),
    *(f"pipeline.{name}" for name in ("mode", "max_staleness")),
    *(f"rollout.{name}" for name in ("max_new_tokens", "prompts_per_step", "oversample", "group_size")),
)


def _refuse_other_stream(own: RunConfig, changed: RunConfig, steps: range) -> None:
    """The completions in flight that a step goes on from fit the run's own settings of generation only."""
    if steps[0] <= START + 1 or "stream" not in graph_of(own).carries:
        return
    for key in _OF_STREAM:
        if reduce(getattr, key.split("."), own) != reduce(getattr, key.split("."), changed):
            raise UserError(f"--set {key}: step {steps[0]} goes on from completions begun under the run's own settings")
