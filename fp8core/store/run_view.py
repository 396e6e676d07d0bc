"""A view of a run's folder, read without its lock: configuration, ledger, deletions, manifests.

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
from fp8core.durable import read_lines, read_stored
from fp8core.errors import StoredFileError, UserError
from fp8core.store.artifacts import ArtifactError, Ref, read_checked
from fp8core.store.deletion_log import Deletion, read_deletions
from fp8core.store.json_text import mistake, parse_model
from fp8core.store.layout import CHECKPOINTS, DELETION_LOG, DESCRIPTION, LEDGER, MANIFESTS, manifest_place
from fp8core.store.ledger import (
    ENTRY,
    START,
    CheckpointEntry,
    Entry,
    RedoEntry,
    SegmentEntry,
    StepEntry,
    TaskEntry,
)
from fp8core.store.manifest import StepManifest, record_digest
from fp8core.store.run_directory import RunDescription, stored_description
from fp8core.store.step_manifests import read_second_copy

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

    `written` has the manifests, signatures and checkpoints that were there before the ledger was read: path -> step.
    """

    folder: Path
    description: RunDescription
    config: RunConfig | None
    entries: Sequence[tuple[int, Entry]]
    commits: Sequence[Commit]
    deletions: Mapping[str, Deletion]
    written: Mapping[str, int]
    problems: Sequence[Finding]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a run's folder. Raises UserError: there is no run.json, or it is malformed."""
        description = stored_description(folder)
        problems: list[Finding] = []
        # The run may go on meanwhile. Manifests and checkpoints come first: the ledger has the lines before them.
        # Artifacts come last, because each was stored before its line.
        written = _written(folder)
        entries = _entries(folder, problems)
        commits = list(_commits(description, entries))
        config, deletions = _config(description, problems), _deletions(folder, problems)
        return cls(folder, description, config, entries, commits, deletions, written, problems)

    def deletions_now(self) -> dict[str, Deletion]:
        """As `deletions`, of this moment: a gc may have gone on since the view was made."""
        return _deletions(self.folder, [])

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
        """The folder holds no step after the last line of the ledger, but for the one that a kill kept from its line.

        A manifest, and its signature, are written when every task of the step has its line, a checkpoint when the step
        has.
        """
        if any(problem.place == LEDGER for problem in self.problems):
            return  # It cannot be read, which is said.
        last = max(self.steps, default=START - 1)
        begun = {entry.task for _, entry in self.entries if isinstance(entry, TaskEntry) and entry.step == last + 1}
        later = defaultdict(list)
        for place, step in self.written.items():
            if step > last and not (
                step == last + 1 and place.startswith(f"{MANIFESTS}/") and _is_finished(self, step, begun)
            ):
                later[step].append(place)
        if later:
            ends = "holds no finished step" if last < START else f"ends with step {last}"
            places = ", ".join(later[min(later)])
            problem = f"{ends}, but there are files of steps {spans(later)} ({places}): its end was cut off"
            yield Finding("error", LEDGER, problem)

    def refuse_cut(self) -> None:
        """Raises StoredFileError: the end of the ledger was cut off."""
        for cut in self.cut_end():
            raise StoredFileError(f"{self.folder / cut.place}: {cut.problem}")


def inspect_manifest(folder: Path, commit: Commit) -> tuple[StepManifest | None, list[Finding]]:
    """The manifest of a step from its artifact or from manifests/, whichever has the digest of the ledger.

    None when neither has; and the findings about the file in manifests/, which must equal the artifact.
    """
    ref = commit.entry.manifest
    stored, problems = _stored(folder, ref), list[str]()
    try:
        stored = read_second_copy(folder, commit.entry, stored)
    except StoredFileError as error:
        problems.append(str(error))
    manifest = None
    try:
        manifest = parse_model(stored, StepManifest, "not a manifest that this version reads") if stored else None
    except StoredFileError as error:
        problems.append(str(error))
    return manifest, [commit.error(problem) for problem in problems]


def spans(steps: Iterable[int]) -> str:
    """Step numbers in words: `0-7, 9`."""
    parts: list[list[int]] = []
    for step in sorted(steps):
        if parts and step == parts[-1][-1] + 1:
            parts[-1][1:] = [step]
        else:
            parts.append([step])
    return ", ".join("-".join(map(str, part)) for part in parts)


def _is_finished(view: RunView, step: int, begun: Set[str]) -> bool:
    file = view.folder / manifest_place(step)
    try:
        record = parse_model(read_stored(file), StepManifest, file).record
    except (OSError, StoredFileError):  # A kill leaves a manifest whole or not at all.
        return False
    return record.outputs.keys() <= begun


def _written(folder: Path) -> dict[str, int]:
    """Paths, relative to a run's folder, whose names begin with the number of their step."""
    places = [place for name in (MANIFESTS, CHECKPOINTS) for place in folder.glob(f"{name}/*")]
    found = {path.relative_to(folder).as_posix(): _STEP.match(path.name) for path in sorted(places)}
    return {place: int(number[1]) for place, number in found.items() if number is not None}


def _config(description: RunDescription, problems: list[Finding]) -> RunConfig | None:
    try:
        return reload_config(description.config)
    except UserError as error:
        problems.append(Finding("error", DESCRIPTION, f"this version cannot read the configuration: {error}"))
        return None


def _deletions(folder: Path, problems: list[Finding]) -> dict[str, Deletion]:
    try:
        return read_deletions(folder)
    except UserError as error:
        problems.append(Finding("error", DELETION_LOG, str(error)))
        return {}


def _entries(folder: Path, problems: list[Finding]) -> list[tuple[int, Entry]]:
    """The entries of the ledger with the numbers of their lines, without a torn last line."""
    try:
        lines = read_lines(folder / LEDGER)
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


def _stored(folder: Path, ref: Ref) -> bytes | None:
    try:
        return read_checked(folder / ref.uri, ref.digest, ref.size)
    except ArtifactError:
        return None  # `verify` reports it with the other artifacts.


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
    """The process starts; a line that repeats the last one is no other start."""
    segments: list[SegmentEntry] = []
    for _, entry in view.entries:
        if isinstance(entry, SegmentEntry) and entry not in segments[-1:]:
            segments.append(entry)
    return segments


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
