"""Make steps of a run again, from its artifacts alone, and compare their records with the stored ones."""

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Literal

import torch

from fp8core.config.load import config_digest, numeric_differences, reload_config
from fp8core.config.run import RunConfig, public_dump
from fp8core.durable import read_lines
from fp8core.errors import NotRecordedError, ProcessLost, UserError, behind
from fp8core.report.console import Console
from fp8core.run.checkpoint import save_state
from fp8core.run.context import RunContext
from fp8core.run.execute import StepError, carried, stored_manifest
from fp8core.run.loop import begin, iterate
from fp8core.run.open import open_run
from fp8core.run.policy import SyncError
from fp8core.run.recompute import RedoError, rewind_to, versions_in_flight
from fp8core.run.refusals import graph_of
from fp8core.store.artifacts import ArtifactError, ArtifactStore, Ref
from fp8core.store.diff import causes, content_difference, first_difference, metric_differences
from fp8core.store.json_text import Difference, shown, value_differences
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import START, LedgerView, stored_metrics
from fp8core.store.manifest import StepManifest, StepRecord, current_code, hardware, library_versions
from fp8core.store.run_directory import RunDescription, RunDirectory, stored_description
from fp8core.training.trainer import UpdateError

FAILURES = (StepError, UpdateError, SyncError, NotRecordedError, ProcessLost)
"""What a step that was committed once can fail with when it is made again: other code, libraries or settings."""


@dataclass(frozen=True)
class RunSnapshot:
    folder: Path
    described: RunDescription
    ledger: LedgerView
    store: ArtifactStore

    @classmethod
    def read(cls, folder: Path) -> "RunSnapshot":
        """Raises UserError: there is no run.json or ledger, or one is malformed."""
        return cls(folder, stored_description(folder), LedgerView.read(folder / LEDGER), ArtifactStore(folder))

    def manifest(self, step: int) -> StepManifest:
        return self.store.get_manifest(self.ledger.steps()[step].manifest)

    def config(self, step: int, overrides: Sequence[str] = ()) -> RunConfig:
        """The configuration that a committed step was made with, and overrides (`key=value`).

        Its record decides on `steps` and `replay.level`, which may have changed when the run was continued.
        """
        begun, changed = (reload_config(self.described.config, settings) for settings in ((), overrides))
        record = self.manifest(step).record
        level = record.level if changed.replay == begun.replay else changed.replay.level
        replay = changed.replay.model_copy(update={"level": level})
        return changed.model_copy(update={"steps": record.steps, "replay": replay})

    def refuse_unknown(self, step: int) -> None:
        committed = self.ledger.steps()
        self.ledger.refuse_gap(START, max(committed, default=START - 1))
        if step not in committed:
            known = f"steps 0 to {max(committed)} are" if committed else "no step is"
            raise UserError(f"run {self.folder.name}: step {step} is not committed; {known}")

    def refuse_removed(self, step: int, older: int = 0) -> None:
        """Raises UserError: gc removed what leads from a checkpoint to the policy after a step, or to `older` ones."""
        oldest = max(START, step - older)
        kept = sorted(entry.step for entry in self.ledger.checkpoints() if (self.folder / entry.uri).is_dir())
        nearest = max((checkpoint for checkpoint in kept if checkpoint <= oldest), default=START)
        which = f"the policy after step {step}" if oldest == step else f"policies {oldest} to {step}"
        for index in sorted(self.ledger.removed().intersection(range(nearest + 1, step + 1))):
            raise UserError(
                f"run {self.folder.name}: {which} cannot be restored: that takes the update of step {index}, whose "
                f"files gc removed; checkpoints: {', '.join(map(str, kept)) or 'none'}"
            )


@contextmanager
def scratch_folder(original: Path, step: int, *configs: RunConfig) -> Iterator[Path]:
    """A temporary run folder whose ledger ends where the original's step began. Raises UserError: it cannot be
    written."""
    place = original.parent if any(config.cluster.address is not None for config in configs) else None
    try:
        made = tempfile.TemporaryDirectory(prefix=".fp8-grpo-", dir=place)
    except OSError as error:
        raise UserError(f"{place or 'the folder of temporary files'}: cannot be written: {error.strerror}") from error
    with made as temporary:
        folder = Path(temporary) / original.name
        folder.mkdir()
        (folder / LEDGER).write_text("".join(f"{line}\n" for line in _lines_before(original, step)))
        yield folder


@contextmanager
def scratch_run(
    config: RunConfig, original: RunSnapshot, folder: Path, step: int, console: Console
) -> Iterator[RunContext]:
    """A scratch folder, live; `loop.begin` restores it. It shares nothing with other runs, not even a warm start.

    Environments give the answers that were recorded in the original, as the record of `step` describes them."""
    own = config.model_copy(update={"runs": folder.parent})
    graph, described = graph_of(own), original.manifest(step).record.executed.get("environment")
    recorded = described if isinstance(described, dict) else {}
    with (
        RunDirectory.create_or_open(folder, origin=original.folder) as directory,
        open_run(own, graph, directory, console, replayed=original.ledger, recorded_environment=recorded) as run,
    ):
        torch.set_num_threads(own.threads)
        yield run


def restore_as_it_was(config: RunConfig, original: RunSnapshot, folder: Path, step: int, console: Console) -> None:
    """Leave a checkpoint of an iteration in a scratch folder, restored under the run's own configuration.

    A caller goes on from that with another one. It scores tokens with older policies, which have checkpoints too."""
    with scratch_run(config, original, folder, step, console) as run:
        begin(run)
        for version in [*(each for each in versions_in_flight(run, step + 1) if START < each < step), step]:
            rewind_to(run, version)
            save_state(run, version)


def _lines_before(original: Path, step: int) -> Iterator[str]:
    """The lines of earlier steps. A redo that was entered after the step's commit came too late for it."""
    for line in read_lines(original / LEDGER)[0]:
        entry = json.loads(line)
        if entry["event"] == "step" and entry["step"] == step:
            return
        if entry.get("step", START) < step:
            yield json.dumps(entry)


@dataclass(frozen=True)
class ReplayResult:
    """The comparison of a step's replay with the stored step: `within` the bounds of a tolerant run, or `different`.

    `causes` are circumstances that differ, `difference` the first field that does, then where its content does."""

    step: int
    outcome: Literal["equal", "within", "different"]
    level: str
    artifacts: int
    seconds: float
    causes: tuple[str, ...] = ()
    difference: tuple[str, ...] = ()


def replay(original: RunSnapshot, steps: range, overrides: Sequence[str], console: Console) -> Iterator[ReplayResult]:
    """Replay consecutive committed steps and yield a verdict each; the first that is different is the last.

    `overrides` are settings (`key=value`) that the steps are replayed under, from the run's own policy. Raises
    UserError: a step cannot be restored, an override is wrong, or a process of a cluster was lost."""
    for step in steps:
        original.refuse_unknown(step)
    own, changed = (original.config(steps[0], settings) for settings in ((), overrides))
    if changed.cluster.address != own.cluster.address:
        # The run's own one may be gone.
        own = own.model_copy(update={"cluster": changed.cluster})
    _refuse_other_start(own, changed, steps[0])
    if steps[0] > START:
        # The first step may score tokens of policies that are as old as this.
        original.refuse_removed(steps[0] - 1, max(0, own.pipeline.reach - 1))
    with scratch_folder(original.folder, steps[0], own, changed) as folder:
        try:
            if overrides and steps[0] > START + 1:
                restore_as_it_was(own, original, folder, steps[0] - 1, console)
            with scratch_run(changed, original, folder, steps[0], console) as run:
                yield from _replayed(original, run, steps, overrides)
        except (RedoError, *FAILURES) as error:
            yield _failed(original, changed, steps[0], "on the way to this step", error)


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
                yield _failed(original, run.config, index, "the replay fails", error)
                return
        verdict = _compare(original, run, index, time.perf_counter() - began)
        yield verdict
        if verdict.outcome == "different":
            return


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
        for ledger, value in ((original.ledger, difference.ours), (run.directory.ledger, difference.theirs))
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
    """Of a step that no record came of. Raises UserError: a process was lost."""
    if (lost := behind(error, ProcessLost)) is not None:
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
    machine = list(value_differences("hardware", stored.observed.hardware, hardware()))
    if machine:
        yield f"hardware differs: {', '.join(difference.change('hardware') for difference in machine)}"


_OF_STREAM = (
    *("seed", "environment", "data.max_prompt_tokens"),
    *(f"pipeline.{name}" for name in ("mode", "max_staleness")),
    *(f"rollout.{name}" for name in ("max_new_tokens", "prompts_per_step", "oversample", "group_size")),
)


def _refuse_other_start(own: RunConfig, changed: RunConfig, first: int) -> None:
    for key in ("model", "revision", "architecture"):
        if first > START and getattr(own, key) != getattr(changed, key):
            raise UserError(f"--set {key}: step {first} starts from a policy of the run's own model")
    if own.environment != changed.environment:
        raise UserError("--set environment: a replay takes the recorded answers of the run's own environment")
    carries = graph_of(own).carries
    if first > START + 1 and {*carries} != {*graph_of(changed).carries}:
        raise UserError(f"--set pipeline: step {first} starts from what the run's own pipeline hands on")
    for key in _OF_STREAM if first > START + 1 and "stream" in carries else ():
        if reduce(getattr, key.split("."), own) != reduce(getattr, key.split("."), changed):
            raise UserError(f"--set {key}: step {first} goes on from completions begun under the run's own settings")
