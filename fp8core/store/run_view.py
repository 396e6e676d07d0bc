"""A view of a run's folder, read without its lock; a file that cannot be read becomes a finding."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Literal, Self

from pydantic import JsonValue

from fp8core.config.load import config_digest, reload_config
from fp8core.config.run import RunConfig
from fp8core.errors import StoredFileError, UserError
from fp8core.store.artifacts import Ref
from fp8core.store.layout import DESCRIPTION, LEDGER, MANIFESTS, manifest_place
from fp8core.store.ledger import START, CheckpointEntry, Entry, LedgerView, SegmentEntry, StepEntry, TaskEntry
from fp8core.store.manifest import StepManifest, record_digest
from fp8core.store.run_directory import RunDescription, checkpoint_folders, stored_description

_SHOWN_DIGITS = 12


@dataclass(frozen=True)
class Finding:
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
    entry: StepEntry
    tasks: Mapping[str, TaskEntry]
    code_version: str

    @property
    def step(self) -> int:
        return self.entry.step

    @property
    def place(self) -> str:
        return manifest_place(self.step)

    @property
    def artifacts(self) -> dict[str, Ref]:
        return {name: ref for task in self.tasks.values() for name, ref in task.outputs.items()}

    def error(self, problem: str) -> Finding:
        return Finding("error", self.place, problem, step=self.step)


@dataclass(frozen=True)
class RunView:
    """A run's folder without manifests, artifacts and checkpoints; `config` is None when it cannot be read."""

    folder: Path
    description: RunDescription
    config: RunConfig | None
    ledger: LedgerView
    problems: Sequence[Finding]

    @classmethod
    def read(cls, folder: Path) -> Self:
        description = stored_description(folder)
        ledger = LedgerView(folder / LEDGER)
        config = None
        problems: list[Finding] = []
        try:
            ledger = LedgerView.read(folder / LEDGER)
        except StoredFileError as error:
            place, _, problem = str(error).removeprefix(f"{folder}/").partition(": ")
            problems.append(Finding("error", place, problem))
        try:
            config = reload_config(description.config)
        except UserError as error:
            problems.append(Finding("error", DESCRIPTION, f"this version cannot read the configuration: {error}"))
        return cls(folder, description, config, ledger, problems)

    @property
    def entries(self) -> Iterator[tuple[int, Entry]]:
        return enumerate(self.ledger.entries, start=1)

    @cached_property
    def steps(self) -> dict[int, Commit]:
        commits = dict[int, Commit]()
        code_version = self.description.code_version
        for entry in self.ledger.entries:
            if isinstance(entry, SegmentEntry):
                code_version = entry.code_version
            if isinstance(entry, StepEntry):
                commits[entry.step] = Commit(entry, self.ledger.tasks(entry.step), code_version)
        return commits

    @property
    def commits(self) -> list[Commit]:
        return list(self.steps.values())

    @cached_property
    def removed_digests(self) -> set[str]:
        """Digests of the artifacts of steps that gc thinned out, which no other step has."""
        steps = self.ledger.removed_steps()
        digests = set[str]()
        whole = set[str]()
        for step in self.ledger.task_steps():
            (digests if step in steps else whole).update(ref.digest for _, ref in self.ledger.outputs(step))
        return digests - whole

    @property
    def process_seconds(self) -> list[float]:
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
        missing = next((index for index in range(len(self.steps)) if index not in self.steps), None)
        return None if missing is None else f"step {max(self.steps)} is committed, but step {missing} is not"

    @property
    def cut_end(self) -> str | None:
        """A manifest comes right before the line of its step, so a kill may leave one that is later than the ledger."""
        last = max(self.steps, default=START - 1)
        manifests = (int(path.stem) - 1 for path in (self.folder / MANIFESTS).glob("[0-9]*.json"))
        last_known_step = max((*manifests, *checkpoint_folders(self.folder)), default=last)
        return (
            None
            if last_known_step <= last
            else f"its end is cut off: files are of step {last_known_step} and later, no line is"
        )


def spans(steps: Iterable[int]) -> str:
    """Step numbers in words: `0-7, 9`."""
    parts: list[list[int]] = []
    for step in sorted(steps):
        if parts and step == parts[-1][-1] + 1:
            parts[-1][1:] = [step]
        else:
            parts.append([step])
    return ", ".join("-".join(map(str, part)) for part in parts)


@dataclass
class Provenance:
    """Fact -> value -> the steps it held for."""

    values: dict[str, dict[str, list[int]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    last: StepManifest | None = None

    def add(self, manifest: StepManifest) -> None:
        record = manifest.record
        observations = manifest.observed
        facts = {
            "level": record.level,
            "code": record.code_version,
            "git": _git(observations.git),
            "machine": _value_list(observations.hardware),
            "libraries": _value_list(dict(record.versions)),
            "model revision": record.model_revision or "none",
        }
        if (behaviour := record.executed.get("behaviour")) is not None:
            facts["behaviour"] = str(behaviour)
        for fact, value in facts.items():
            self.values[fact][value].append(record.step)
        self.last = manifest

    def text(self, view: RunView) -> str:
        lines = self.lines(view)
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)

    def lines(self, view: RunView) -> list[tuple[str, str]]:
        description = view.description
        config = view.config
        lines = [("run", f"{view.folder} (id {description.id}, begun {description.created})")]
        if config is not None:
            lines.append(("configuration", f"{config.name} ({config_digest(config)[:_SHOWN_DIGITS]})"))
        if self.last is not None:
            lines.append(("steps", f"{spans(view.steps)} committed, {self.last.record.steps} asked for"))
        open_step = max(view.steps, default=START - 1) + 1
        if tasks := view.ledger.tasks(open_step):
            lines.append(("not committed", f"step {open_step}: {', '.join(tasks)}"))
        for number, segment in enumerate(view.ledger.segments(), start=1):
            code = segment.code_version[:_SHOWN_DIGITS]
            start = datetime.fromtimestamp(segment.started, UTC).isoformat(timespec="seconds")
            text = f"{number}: {start}, process {segment.pid} on {segment.host}, code {code}"
            lines.append(("segment", text))
        for fact, values in self.values.items():
            short_values = {
                value[:_SHOWN_DIGITS] if fact == "code" else value: steps for value, steps in values.items()
            }
            alone = len(short_values) == 1
            lines += [
                (fact, value if alone else f"{value} (steps {spans(steps)})") for value, steps in short_values.items()
            ]
        if self.last is not None:
            lines.append(("last record", record_digest(self.last)))
        return lines


def _git(state: dict[str, JsonValue]) -> str:
    if not state:
        return "no checkout"
    return f"{state['commit']}{', with uncommitted changes' if state['dirty'] else ''}"


def _value_list(values: dict[str, JsonValue]) -> str:
    texts = {
        name: f"{value / 2**30:.0f} GiB" if name == "memory" and isinstance(value, int) else value
        for name, value in values.items()
    }
    return ", ".join(f"{name} {value}" for name, value in texts.items())
