"""A view of a run's folder, read without its lock: configuration, ledger, manifests.

A file that cannot be read becomes a finding, so that `verify` goes on with the rest. `Provenance` is where a run
comes from: its configuration, and the code, libraries and machines that made each of its steps.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Literal, Self

from pydantic import JsonValue, ValidationError

from fp8core.config.load import config_digest, reload_config
from fp8core.config.run import RunConfig
from fp8core.durable import read_lines
from fp8core.errors import StoredFileError, UserError
from fp8core.store.artifacts import ArtifactStore, Ref
from fp8core.store.json_text import mistake
from fp8core.store.layout import CHECKPOINTS, DESCRIPTION, LEDGER, MANIFESTS, manifest_place
from fp8core.store.ledger import (
    ENTRY,
    START,
    CheckpointEntry,
    Entry,
    RedoEntry,
    RemovalEntry,
    SegmentEntry,
    StepEntry,
    TaskEntry,
)
from fp8core.store.manifest import StepManifest, record_digest
from fp8core.store.run_directory import RunDescription, stored_description
from fp8core.store.step_manifests import read_manifest, second_copy

_SHOWN_DIGITS = 12
_STEP = re.compile(r"([0-9]{5,8})(?:\.|$)")


@dataclass(frozen=True)
class Finding:
    """One result of `verify`: the file, its problem, and the step, task and kind that it belongs to."""

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
    """A committed step: its line of the ledger, the tasks before that line, and the code of its segment."""

    line: int
    entry: StepEntry
    tasks: Mapping[str, TaskEntry]
    code_version: str

    @property
    def step(self) -> int:
        return self.entry.step

    @property
    def place(self) -> str:
        """Path of its manifest, relative to the run directory."""
        return manifest_place(self.step)

    @property
    def artifacts(self) -> dict[str, Ref]:
        return {name: ref for task in self.tasks.values() for name, ref in task.outputs.items()}

    def error(self, problem: str) -> Finding:
        return Finding("error", self.place, problem, step=self.step)


@dataclass(frozen=True)
class RunView:
    """A run's folder without manifests, artifacts and checkpoints; `config` is None when it cannot be read.

    `finished` has the steps that were committed by the files that were there before the ledger was read.
    """

    folder: Path
    description: RunDescription
    config: RunConfig | None
    entries: Sequence[tuple[int, Entry]]
    commits: Sequence[Commit]
    finished: Set[int]
    problems: Sequence[Finding]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a run's folder. Raises UserError: there is no run.json, or it is malformed."""
        description = stored_description(folder)
        problems: list[Finding] = []
        # The run may go on meanwhile. Manifests and checkpoints come first: the ledger has the lines before them.
        # Artifacts come last, because each was stored before its line.
        finished = _finished(folder)
        entries = _entries(folder, problems)
        commits = list(_commits(description, entries))
        config = _config(description, problems)
        return cls(folder, description, config, entries, commits, finished, problems)

    @cached_property
    def removals(self) -> list[RemovalEntry]:
        """The removals by gc, in order."""
        return [entry for _, entry in self.entries if isinstance(entry, RemovalEntry)]

    @cached_property
    def removed(self) -> set[str]:
        """Digests of the artifacts of steps that gc thinned out, which no other step has; some are still there."""
        steps = {step for removal in self.removals for step in removal.steps}
        thinned, whole = set[str](), set[str]()
        for _, entry in self.entries:
            if isinstance(entry, TaskEntry | RedoEntry):
                (thinned if entry.step in steps else whole).update(ref.digest for ref in entry.outputs.values())
        return thinned - whole

    @cached_property
    def redone(self) -> dict[int, list[RedoEntry]]:
        """The redos by step: each gave another result than the task had stored, which did not run anew later."""
        found: dict[int, list[RedoEntry]] = defaultdict(list)
        for _, entry in self.entries:
            if isinstance(entry, RedoEntry):
                found[entry.step].append(entry)
            elif isinstance(entry, TaskEntry):
                found[entry.step] = [redo for redo in found[entry.step] if redo.task != entry.task]
        return dict(found)

    @cached_property
    def steps(self) -> dict[int, Commit]:
        return {commit.step: commit for commit in self.commits}

    @property
    def process_seconds(self) -> list[float]:
        """Seconds that each process had the run: from its first line to the last task, step or checkpoint it wrote."""
        ends: dict[SegmentEntry, float] = {}
        for _, entry in self.entries:
            match entry:
                case SegmentEntry():
                    process = entry
                    ends.setdefault(process, process.started)
                case TaskEntry() if ends:
                    ends[process] = max(ends[process], entry.started + entry.seconds)
                case StepEntry() if ends:
                    ends[process] = max(ends[process], entry.committed_ms / 1000)
                case CheckpointEntry() if ends:
                    # It is written after the commit of its step, and has no time of its own.
                    ends[process] += entry.seconds
                case _:
                    pass
        return [end - process.started for process, end in ends.items()]

    @property
    def gap(self) -> str | None:
        """The first missing step before the last committed one, in words; None: none is missing."""
        missing = next((index for index in range(len(self.steps)) if index not in self.steps), None)
        return None if missing is None else f"step {max(self.steps)} is committed, but step {missing} is not"

    def cut_end(self) -> Iterator[Finding]:
        """An error where files of the folder are of later steps than the ledger."""
        last, known = max(self.steps, default=START - 1), max(self.finished, default=START - 1)
        if known > last and not any(problem.place == LEDGER for problem in self.problems):
            ends = "holds no finished step" if last < START else f"ends with step {last}"
            problem = f"{ends}, but by manifests and checkpoints step {known} was finished: its end was cut off"
            yield Finding("error", LEDGER, problem)


def inspect_manifest(folder: Path, commit: Commit) -> tuple[StepManifest | None, list[Finding]]:
    """The manifest of a step from its artifact or from manifests/, whichever has the digest of the ledger.

    None when neither has; and the findings about the file in manifests/, which must equal the artifact.
    """
    problems = list[Finding]()
    try:
        second_copy(folder, commit.entry)
    except StoredFileError as error:
        problems.append(commit.error(str(error)))
    try:
        return read_manifest(ArtifactStore(folder), folder, commit.entry), problems
    except StoredFileError:  # Both are reported, the artifact with all others.
        return None, problems


def spans(steps: Iterable[int]) -> str:
    """Step numbers in words: `0-7, 9`."""
    parts: list[list[int]] = []
    for step in sorted(steps):
        if parts and step == parts[-1][-1] + 1:
            parts[-1][1:] = [step]
        else:
            parts.append([step])
    return ", ".join("-".join(map(str, part)) for part in parts)


def _finished(folder: Path) -> set[int]:
    """The steps that must be in the ledger: those with a checkpoint, and those before one with a manifest."""
    manifests, checkpoints = (
        {int(number[1]) for path in folder.glob(f"{name}/*") if (number := _STEP.match(path.name)) is not None}
        for name in (MANIFESTS, CHECKPOINTS)
    )
    return checkpoints | {step - 1 for step in manifests}


def _config(description: RunDescription, problems: list[Finding]) -> RunConfig | None:
    try:
        return reload_config(description.config)
    except UserError as error:
        problems.append(Finding("error", DESCRIPTION, f"this version cannot read the configuration: {error}"))
        return None


def _entries(folder: Path, problems: list[Finding]) -> list[tuple[int, Entry]]:
    """The entries of the ledger with the numbers of their lines, without a torn last line."""
    try:
        lines, _ = read_lines(folder / LEDGER)
    except OSError as error:
        problems.append(Finding("error", LEDGER, f"cannot be read: {error.strerror}"))
        return []
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entries.append((number, ENTRY.validate_json(line)))
        except ValidationError as error:
            problems.append(Finding("error", f"{LEDGER}:{number}", f"not an entry: {mistake(error)}"))
    return entries


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


@dataclass
class Provenance:
    """The facts in the manifests of a run, gathered one by one: fact -> value -> the steps it held for."""

    seen: dict[str, dict[str, list[int]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    last: StepManifest | None = None

    def add(self, manifest: StepManifest) -> None:
        record, observed = manifest.record, manifest.observed
        facts = {
            "level": record.level,
            "code": record.code_version,
            "git": _git(observed.git),
            "machine": _listed(observed.hardware),
            "libraries": _listed(dict(record.versions)),
            "model revision": record.model_revision or "none",
        }
        if (behaviour := record.executed.get("behaviour")) is not None:
            facts["behaviour"] = str(behaviour)
        for fact, value in facts.items():
            self.seen[fact][value].append(record.step)
        self.last = manifest

    def text(self, view: RunView) -> str:
        lines = self.lines(view)
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)

    def lines(self, view: RunView) -> list[tuple[str, str]]:
        """Everything as facts with their values; values that changed name their steps."""
        described, config = view.description, view.config
        lines = [("run", f"{view.folder} (id {described.id}, begun {described.created})")]
        if config is not None:
            lines.append(("configuration", f"{config.name} ({config_digest(config)[:_SHOWN_DIGITS]})"))
        if self.last is not None:
            lines.append(("steps", f"{spans(view.steps)} committed, {self.last.record.steps} asked for"))
        lines += [("not committed", f"step {step}: {', '.join(tasks)}") for step, tasks in _uncommitted(view).items()]
        for number, segment in enumerate(_segments(view), start=1):
            code = segment.code_version[:_SHOWN_DIGITS]
            text = f"{number}: {_time(segment)}, process {segment.pid} on {segment.host}, code {code}"
            lines.append(("segment", text))
        for fact, values in self.seen.items():
            shown = {value[:_SHOWN_DIGITS] if fact == "code" else value: steps for value, steps in values.items()}
            alone = len(shown) == 1
            lines += [(fact, value if alone else f"{value} (steps {spans(steps)})") for value, steps in shown.items()]
        if self.last is not None:
            lines.append(("last record", record_digest(self.last)))
        return lines

    def content(self, view: RunView) -> dict[str, JsonValue]:
        config = view.config
        return {
            "folder": str(view.folder),
            "id": view.description.id,
            "begun": view.description.created,
            "configuration": config.name if config is not None else None,
            "config_digest": config_digest(config) if config is not None else None,
            "steps": spans(view.steps),
            "steps_asked_for": self.last.record.steps if self.last is not None else None,
            "segments": [segment.model_dump(mode="json", exclude={"event"}) for segment in _segments(view)],
            "seen": {
                fact: {value: spans(steps) for value, steps in values.items()} for fact, values in self.seen.items()
            },
            "last_record": record_digest(self.last) if self.last is not None else None,
        }


def _uncommitted(view: RunView) -> dict[int, list[str]]:
    last, tasks = max(view.steps, default=START - 1), defaultdict(list)
    for _, entry in view.entries:
        if isinstance(entry, TaskEntry) and entry.step > last:
            tasks[entry.step].append(entry.task)
    return dict(tasks)


def _segments(view: RunView) -> list[SegmentEntry]:
    return [entry for _, entry in view.entries if isinstance(entry, SegmentEntry)]


def _time(segment: SegmentEntry) -> str:
    return datetime.fromtimestamp(segment.started, UTC).isoformat(timespec="seconds")


def _git(state: dict[str, JsonValue]) -> str:
    if not state:
        return "no checkout"
    return f"{state['commit']}{', with uncommitted changes' if state['dirty'] else ''}"


def _listed(values: dict[str, JsonValue]) -> str:
    """`name value, ...`; memory in GiB."""
    shown = {
        name: f"{value / 2**30:.0f} GiB" if name == "memory" and isinstance(value, int) else value
        for name, value in values.items()
    }
    return ", ".join(f"{name} {value}" for name, value in shown.items())
