"""Make steps of a run again, from its artifacts alone, and compare their records with the stored ones."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fp8core.config.load import config_digest, numeric_differences
from fp8core.config.run import RunConfig, public_dump
from fp8core.errors import UserError
from fp8core.report.console import Console
from fp8core.store.artifacts import ArtifactError, ArtifactStore, Ref
from fp8core.store.content_difference import content_difference
from fp8core.store.difference import Difference, causes, first_difference, metric_differences, shown, value_differences
from fp8core.store.ledger import START, LedgerView
from fp8core.store.manifest import StepManifest, StepRecord
from fp8core.store.run_directory import RunDirectory
from fp8core.store.versions import hardware, library_versions
from fp8core.training.trainer import NotFiniteError
from fp8core.workers.live import LiveRun
from tasks.commit import stored_metrics
from tasks.execute import StepError
from tasks.loop import begin, iterate
from tasks.opening import current_code
from tasks.repair import read_manifest, stored_manifest
from tasks.restore import RedoError, carried
from tasks.scratch import Original, restore_as_it_was, scratch_folder, scratch_run
from tasks.sync import SyncError

FAILURES = (StepError, NotFiniteError, SyncError)
"""What a step that was committed once can fail with when it is made again: other code, libraries or settings."""


@dataclass(frozen=True)
class Verdict:
    """How the replay of a step compares with the stored step.

    Attributes:
        step: its number.
        outcome: `equal` in every digest, `within` the bounds of a tolerant run, or `different`.
        level: the replay level that counted.
        artifacts: how many artifacts the replay made.
        seconds: what it took, without restoring the policy before.
        causes: circumstances that differ, one line each.
        difference: the first field that differs, then where its content does.
    """

    step: int
    outcome: Literal["equal", "within", "different"]
    level: str
    artifacts: int
    seconds: float
    causes: tuple[str, ...] = ()
    difference: tuple[str, ...] = ()


def replay(
    original: Original, steps: range, overrides: Sequence[str], console: Console, repaired: RunDirectory | None
) -> Iterator[Verdict]:
    """Replay consecutive steps and yield a verdict each; the first that is different is the last.

    Args:
        original: the run.
        steps: numbers of committed steps.
        overrides: settings (`key=value`) that the steps are replayed under instead of the run's own; the policy that
            they start from is the run's own.
        console: takes notes on the way.
        repaired: the run's folder, locked by the caller; damaged files of it that were made again are put back.

    Raises:
        UserError: a step is not committed, what it needs was removed or cannot be restored, or an override is wrong.
    """
    for step in steps:
        original.refuse_unknown(step)
    own, changed = (original.config(steps[0], settings) for settings in ((), overrides))
    _refuse_other_model(own, changed, steps)
    if steps[0] > START:
        original.refuse_removed(own, steps[0] - 1)
    with scratch_folder(original.folder, steps[0]) as folder:
        try:
            if overrides and steps[0] > START + 1:
                restore_as_it_was(own, original.folder, folder, steps[0] - 1, console)
            with scratch_run(changed, original.folder, folder, console) as run:
                yield from _replayed(original, run, steps, overrides)
        except (RedoError, *FAILURES) as error:
            yield _failed(original, changed, steps[0], f"on the way to this step: {error}")
        finally:
            if repaired is not None:
                put_back(repaired, folder, steps, console)


def put_back(original: RunDirectory, scratch: Path, steps: range, console: Console) -> None:
    """Replace damaged artifacts of a run by what a replay made, and damaged manifests by their second copies."""
    made = ArtifactStore(scratch)
    for index in range(steps.stop):
        for name, ref in original.ledger.handed_over(index).items():
            if made.path(ref).exists() and (damage := original.store.damage(ref)) is not None:
                original.store.put_back(ref, made)
                console.note(f"step {index}: artifact {name} was damaged ({damage}); put back")
    for index in steps:
        entry = original.ledger.steps()[index]
        if (damage := original.store.damage(entry.manifest)) is not None:
            manifest = read_manifest(original.store, original.path, entry)
            original.store.put_json(entry.manifest.kind, manifest.model_dump(mode="json"))
            console.note(f"step {index}: the manifest was damaged ({damage}); put back from its second copy")


def _replayed(original: Original, run: LiveRun, steps: range, overrides: Sequence[str]) -> Iterator[Verdict]:
    began = time.perf_counter()
    begin(run)
    for index in steps:
        if index > START:
            began, asked = time.perf_counter(), original.config(index, overrides)
            run.config = run.config.model_copy(update={"steps": asked.steps, "replay": asked.replay})
            try:
                iterate(run, index, carried(run, index))
            except FAILURES as error:
                yield _failed(original, run.config, index, f"the replay fails: {error}")
                return
        verdict = _compare(original, run, index, time.perf_counter() - began)
        if verdict.outcome == "different" and index > steps[0] and original.ledger.redone(index - 1):
            left = f"the run went on from another outcome of step {index - 1}, which was redone: replay from {index}"
            verdict = replace(verdict, causes=(left, *verdict.causes))
        yield verdict
        if verdict.outcome == "different":
            return


def _compare(original: Original, run: LiveRun, index: int, seconds: float) -> Verdict:
    stored, ours = original.manifest(index), stored_manifest(run, index)
    difference = first_difference(stored.record, ours.record, [planned.name for planned in run.plan.steps])
    level, made = run.config.replay.level, sum(len(outputs) for outputs in ours.record.outputs.values())
    why = tuple(_causes(original, run.config, stored.record, ours.record))
    if difference is None:
        return Verdict(index, "equal", level, made, seconds, why)
    why += tuple(_other_hardware(stored))
    if level == "tolerant":
        outcome, text = _tolerated(original, run, index)
        return Verdict(index, outcome, level, made, seconds, why, text)
    return Verdict(index, "different", level, made, seconds, why, _located(original, run, index, difference))


def _tolerated(original: Original, run: LiveRun, index: int) -> tuple[Literal["within", "different"], tuple[str, ...]]:
    """Metrics within the bounds of the configuration."""
    bounds = run.config.replay
    ours = stored_metrics(run.directory.ledger, run.directory.store, index)
    theirs = stored_metrics(original.ledger, original.store, index)
    beyond = metric_differences(theirs, ours, bounds.relative, bounds.absolute)
    if beyond:
        return "different", (f"{beyond[0]}, beyond replay.relative={bounds.relative}, absolute={bounds.absolute}",)
    largest = max(metric_differences(theirs, ours), key=lambda metric: metric.by or 0.0, default=None)
    return "within", (() if largest is None else (str(largest),))


def _located(original: Original, run: LiveRun, index: int, difference: Difference) -> tuple[str, ...]:
    """The field, and where the two contents part when it is an artifact."""
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
    """What a step could read or store."""
    before = ledger.handed_over(index - 1) if index > START else {}
    return {ref.digest: ref for ref in (*before.values(), *ledger.artifacts(index).values())}


def _failed(original: Original, config: RunConfig, step: int, how: str) -> Verdict:
    """Of a step that no record came of."""
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
    return Verdict(step, "different", config.replay.level, 0, 0.0, why, (how,))


def _causes(original: Original, config: RunConfig, stored: StepRecord, now: StepRecord) -> Iterator[str]:
    """Circumstances of the stored step that are not those of its replay, in words."""
    found = [(*difference.path.split(".", 1), difference) for difference in causes(stored, now)]
    fields = dict.fromkeys(parts[0] for parts in found)
    for field in fields:
        differing = [parts[-1] for parts in found if parts[0] == field]
        changes = ", ".join(_change(difference, field) for difference in differing)
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
        yield f"hardware differs: {', '.join(_change(difference, 'hardware') for difference in machine)}"


def _change(difference: Difference, field: str) -> str:
    key = difference.path.removeprefix(field).removeprefix(".")
    return f"{key} {shown(difference.ours)} -> {shown(difference.theirs)}".strip()


def _refuse_other_model(own: RunConfig, changed: RunConfig, steps: range) -> None:
    """The policy that a step starts from fits the run's own model only."""
    for key in ("model", "revision", "architecture"):
        if steps[0] > START and getattr(own, key) != getattr(changed, key):
            raise UserError(f"--set {key}: step {steps[0]} starts from a policy of the run's own model")
