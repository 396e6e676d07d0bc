"""What a run's folder says of itself, read without its lock: configuration, ledger, tombstones, manifests.

What cannot be read becomes a finding, so that an audit can go on with the rest.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from fp8core.config.load import reload_config
from fp8core.config.run import RunConfig
from fp8core.errors import UserError
from fp8core.store.artifacts import ArtifactError, Ref, canonical_json, read_checked
from fp8core.store.difference import value_differences
from fp8core.store.ledger import Entry, RedoEntry, SegmentEntry, StepEntry, TaskEntry
from fp8core.store.lines import lines_forward, whole_end
from fp8core.store.manifest import StepManifest
from fp8core.store.run_directory import LEDGER, RunDescription, read_description
from fp8core.store.tombstones import Tombstone, read_tombstones

_ENTRY: TypeAdapter[Entry] = TypeAdapter(Entry)


@dataclass(frozen=True)
class Finding:
    """One thing an audit has to say: about which file, and whose it is."""

    severity: Literal["error", "note"]
    place: str
    problem: str
    step: int | None = None
    task: str | None = None
    kind: str | None = None

    def __str__(self) -> str:
        step = None if self.step is None else f"step {self.step}"
        task = None if self.task is None else f"task {self.task}"
        owner = ", ".join(part for part in (self.kind, step, task) if part is not None)
        return f"{self.severity} {self.place}{f' ({owner})' if owner else ''}: {self.problem}"


@dataclass(frozen=True)
class Commit:
    """A committed step: its line of the ledger, and what the ledger held before that line.

    `code_version` is that of the segment the line was written in.
    """

    line: int
    entry: StepEntry
    tasks: Mapping[str, TaskEntry]
    code_version: str

    @property
    def step(self) -> int:
        """Number of the step."""
        return self.entry.step

    @property
    def place(self) -> str:
        """Path of its manifest, relative to the run directory."""
        return f"manifests/{self.step:05d}.json"

    @property
    def artifacts(self) -> dict[str, Ref]:
        """What the step's tasks stored, by artifact name."""
        return {name: ref for task in self.tasks.values() for name, ref in task.outputs.items()}


@dataclass(frozen=True)
class Evidence:
    """A run's folder without manifests, artifacts and checkpoints; `config` is None when it cannot be read."""

    folder: Path
    description: RunDescription
    config: RunConfig | None
    entries: Sequence[tuple[int, Entry]]
    commits: Sequence[Commit]
    tombstones: Mapping[str, Tombstone]
    problems: Sequence[Finding]

    @cached_property
    def redone(self) -> dict[int, list[RedoEntry]]:
        """By step, each time that redoing it gave something else than its tasks had stored."""
        found: dict[int, list[RedoEntry]] = defaultdict(list)
        for _, entry in self.entries:
            if isinstance(entry, RedoEntry):
                found[entry.step].append(entry)
        return dict(found)

    @cached_property
    def steps(self) -> dict[int, Commit]:
        """The committed steps by number."""
        return {commit.step: commit for commit in self.commits}


def collect(folder: Path) -> Evidence:
    """Read a run's folder. Raises UserError: there is no run.json, or it is malformed."""
    description = read_description(folder)
    if description is None:
        raise UserError(f"{folder}: no run (no run.json)")
    problems: list[Finding] = []
    # The ledger before all else: what it names was stored before its line, also while the run goes on.
    entries = _entries(folder, problems)
    return Evidence(
        folder=folder,
        description=description,
        config=_config(description, problems),
        entries=entries,
        commits=list(_commits(description, entries)),
        tombstones=_tombstones(folder, problems),
        problems=problems,
    )


def read_manifest(folder: Path, commit: Commit) -> tuple[StepManifest | None, list[Finding]]:
    """The manifest of a step, from the artifact or from manifests/, whichever is what the ledger names.

    None when neither is; and what is wrong with the file in manifests/, which must equal the artifact.
    """
    ref = commit.entry.manifest
    stored, shown, problem = _stored(folder, ref), b"", None
    try:
        shown = canonical_json(json.loads((folder / commit.place).read_bytes()), "manifest")
    except FileNotFoundError:
        problem = "the file is missing"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except (ValueError, UserError) as error:
        problem = f"not JSON: {error}"
    else:
        if hashlib.sha256(shown).hexdigest() == ref.digest:
            stored = shown
        else:
            problem = f"differs from the manifest that the ledger names{_where(stored, shown)}"
    problems = [problem] if problem is not None else []
    manifest = None
    try:
        manifest = StepManifest.model_validate_json(stored) if stored is not None else None
    except ValidationError as error:
        problems.append(f"not a manifest that this version reads: {_first_mistake(error)}")
    return manifest, [Finding("error", commit.place, text, step=commit.step) for text in problems]


def spans(steps: Iterable[int]) -> str:
    """Step numbers in words: `0-7, 9`."""
    parts: list[list[int]] = []
    for step in sorted(steps):
        if parts and step == parts[-1][-1] + 1:
            parts[-1][1:] = [step]
        else:
            parts.append([step])
    return ", ".join("-".join(map(str, part)) for part in parts)


def _config(description: RunDescription, problems: list[Finding]) -> RunConfig | None:
    try:
        return reload_config(description.config)
    except UserError as error:
        problems.append(Finding("error", "run.json", f"this version cannot read the configuration: {error}"))
        return None


def _tombstones(folder: Path, problems: list[Finding]) -> dict[str, Tombstone]:
    try:
        return read_tombstones(folder)
    except UserError as error:
        problems.append(Finding("error", "tombstones.jsonl", str(error)))
        return {}


def _entries(folder: Path, problems: list[Finding]) -> list[tuple[int, Entry]]:
    """The ledger's lines that are entries, with their numbers; a torn last one was never committed."""
    try:
        with FileIO(folder / LEDGER) as file:
            lines = [line for _, line in lines_forward(file, 0, whole_end(file))]
    except OSError as error:
        problems.append(Finding("error", LEDGER, f"cannot be read: {error.strerror}"))
        return []
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entries.append((number, _ENTRY.validate_json(line)))
        except ValidationError as error:
            problems.append(Finding("error", f"{LEDGER}:{number}", f"not an entry: {_first_mistake(error)}"))
    return entries


def _first_mistake(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return ": ".join(part for part in (".".join(map(str, first["loc"])), first["msg"]) if part)


def _commits(description: RunDescription, entries: Sequence[tuple[int, Entry]]) -> Iterator[Commit]:
    tasks: dict[int, dict[str, TaskEntry]] = defaultdict(dict)
    code_version = description.code_version
    for line, entry in entries:
        match entry:
            case SegmentEntry():
                code_version = entry.code_version
            case TaskEntry():
                tasks[entry.step][entry.task] = entry
            case StepEntry():
                yield Commit(line, entry, dict(tasks[entry.step]), code_version)
            case _:
                pass


def _stored(folder: Path, ref: Ref) -> bytes | None:
    try:
        return read_checked(folder / ref.uri, ref.digest, ref.size)
    except ArtifactError:
        # Named where all artifacts are checked.
        return None


def _where(stored: bytes | None, shown: bytes) -> str:
    """The first difference, when the stored manifest is there to compare with."""
    if stored is None:
        return ""
    return f": {next(value_differences('manifest', json.loads(stored), json.loads(shown)))}"
