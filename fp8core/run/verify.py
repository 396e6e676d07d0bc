"""Verify a run's folder: every digest, every link of the chain of records, every reference.

The ledger names artifacts, checkpoints and manifests by their digests. A manifest's record names what each task read
and stored, and the record of the step before. So the last record vouches for the whole run. The run may be live:
entries that are not committed yet are left out.

The chain alone proves that no record was changed without those after it. A folder whose records were all made anew is
found by the head that MLflow holds (`flows.tracking.chain_head`).
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue

from fp8core.config.load import config_digest_at
from fp8core.config.pipeline import PipelineConfig
from fp8core.durable import Report, file_digest, folder_digest
from fp8core.errors import UserError
from fp8core.store.artifacts import ArtifactError, ArtifactStore, Ref
from fp8core.store.diff import content_differences
from fp8core.store.json_text import shown, value_differences
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import START, CheckpointEntry, RedoEntry, StepEntry, TaskEntry
from fp8core.store.manifest import Content, StepManifest, StepObservations, StepRecord, record_digest
from fp8core.store.run_view import Commit, Finding, RunView, inspect_manifest, spans
from fp8core.training.saved_state import check_checkpoint, check_weights

Watch = Callable[[StepManifest], None]


def verify(view: RunView, report: Report | None = None, watch: Watch | None = None) -> Iterator[Finding]:
    """All findings, those of the quick checks first.

    Args:
        report: called with each number of bytes of artifacts and checkpoints that was read, `verified_bytes` in all.
        watch: called with the manifest of each step.
    """
    yield from view.problems
    yield from _order(view)
    yield from view.cut_end()
    yield from _manifests(view, watch)
    yield from _artifacts(view, report)
    yield from _checkpoints(view, report)


# --- the chain of steps ---


def _order(view: RunView) -> Iterator[Finding]:
    """Steps follow one another without gaps; only a redo names a step that is committed."""
    expected = START
    for line, entry in view.entries:
        match entry:
            case TaskEntry() | StepEntry() if entry.step != expected:
                problem = f"an entry of step {entry.step}, expected one of step {expected}"
                yield Finding("error", f"{LEDGER}:{line}", problem, step=entry.step)
            case RedoEntry():
                text = f"redone by code {shown(entry.code_version)} with another outcome, from which the run went on"
                if not entry.gave_policy:
                    text = "completions in flight begin anew: a policy or the answers of an environment changed"
                yield Finding("note", f"{LEDGER}:{line}", text, step=entry.step, task=entry.task)
            case _:
                pass
        if isinstance(entry, StepEntry):
            expected = max(expected, entry.step + 1)


def _manifests(view: RunView, watch: Watch | None) -> Iterator[Finding]:
    """Each manifest by itself and as a link of the chain; memory holds one at a time."""
    configurations = defaultdict(list)
    before: tuple[int, str | None] = (START - 1, None)
    for commit in view.commits:
        manifest, problems = inspect_manifest(view.folder, commit)
        yield from problems
        if manifest is not None:
            if watch is not None:
                watch(manifest)
            named = manifest.record.predecessor
            if before[0] == commit.step - 1 and named != before[1]:
                yield commit.error(f"its record names the predecessor {shown(named)}, which is {shown(before[1])}")
            yield from _record(view, commit, manifest.record)
            yield from _observations(commit, manifest.observed)
            configurations[manifest.record.config_digest, manifest.record.level].append(commit.step)
            before = (commit.step, record_digest(manifest))
    for (digest, level), steps in configurations.items():
        if view.config is not None and (expected := config_digest_at(view.config, level)) != digest:
            problem = f"the digest of the configuration is {shown(expected)}, the records of steps {spans(steps)} say"
            yield Finding("error", "run.json", f"{problem} {shown(digest)}")


# --- one step ---


def _record(view: RunView, commit: Commit, record: StepRecord) -> Iterator[Finding]:
    """The record against the ledger, which said the same before the step was committed."""
    committed: dict[str, JsonValue] = {
        "step": commit.step,
        "code_version": commit.code_version,
        "weights_digest": commit.entry.weights_digest,
    }
    stored = {task: _contents(entry.outputs) for task, entry in commit.tasks.items()}
    differences = value_differences("record", committed, record.model_dump(include=set(committed)))
    for found in itertools.chain(differences, content_differences("record.outputs", stored, record.outputs)):
        yield commit.error(f"{found.path}: {shown(found.theirs)}, by the ledger {shown(found.ours)}")
    if view.config is not None:
        yield from _inputs(view, commit, record, view.config.pipeline)
        yield from _policy_and_scales(view, commit, record, view.config.pipeline)


def _inputs(view: RunView, commit: Commit, record: StepRecord, pipeline: PipelineConfig) -> Iterator[Finding]:
    """Each input is an output of this step, of the step before, or of a redo of that step."""
    before = view.steps.get(commit.step - 1)
    if before is None and commit.step > START:
        return
    ports = {planned.name: planned.inputs() for planned in pipeline.steps} if before is not None else {}
    produced = {name: name if commit.step == START + 1 else source for name, source in pipeline.carries.items()}
    available = {**(_carried(produced, before.artifacts) if before is not None else {}), **commit.artifacts}
    redone = [_contents(_carried(produced, redo.outputs)) for redo in view.redone.get(commit.step - 1, [])]
    expected = {
        task: _contents({port: available[name] for port, name in inputs.items() if name in available})
        for task, inputs in ports.items()
    }
    continued = []
    for found in content_differences("record.inputs", expected, record.inputs):
        task, port = found.path.split(".")[2:]
        read, name = record.inputs.get(task, {}).get(port), ports.get(task, {}).get(port, "")
        if read is not None and read in [contents.get(name) for contents in redone]:
            continued.append(found.path)
        else:
            yield commit.error(f"{found.path}: {shown(found.theirs)}, but its producer stored {shown(found.ours)}")
    if continued:
        yield Finding("note", commit.place, f"goes on from what was redone: {', '.join(continued)}", step=commit.step)


def _carried(produced: Mapping[str, str], artifacts: Mapping[str, Ref]) -> dict[str, Ref]:
    return {name: artifacts[source] for name, source in produced.items() if source in artifacts}


def _policy_and_scales(
    view: RunView, commit: Commit, record: StepRecord, pipeline: PipelineConfig
) -> Iterator[Finding]:
    artifacts = commit.artifacts
    policy, scales = (
        artifacts.get(name if commit.step == START else pipeline.carries.get(name, name))
        for name in ("policy", "scales")
    )
    digest = scales.digest if scales is not None else None
    if record.scales_digest != digest:
        named = shown(record.scales_digest)
        yield commit.error(f"record.scales_digest: {named}, but the stored scales are {shown(digest)}")
    content = None if policy is None else _stored_json(view, policy)
    expected = {"version": commit.step, "weights_digest": record.weights_digest}
    if content is not None and content != expected:
        yield commit.error(f"the stored policy is {content}, not {expected}")


def _observations(commit: Commit, observed: StepObservations) -> Iterator[Finding]:
    """Timings and paths are copies of those in the ledger."""
    copied = observed.model_dump(include={"timings", "paths"})
    seconds = {name: entry.seconds for name, entry in commit.tasks.items()}
    original: JsonValue = {"timings": {**seconds}, "paths": {name: ref.uri for name, ref in commit.artifacts.items()}}
    for found in value_differences("observed", copied, original):
        yield commit.error(f"{found.path}: {shown(found.ours)}, by the ledger {shown(found.theirs)}")


def _contents(artifacts: Mapping[str, Ref]) -> dict[str, Content]:
    return {name: Content(digest=ref.digest, size=ref.size) for name, ref in artifacts.items()}


# --- artifacts ---


@dataclass(frozen=True)
class Reference:
    ref: Ref
    step: int
    task: str | None

    def error(self, problem: str) -> Finding:
        return Finding("error", self.ref.uri, problem, step=self.step, task=self.task, kind=self.ref.kind)


def references(view: RunView) -> list[Reference]:
    """Every artifact that the ledger names, once, from the first line that names it."""
    found: dict[tuple[str, str, int], Reference] = {}
    for _, entry in view.entries:
        match entry:
            case TaskEntry() | RedoEntry():
                named = [Reference(ref, entry.step, entry.task) for ref in entry.outputs.values()]
            case StepEntry():
                named = [Reference(entry.manifest, entry.step, None)]
            case _:
                named = []
        for reference in named:
            ref = reference.ref
            found.setdefault((ref.uri, ref.digest, ref.size), reference)
    return list(found.values())


def verified_bytes(view: RunView) -> int:
    """Bytes of the artifacts and checkpoints that are there."""
    paths = [view.folder / reference.ref.uri for reference in references(view)]
    for folder in {view.folder / entry.uri for entry in _last_checkpoints(view).values()}:
        paths += folder.rglob("*")
    return sum(path.stat().st_size for path in paths if path.is_file())


def _stored_json(view: RunView, ref: Ref) -> dict[str, Any] | None:
    """A stored JSON object; None when it is missing or damaged, which `_artifacts` reports."""
    try:
        content = ArtifactStore(view.folder).get_json(ref)
    except ArtifactError:
        return None
    return content if isinstance(content, dict) else None


def _artifacts(view: RunView, report: Report | None) -> Iterator[Finding]:
    """Every artifact that the ledger names: present and unchanged, or removed by gc."""
    named = references(view)
    owners = {reference.ref.digest: reference for reference in named}
    removed = defaultdict[int, list[Ref]](list)
    for reference in named:
        ref = reference.ref
        path = view.folder / ref.uri
        try:
            size, digest = path.stat().st_size, file_digest(path, report)
        except FileNotFoundError:
            if ref.digest in view.removed:
                removed[reference.step].append(ref)
            else:
                yield reference.error("the file is missing")
        except OSError as error:
            yield reference.error(f"cannot be read: {error.strerror}")
        else:
            if digest != ref.digest:
                yield reference.error(_damage(ref, digest, size, owners))
            elif size != ref.size:
                yield reference.error(f"has {size} bytes, the ledger says {ref.size}")
    for step, refs in removed.items():
        kinds = ", ".join(ref.kind for ref in refs)
        problem = f"removed by gc: {kinds}; {sum(ref.size for ref in refs)} bytes"
        yield Finding("note", "artifacts", problem, step=step)


def _damage(ref: Ref, digest: str, size: int, owners: Mapping[str, Reference]) -> str:
    if (other := owners.get(digest)) is not None:
        return f"holds the content of {other.ref.uri} ({other.ref.kind}, step {other.step})"
    if size < ref.size:
        return f"truncated: {size} of {ref.size} bytes"
    expected = f"expected {shown(ref.digest)} of {ref.size} bytes"
    return f"content differs: SHA-256 {shown(digest)} of {size} bytes, {expected}"


# --- checkpoints ---


def _last_checkpoints(view: RunView) -> dict[int, CheckpointEntry]:
    return {entry.step: entry for _, entry in view.entries if isinstance(entry, CheckpointEntry)}


def _checkpoints(view: RunView, report: Report | None) -> Iterator[Finding]:
    """Every checkpoint: unchanged and of its step's weights, or pruned; the newest must be there."""
    entries, pruned = _last_checkpoints(view), []
    dropped = {step for removal in view.removals for step in removal.steps}
    for step, entry in entries.items():
        yield from _weights(view, entry)
        folder = view.folder / entry.uri
        try:
            digest = folder_digest(folder, report) if folder.is_dir() else None
            if digest is not None and digest != entry.digest:
                problem = f"content differs: digest {shown(digest)}, expected {shown(entry.digest)}"
                yield Finding("error", entry.uri, problem, step=step)
            elif digest is not None:
                check_checkpoint(folder, step, entry.weights_digest)
                check_weights(folder, entry.weights_digest)
        except (OSError, UserError) as error:
            if folder.is_dir():
                yield Finding("error", entry.uri, str(error).removeprefix(f"{folder}/"), step=step)
            digest = None
        if not folder.is_dir():  # The live run may prune one while it is read.
            pruned.append(step)
    if entries and (newest := max(entries)) in pruned and newest not in dropped:
        problem = "the folder is missing, and it is the newest checkpoint"
        yield Finding("error", entries[newest].uri, problem, step=newest)
        pruned.remove(newest)
    if pruned:
        text = f"pruned, as later ones replace them or by gc: steps {spans(pruned)}"
        yield Finding("note", "checkpoints", text)


def _weights(view: RunView, entry: CheckpointEntry) -> Iterator[Finding]:
    """A checkpoint holds the policy of its step, or that of a redo of the step."""
    redone = [ref for redo in view.redone.get(entry.step, []) for ref in redo.outputs.values()]
    commit = view.steps.get(entry.step)
    if commit is None:
        yield Finding("error", entry.uri, "its step is not committed", step=entry.step)
        return
    made = commit.entry.weights_digest
    policies = [_stored_json(view, ref) for ref in redone if ref.kind == "policy"]
    again = [policy["weights_digest"] for policy in policies if policy is not None]
    if entry.weights_digest not in (made, *again):
        problem = f"holds weights {shown(entry.weights_digest)}, its step made {shown(made)}"
        yield Finding("error", entry.uri, problem, step=entry.step)
