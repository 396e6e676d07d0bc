"""Verify a run's folder, which may be live: every digest, and every link of the chain of records."""

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from fp8core.config.load import config_digest_at
from fp8core.durable import Report, file_digest, folder_digest
from fp8core.errors import StoredFileError, UserError
from fp8core.run.reference import check_reference
from fp8core.store.artifacts import ArtifactError, ArtifactStore, Ref, contents
from fp8core.store.diff import content_differences
from fp8core.store.json_text import canonical_json, parse_json, value_differences, value_text
from fp8core.store.layout import LEDGER, REFERENCE
from fp8core.store.ledger import START, CheckpointEntry, RedoEntry, StepEntry, TaskEntry, weights_of
from fp8core.store.manifest import StepManifest, StepRecord, record_digest
from fp8core.store.run_view import Commit, Finding, RunView, spans
from fp8core.training.saved_state import check_checkpoint, check_weights

Watch = Callable[[StepManifest], None]


def verify(view: RunView, report: Report | None = None, watch: Watch | None = None) -> Iterator[Finding]:
    """`report` is called with each number of bytes that was read, `watch` with the manifest of each step."""
    yield from view.problems
    yield from _order(view)
    yield from _manifests(view, watch)
    yield from _artifacts(view, report)
    yield from _checkpoints(view, report)


def _order(view: RunView) -> Iterator[Finding]:
    expected = START
    for line, entry in view.entries:
        match entry:
            case TaskEntry() | StepEntry() if entry.step != expected:
                problem = f"an entry of step {entry.step}, expected one of step {expected}"
                yield Finding("error", f"{LEDGER}:{line}", problem, step=entry.step)
            case RedoEntry():
                text = (
                    f"redone by code {value_text(entry.code_version)} with another outcome, from which the run went on"
                )
                yield Finding("note", f"{LEDGER}:{line}", text, step=entry.step, task=entry.task)
            case _:
                pass
        if isinstance(entry, StepEntry):
            expected = max(expected, entry.step + 1)
    if view.cut_end is not None:
        yield Finding("error", LEDGER, view.cut_end)


def _manifests(view: RunView, watch: Watch | None) -> Iterator[Finding]:
    configurations = defaultdict(list)
    before: tuple[int, str | None] = (START - 1, None)
    store = ArtifactStore(view.folder)
    for commit in view.commits:
        yield from _copy_for_people(view.folder, commit)
        try:
            manifest = store.get_manifest(commit.entry.manifest)
        except ArtifactError:  # It is reported with the other artifacts.
            continue
        if watch is not None:
            watch(manifest)
        predecessor = manifest.record.predecessor
        if before[0] == commit.step - 1 and predecessor != before[1]:
            yield commit.error(
                f"its record names the predecessor {value_text(predecessor)}, which is {value_text(before[1])}"
            )
        yield from _record(commit, manifest.record)
        configurations[manifest.record.config_digest, manifest.record.level].append(commit.step)
        before = (commit.step, record_digest(manifest))
    for (digest, level), steps in configurations.items():
        if view.config is not None and (expected := config_digest_at(view.config, level)) != digest:
            problem = (
                f"the digest of the configuration is {value_text(expected)}, the records of steps {spans(steps)} say"
            )
            yield Finding("error", "run.json", f"{problem} {value_text(digest)}")


def _copy_for_people(folder: Path, commit: Commit) -> Iterator[Finding]:
    try:
        copy = canonical_json(parse_json((folder / commit.place).read_bytes(), "the manifest"), "manifest")
    except (OSError, StoredFileError) as error:
        yield commit.error(f"cannot be read: {error}")
        return
    if hashlib.sha256(copy).hexdigest() != commit.entry.manifest.digest:
        yield commit.error("differs from the manifest that the ledger names")


def _record(commit: Commit, record: StepRecord) -> Iterator[Finding]:
    facts: dict[str, JsonValue] = {
        "step": commit.step,
        "code_version": commit.code_version,
        "weights_digest": commit.entry.weights_digest,
    }
    outputs = {task: contents(entry.outputs) for task, entry in commit.tasks.items()}
    differences = value_differences("record", facts, record.model_dump(include=set(facts)))
    for difference in itertools.chain(differences, content_differences("record.outputs", outputs, record.outputs)):
        yield commit.error(
            f"{difference.path}: {value_text(difference.theirs)}, by the ledger {value_text(difference.ours)}"
        )


@dataclass(frozen=True)
class Reference:
    ref: Ref
    step: int
    task: str | None

    def error(self, problem: str) -> Finding:
        return Finding("error", self.ref.uri, problem, step=self.step, task=self.task, kind=self.ref.kind)


def references(view: RunView) -> list[Reference]:
    references: dict[tuple[str, str, int], Reference] = {}
    for _, entry in view.entries:
        match entry:
            case TaskEntry() | RedoEntry():
                entry_references = [Reference(ref, entry.step, entry.task) for ref in entry.outputs.values()]
            case StepEntry():
                entry_references = [Reference(entry.manifest, entry.step, None)]
            case _:
                entry_references = []
        for reference in entry_references:
            ref = reference.ref
            references.setdefault((ref.uri, ref.digest, ref.size), reference)
    return list(references.values())


def verified_bytes(view: RunView) -> int:
    paths = [view.folder / reference.ref.uri for reference in references(view)]
    for folder in {view.folder / entry.uri for entry in _last_checkpoints(view).values()}:
        paths += folder.rglob("*")
    return sum(path.stat().st_size for path in paths if path.is_file())


def _artifacts(view: RunView, report: Report | None) -> Iterator[Finding]:
    removed_refs = defaultdict[int, list[Ref]](list)
    for reference in references(view):
        ref = reference.ref
        path = view.folder / ref.uri
        try:
            size = path.stat().st_size
            digest = file_digest(path, report)
        except FileNotFoundError:
            if ref.digest in view.removed_digests:
                removed_refs[reference.step].append(ref)
            else:
                yield reference.error("the file is missing")
        except OSError as error:
            yield reference.error(f"cannot be read: {error.strerror}")
        else:
            if digest != ref.digest:
                expected = f"expected {value_text(ref.digest)} of {ref.size} bytes"
                yield reference.error(f"content differs: SHA-256 {value_text(digest)} of {size} bytes, {expected}")
            elif size != ref.size:
                yield reference.error(f"has {size} bytes, the ledger says {ref.size}")
    for step, refs in removed_refs.items():
        kinds = ", ".join(ref.kind for ref in refs)
        problem = f"removed by gc: {kinds}; {sum(ref.size for ref in refs)} bytes"
        yield Finding("note", "artifacts", problem, step=step)


def _last_checkpoints(view: RunView) -> dict[int, CheckpointEntry]:
    return {entry.step: entry for _, entry in view.entries if isinstance(entry, CheckpointEntry)}


def _checkpoints(view: RunView, report: Report | None) -> Iterator[Finding]:
    entries = _last_checkpoints(view)
    absent_steps = []
    for step, entry in entries.items():
        if step not in view.steps:
            yield Finding("error", entry.uri, "its step is not committed", step=step)
        else:
            with suppress(ArtifactError):  # It is reported with the other artifacts.
                weights = weights_of(view.ledger, ArtifactStore(view.folder), step)
                if entry.weights_digest not in weights:
                    problem = (
                        f"holds weights {value_text(entry.weights_digest)}, its step made {value_text(weights[0])}"
                    )
                    yield Finding("error", entry.uri, problem, step=step)
        folder = view.folder / entry.uri
        try:
            digest = folder_digest(folder, report) if folder.is_dir() else None
            if digest is not None and digest != entry.digest:
                problem = f"content differs: digest {value_text(digest)}, expected {value_text(entry.digest)}"
                yield Finding("error", entry.uri, problem, step=step)
            elif digest is not None:
                check_checkpoint(folder, step, entry.weights_digest)
                check_weights(folder, entry.weights_digest)
                reference = check_reference(view.ledger, ArtifactStore(view.folder), step, folder)
                if reference is not None:
                    check_weights(folder / REFERENCE, reference)
        except (OSError, UserError) as error:
            if folder.is_dir():
                yield Finding("error", entry.uri, str(error).removeprefix(f"{folder}/"), step=step)
        if not folder.is_dir():  # The live run may prune one while it is read.
            absent_steps.append(step)
    if entries and (newest := max(entries)) in absent_steps and newest not in view.ledger.removed_steps():
        problem = "the folder is missing, and it is the newest checkpoint"
        yield Finding("error", entries[newest].uri, problem, step=newest)
        absent_steps.remove(newest)
    if absent_steps:
        text = f"pruned, as later ones replace them or by gc: steps {spans(absent_steps)}"
        yield Finding("note", "checkpoints", text)
