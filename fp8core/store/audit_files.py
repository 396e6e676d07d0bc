"""The files of a run: artifacts and checkpoints against the digests that the ledger names."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8core.store.artifacts import ArtifactError, ArtifactStore, Ref
from fp8core.store.difference import shown
from fp8core.store.evidence import Evidence, Finding, spans
from fp8core.store.folder_digest import Report, file_digest, folder_digest
from fp8core.store.ledger import CheckpointEntry, RedoEntry, StepEntry, TaskEntry


@dataclass(frozen=True)
class Reference:
    """An artifact as a line of the ledger names it."""

    ref: Ref
    step: int
    task: str | None

    def error(self, problem: str) -> Finding:
        """A finding about this artifact."""
        return Finding("error", self.ref.uri, problem, step=self.step, task=self.task, kind=self.ref.kind)

    def __str__(self) -> str:
        task = f", task {self.task}" if self.task else ""
        return f"{self.ref.uri} ({self.ref.kind}, step {self.step}{task})"


def references(evidence: Evidence) -> list[Reference]:
    """Every artifact that the ledger names, once, as it is named first."""
    found: dict[tuple[str, str, int], Reference] = {}
    for _, entry in evidence.entries:
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


def audited_bytes(evidence: Evidence) -> int:
    """How much there is to read: artifacts and checkpoints that are there."""
    folders = {evidence.folder / entry.uri for entry in _last_checkpoints(evidence).values()}
    files = [path for folder in folders for path in folder.rglob("*")]
    return sum(_size(evidence.folder / reference.ref.uri) for reference in references(evidence)) + sum(
        map(_size, files)
    )


def _size(path: Path) -> int:
    """Bytes of a file; none for a folder, or for what is not there."""
    return path.stat().st_size if path.is_file() else 0


def stored_json(folder: Path, ref: Ref) -> dict[str, Any] | None:
    """A stored JSON object; None when it is missing or damaged, which `artifact_findings` says."""
    try:
        content = ArtifactStore(folder).get_json(ref)
    except ArtifactError:
        return None
    return content if isinstance(content, dict) else None


def artifact_findings(evidence: Evidence, report: Report) -> Iterator[Finding]:
    """Every artifact that the ledger names: there, whole and unchanged, or removed on purpose."""
    named = references(evidence)
    owners = {reference.ref.digest: reference for reference in named}
    removed = defaultdict(list)
    for reference in named:
        ref = reference.ref
        path, tombstone = evidence.folder / ref.uri, evidence.tombstones.get(ref.digest)
        try:
            size, digest = path.stat().st_size, file_digest(path, report)
        except FileNotFoundError:
            if tombstone is None:
                yield reference.error("the file is missing")
            else:
                removed[reference.step, tombstone.reason, tombstone.when].append(ref)
        except OSError as error:
            yield reference.error(f"cannot be read: {error.strerror}")
        else:
            if (digest, size) != (ref.digest, ref.size):
                yield reference.error(_damage(ref, digest, size, owners))
    for (step, reason, when), refs in removed.items():
        kinds = ", ".join(ref.kind for ref in refs)
        problem = f"removed ({reason}, {when}): {kinds}; {sum(ref.size for ref in refs)} bytes"
        yield Finding("note", "artifacts", problem, step=step)


def _damage(ref: Ref, digest: str, size: int, owners: Mapping[str, Reference]) -> str:
    if digest == ref.digest:
        return f"has {size} bytes, the ledger says {ref.size}"
    other = owners.get(digest)
    if other is not None:
        return f"holds the content of {other}"
    if size < ref.size:
        return f"truncated: {size} of {ref.size} bytes"
    expected = f"expected {shown(ref.digest)} of {ref.size} bytes"
    return f"content differs: SHA-256 {shown(digest)} of {size} bytes, {expected}"


def _last_checkpoints(evidence: Evidence) -> dict[int, CheckpointEntry]:
    return {entry.step: entry for _, entry in evidence.entries if isinstance(entry, CheckpointEntry)}


def checkpoint_findings(evidence: Evidence, report: Report) -> Iterator[Finding]:
    """Every checkpoint: whole, unchanged and of its step's weights, or pruned; the newest must be there."""
    entries, pruned = _last_checkpoints(evidence), []
    for step, entry in entries.items():
        if entry.uri != f"checkpoints/{step:05d}":
            yield Finding("error", entry.uri, "not where the checkpoint of this step belongs", step=step)
            continue
        yield from _weights(evidence, entry)
        folder, tombstone = evidence.folder / entry.uri, evidence.tombstones.get(entry.digest)
        try:
            digest = folder_digest(folder, report) if folder.is_dir() else None
        except FileNotFoundError:  # Pruned by the live run while it was read.
            digest = None
        except OSError as error:
            yield Finding("error", entry.uri, f"cannot be read: {error.filename}: {error.strerror}", step=step)
            continue
        if digest is not None and digest != entry.digest:
            problem = f"content differs: digest {shown(digest)}, expected {shown(entry.digest)}"
            yield Finding("error", entry.uri, problem, step=step)
        elif digest is None and tombstone is not None:
            yield Finding("note", entry.uri, f"removed ({tombstone.reason}, {tombstone.when})", step=step)
        elif digest is None and step == max(entries):
            yield Finding("error", entry.uri, "the folder is missing, and it is the newest checkpoint", step=step)
        elif digest is None:
            pruned.append(step)
    if pruned:
        yield Finding("note", "checkpoints", f"pruned, as later ones replace them: steps {spans(pruned)}")


def _weights(evidence: Evidence, entry: CheckpointEntry) -> Iterator[Finding]:
    """A checkpoint holds the policy of its step, or the one that a redo of the step gave."""
    redone = [ref for redo in evidence.redone.get(entry.step, []) for ref in redo.outputs.values()]
    commit = evidence.steps.get(entry.step)
    if commit is None:
        yield Finding("error", entry.uri, "its step is not committed", step=entry.step)
        return
    made = commit.entry.weights_digest
    policies = [stored_json(evidence.folder, ref) for ref in redone if ref.kind == "policy"]
    again = [policy["weights_digest"] for policy in policies if policy is not None]
    if entry.weights_digest not in (made, *again):
        problem = f"holds weights {shown(entry.weights_digest)}, its step made {shown(made)}"
        yield Finding("error", entry.uri, problem, step=entry.step)
