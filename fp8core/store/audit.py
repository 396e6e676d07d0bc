"""Whether a run's folder is what its ledger says: every digest, every link of the chain, every reference.

The ledger names artifacts, checkpoints and manifests by their digests; a manifest's record names what each task read
and stored, and the record before it. So the last record vouches for the whole run. The run may be live: what is not
committed yet is not looked at.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, takewhile

from pydantic import JsonValue

from fp8core.config.load import config_digest
from fp8core.config.pipeline import PipelineConfig
from fp8core.store.artifacts import Ref
from fp8core.store.audit_files import artifact_findings, checkpoint_findings, stored_json
from fp8core.store.difference import content_differences, shown, value_differences
from fp8core.store.evidence import Commit, Evidence, Finding, read_manifest, spans
from fp8core.store.folder_digest import Report, silent
from fp8core.store.ledger import START, RedoEntry, SegmentEntry, StepEntry, TaskEntry
from fp8core.store.manifest import Content, StepManifest, StepObservations, StepRecord, record_digest
from fp8core.store.run_directory import LEDGER

Watch = Callable[[StepManifest], None]


def _unwatched(manifest: StepManifest) -> None:
    """The watch of who does not want one."""


def audit(evidence: Evidence, report: Report = silent, watch: Watch = _unwatched) -> Iterator[Finding]:
    """Everything that is wrong or worth knowing, the quick checks first.

    Args:
        evidence: what `collect` read of the run's folder.
        report: told of bytes as artifacts and checkpoints are read, `audited_bytes` of them in all.
        watch: shown the manifest of each step as it is read.
    """
    yield from evidence.problems
    yield from _beginning(evidence)
    yield from _order(evidence)
    yield from _manifests(evidence, watch)
    yield from artifact_findings(evidence, report)
    yield from checkpoint_findings(evidence, report)


# --- the chain of steps ---


def _order(evidence: Evidence) -> Iterator[Finding]:
    """Steps follow one another without gaps, and nothing goes back to one that is committed, but for redos."""
    expected = START
    for line, entry in evidence.entries:
        if isinstance(entry, SegmentEntry):
            continue
        problem = None
        if entry.step > expected:
            problem = f"an entry of step {entry.step}, but step {expected} is not committed"
        elif isinstance(entry, TaskEntry | StepEntry) and entry.step < expected:
            problem = f"an entry of step {entry.step}, which was committed before"
        elif isinstance(entry, RedoEntry):
            text = f"redone by code {shown(entry.code_version)} with another outcome, from which the run went on"
            yield Finding("note", f"{LEDGER}:{line}", text, step=entry.step, task=entry.task)
        if problem is not None:
            yield Finding("error", f"{LEDGER}:{line}", problem, step=entry.step)
        expected = max(expected, entry.step + isinstance(entry, StepEntry))


def _beginning(evidence: Evidence) -> Iterator[Finding]:
    """run.json names the code that began the work; processes before it, which left nothing, may have been of other."""
    opened = takewhile(lambda numbered: isinstance(numbered[1], SegmentEntry), evidence.entries)
    for line, segment in list(opened)[-1:]:
        begun = evidence.description.code_version
        if isinstance(segment, SegmentEntry) and segment.code_version != begun:
            problem = f"the run was begun by code {shown(segment.code_version)}, run.json says {shown(begun)}"
            yield Finding("error", f"{LEDGER}:{line}", problem)


def _manifests(evidence: Evidence, watch: Watch) -> Iterator[Finding]:
    """Each manifest by itself and as a link of the chain; one is held at a time."""
    configurations = defaultdict(list)
    before: tuple[int, str | None] = (START - 1, None)
    for commit in evidence.commits:
        manifest, problems = read_manifest(evidence.folder, commit)
        yield from problems
        if manifest is not None:
            watch(manifest)
            if before[0] == commit.step - 1:
                yield from _link(commit, manifest.record, before[1])
            yield from _record(evidence, commit, manifest.record)
            yield from _observations(commit, manifest.observed)
            configurations[manifest.record.config_digest].append(commit.step)
            before = (commit.step, record_digest(manifest))
    expected = config_digest(evidence.config) if evidence.config is not None else None
    for digest, steps in configurations.items():
        if expected not in (None, digest):
            problem = f"the digest of the configuration is {shown(expected)}, the records of steps {spans(steps)} say"
            yield Finding("error", "run.json", f"{problem} {shown(digest)}")


def _link(commit: Commit, record: StepRecord, before: str | None) -> Iterator[Finding]:
    if record.predecessor != before:
        problem = f"its record names the predecessor {shown(record.predecessor)}, which is {shown(before)}"
        yield Finding("error", commit.place, problem, step=commit.step)


# --- one step ---


def _record(evidence: Evidence, commit: Commit, record: StepRecord) -> Iterator[Finding]:
    """The record against the ledger, which said the same before the step was committed."""
    said: dict[str, JsonValue] = {
        "step": commit.step,
        "code_version": commit.code_version,
        "weights_digest": commit.entry.weights_digest,
    }
    stored = {task: _contents(entry.outputs) for task, entry in commit.tasks.items()}
    differences = value_differences("record", said, record.model_dump(include=set(said)))
    for found in chain(differences, content_differences("record.outputs", stored, record.outputs)):
        problem = f"{found.path}: {shown(found.theirs)}, by the ledger {shown(found.ours)}"
        yield Finding("error", commit.place, problem, step=commit.step)
    if evidence.config is not None:
        yield from _inputs(evidence, commit, record, evidence.config.pipeline)
        yield from _policy_and_scales(evidence, commit, record, evidence.config.pipeline)


def _inputs(evidence: Evidence, commit: Commit, record: StepRecord, pipeline: PipelineConfig) -> Iterator[Finding]:
    """What tasks read is what tasks of this step or the step before stored, or what a redo of that one gave instead."""
    before = evidence.steps.get(commit.step - 1)
    if before is None and commit.step > START:
        return
    ports = {planned.name: planned.inputs() for planned in pipeline.steps} if before is not None else {}
    produced = {name: name if commit.step == START + 1 else source for name, source in pipeline.carries.items()}
    made = {**(_carried(produced, before.artifacts) if before is not None else {}), **commit.artifacts}
    redone = [_contents(_carried(produced, redo.outputs)) for redo in evidence.redone.get(commit.step - 1, [])]
    expected = {
        task: _contents({port: made[name] for port, name in inputs.items() if name in made})
        for task, inputs in ports.items()
    }
    continued = []
    for found in content_differences("record.inputs", expected, record.inputs):
        task, port = found.path.split(".")[2:]
        read, name = record.inputs.get(task, {}).get(port), ports.get(task, {}).get(port, "")
        if read is not None and read in [contents.get(name) for contents in redone]:
            continued.append(found.path)
        else:
            problem = f"{found.path}: {shown(found.theirs)}, but its producer stored {shown(found.ours)}"
            yield Finding("error", commit.place, problem, step=commit.step)
    if continued:
        yield Finding("note", commit.place, f"goes on from what was redone: {', '.join(continued)}", step=commit.step)


def _carried(produced: Mapping[str, str], artifacts: Mapping[str, Ref]) -> dict[str, Ref]:
    return {name: artifacts[source] for name, source in produced.items() if source in artifacts}


def _policy_and_scales(
    evidence: Evidence, commit: Commit, record: StepRecord, pipeline: PipelineConfig
) -> Iterator[Finding]:
    artifacts = commit.artifacts
    policy, scales = (
        artifacts.get(name if commit.step == START else pipeline.carries.get(name, name))
        for name in ("policy", "scales")
    )
    digest = scales.digest if scales is not None else None
    if record.scales_digest != digest:
        problem = f"record.scales_digest: {shown(record.scales_digest)}, but the stored scales are {shown(digest)}"
        yield Finding("error", commit.place, problem, step=commit.step)
    content = None if policy is None else stored_json(evidence.folder, policy)
    made = {"version": commit.step, "weights_digest": record.weights_digest}
    if content is not None and content != made:
        yield Finding("error", commit.place, f"the stored policy is {content}, not {made}", step=commit.step)


def _observations(commit: Commit, observed: StepObservations) -> Iterator[Finding]:
    """Timings and paths are copies of what the ledger says."""
    copied = observed.model_dump(include={"timings", "paths"})
    seconds = {name: entry.seconds for name, entry in commit.tasks.items()}
    original: JsonValue = {"timings": {**seconds}, "paths": {name: ref.uri for name, ref in commit.artifacts.items()}}
    for found in value_differences("observed", copied, original):
        problem = f"{found.path}: {shown(found.ours)}, by the ledger {shown(found.theirs)}"
        yield Finding("error", commit.place, problem, step=commit.step)


def _contents(artifacts: Mapping[str, Ref]) -> dict[str, Content]:
    return {name: Content(digest=ref.digest, size=ref.size) for name, ref in artifacts.items()}
