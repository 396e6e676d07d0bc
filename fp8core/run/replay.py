"""Make steps of a run again, from its artifacts alone, and compare their records with the stored ones."""

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from fp8core.config.load import config_digest, reload_config
from fp8core.config.run import RunConfig
from fp8core.durable import read_lines
from fp8core.errors import NotRecordedError, ProcessLost, UserError, behind
from fp8core.report.console import Console
from fp8core.run.context import RunContext
from fp8core.run.execute import StepError, stored_manifest
from fp8core.run.loop import IN_PROCESS, begin
from fp8core.run.open import open_run
from fp8core.run.policy import SyncError
from fp8core.run.refusals import graph_of
from fp8core.run.resume import RedoError
from fp8core.store.artifacts import ArtifactError, ArtifactStore, Ref
from fp8core.store.diff import causes, content_difference, first_difference, metric_differences
from fp8core.store.json_text import Difference, value_differences, value_text
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
    description: RunDescription
    ledger: LedgerView
    store: ArtifactStore

    @classmethod
    def read(cls, folder: Path) -> "RunSnapshot":
        return cls(folder, stored_description(folder), LedgerView.read(folder / LEDGER), ArtifactStore(folder))

    def manifest(self, step: int) -> StepManifest:
        return self.store.get_manifest(self.ledger.steps()[step].manifest)

    def config(self, step: int) -> RunConfig:
        first_config = reload_config(self.description.config)
        record = self.manifest(step).record
        replay = first_config.replay.model_copy(update={"level": record.level})
        return first_config.model_copy(update={"steps": record.steps, "replay": replay})

    def check_step(self, step: int) -> None:
        steps = self.ledger.steps()
        self.ledger.check_no_gap(START, max(steps, default=START - 1))
        if step not in steps:
            range_text = f"steps 0 to {max(steps)} are" if steps else "no step is"
            raise UserError(f"run {self.folder.name}: step {step} is not committed; {range_text}")


@contextmanager
def scratch_folder(original: Path, step: int, config: RunConfig) -> Iterator[Path]:
    """A temporary run folder whose ledger ends where the original's step began."""
    place = original.parent if config.cluster.address is not None else None
    try:
        directory = tempfile.TemporaryDirectory(prefix=".fp8-grpo-", dir=place)
    except OSError as error:
        raise UserError(f"{place or 'the folder of temporary files'}: cannot be written: {error.strerror}") from error
    with directory as temporary:
        folder = Path(temporary) / original.name
        folder.mkdir()
        (folder / LEDGER).write_text("".join(f"{line}\n" for line in _lines_before(original, step)))
        yield folder


@contextmanager
def scratch_run(
    config: RunConfig, original: RunSnapshot, folder: Path, step: int, console: Console
) -> Iterator[RunContext]:
    """A scratch folder, live. Environments give the answers that were recorded in the original."""
    own = config.model_copy(update={"runs": folder.parent})
    graph = graph_of(own)
    environment = original.manifest(step).record.executed.get("environment")
    environment_description = environment if isinstance(environment, dict) else {}
    with (
        RunDirectory.create_or_open(folder, origin=original.folder) as directory,
        open_run(
            own, graph, directory, console, replayed=original.ledger, recorded_environment=environment_description
        ) as run,
    ):
        torch.set_num_threads(own.threads)
        yield run


def _lines_before(original: Path, step: int) -> Iterator[str]:
    """A redo that was entered after the step's commit came too late for it."""
    for line in read_lines(original / LEDGER)[0]:
        entry = json.loads(line)
        if entry["event"] == "step" and entry["step"] == step:
            return
        if entry.get("step", START) < step:
            yield json.dumps(entry)


@dataclass(frozen=True)
class ReplayResult:
    """`causes`: circumstances that differ; `difference`: the first field that does, then where its content does."""

    step: int
    outcome: Literal["equal", "within", "different"]
    level: str
    artifacts: int
    seconds: float
    causes: tuple[str, ...] = ()
    difference: tuple[str, ...] = ()


def replay(original: RunSnapshot, steps: range, console: Console) -> Iterator[ReplayResult]:
    """A verdict a step; the first that is different is the last. Raises UserError: a step cannot be restored."""
    for step in steps:
        original.check_step(step)
    config = original.config(steps[0])
    with scratch_folder(original.folder, steps[0], config) as folder:
        try:
            with scratch_run(config, original, folder, steps[0], console) as run:
                yield from _replay_results(original, run, steps)
        except (RedoError, *FAILURES) as error:
            yield _failure_result(original, config, steps[0], "on the way to this step", error)


def _replay_results(original: RunSnapshot, run: RunContext, steps: range) -> Iterator[ReplayResult]:
    began = time.perf_counter()
    begin(run)
    for index in steps:
        if index > START:
            began = time.perf_counter()
            step_config = original.config(index)
            run.config = run.config.model_copy(update={"steps": step_config.steps, "replay": step_config.replay})
            try:
                IN_PROCESS.iterate(run, index)
            except FAILURES as error:
                yield _failure_result(original, run.config, index, "the replay fails", error)
                return
        verdict = _compare(original, run, index, time.perf_counter() - began)
        yield verdict
        if verdict.outcome == "different":
            return


def _compare(original: RunSnapshot, run: RunContext, index: int, seconds: float) -> ReplayResult:
    theirs = original.manifest(index)
    ours = stored_manifest(run, index)
    difference = first_difference(theirs.record, ours.record, [planned.name for planned in run.graph.steps])
    level = run.config.replay.level
    artifact_count = sum(len(outputs) for outputs in ours.record.outputs.values())
    why = tuple(_causes(theirs.record, ours.record))
    if difference is None:
        return ReplayResult(index, "equal", level, artifact_count, seconds, why)
    why += tuple(_other_hardware(theirs))
    if level == "tolerant":
        outcome, text = _tolerance_result(original, run, index)
        return ReplayResult(index, outcome, level, artifact_count, seconds, why, text)
    return ReplayResult(
        index, "different", level, artifact_count, seconds, why, _difference_lines(original, run, index, difference)
    )


def _tolerance_result(
    original: RunSnapshot, run: RunContext, index: int
) -> tuple[Literal["within", "different"], tuple[str, ...]]:
    bounds = run.config.replay
    ours = stored_metrics(run.directory.ledger, run.store, index)
    theirs = stored_metrics(original.ledger, original.store, index)
    beyond = metric_differences(theirs, ours, bounds.relative, bounds.absolute)
    if beyond:
        return "different", (f"{beyond[0]}, beyond replay.relative={bounds.relative}, absolute={bounds.absolute}",)
    differing = {name: abs(ours[name] - value) for name, value in theirs.items() if name in ours}
    name = max(differing, key=lambda each: differing[each])
    return "within", ((f"{name}: {theirs[name]} against {ours[name]}",) if differing[name] else ())


def _difference_lines(original: RunSnapshot, run: RunContext, index: int, difference: Difference) -> tuple[str, ...]:
    theirs, ours = (
        _by_digest(ledger, index).get(value["digest"]) if isinstance(value, dict) and "digest" in value else None
        for ledger, value in ((original.ledger, difference.ours), (run.directory.ledger, difference.theirs))
    )
    if theirs is None or ours is None:
        return (str(difference),)
    try:
        inside = content_difference(original.store, theirs, run.store, ours)
    except ArtifactError as error:
        inside = str(error)
    return (str(difference),) if inside is None else (str(difference), inside)


def _by_digest(ledger: LedgerView, index: int) -> dict[object, Ref]:
    before = ledger.effective_outputs(index - 1) if index > START else {}
    return {ref.digest: ref for ref in (*before.values(), *ledger.artifacts(index).values())}


def _failure_result(original: RunSnapshot, config: RunConfig, step: int, where: str, error: Exception) -> ReplayResult:
    if (process_error := behind(error, ProcessLost)) is not None:
        raise UserError(f"nothing was compared, as a process was lost: {process_error}") from error
    manifest = original.manifest(step)
    now = manifest.record.model_copy(
        update={
            "config_digest": config_digest(config),
            "code_version": current_code(),
            "precision": config.precision.model_dump(mode="json"),
            "versions": library_versions(),
        }
    )
    why = (*_causes(manifest.record, now), *_other_hardware(manifest))
    return ReplayResult(step, "different", config.replay.level, 0, 0.0, why, (f"{where}: {error}",))


def _causes(theirs: StepRecord, now: StepRecord) -> Iterator[str]:
    fields = defaultdict[str, list[Difference]](list)
    for difference in causes(theirs, now):
        fields[difference.path.partition(".")[0]].append(difference)
    for field, differing in fields.items():
        changes = ", ".join(difference.change(field) for difference in differing)
        match field:
            case "code_version":
                made_by = value_text(differing[0].ours)
                yield f"code version differs: made by {made_by}, this is {value_text(differing[0].theirs)}"
            case "versions":
                yield f"library versions differ: {changes}"
            case _:
                yield f"{field.replace('_', ' ')} differs: {changes}"


def _other_hardware(manifest: StepManifest) -> Iterator[str]:
    machine = list(value_differences("hardware", manifest.observed.hardware, hardware()))
    if machine:
        yield f"hardware differs: {', '.join(difference.change('hardware') for difference in machine)}"
