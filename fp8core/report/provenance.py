"""Where a run comes from: its configuration, and by which code, libraries and machines each of its steps was made."""

from collections import defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime

from pydantic import JsonValue

from fp8core.config.load import config_digest
from fp8core.store.ledger import START, SegmentEntry, TaskEntry
from fp8core.store.manifest import StepManifest, record_digest
from fp8core.store.run_view import RunView, spans

_SHOWN_DIGITS = 12


@dataclass
class Provenance:
    """The facts in the manifests of a run, gathered one by one: fact -> value -> the steps it held for."""

    seen: dict[str, dict[str, list[int]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    last: StepManifest | None = None

    def add(self, manifest: StepManifest) -> None:
        """Take note of one step."""
        record, observed = manifest.record, manifest.observed
        facts = {
            "level": record.level,
            "code": record.code_version,
            "git": _git(observed.git),
            "machine": _listed(observed.hardware),
            "libraries": _listed(dict(record.versions)),
            "model revision": record.model_revision or "none",
        }
        for fact, value in facts.items():
            self.seen[fact][value].append(record.step)
        self.last = manifest

    def text(self, evidence: RunView) -> str:
        """`lines`, aligned."""
        lines = self.lines(evidence)
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)

    def lines(self, evidence: RunView) -> list[tuple[str, str]]:
        """Everything as facts with their values; values that changed name their steps."""
        described, config = evidence.description, evidence.config
        lines = [("run", f"{evidence.folder} (id {described.id}, begun {described.created})")]
        if config is not None:
            lines.append(("configuration", f"{config.name} ({config_digest(config)[:_SHOWN_DIGITS]})"))
        if self.last is not None:
            lines.append(("steps", f"{spans(evidence.steps)} committed, {self.last.record.steps} asked for"))
        lines += [("not committed", f"step {step}: {', '.join(tasks)}") for step, tasks in _open(evidence).items()]
        for number, segment in enumerate(_segments(evidence), start=1):
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

    def content(self, evidence: RunView) -> dict[str, JsonValue]:
        """The same as JSON types, with whole digests."""
        config = evidence.config
        return {
            "folder": str(evidence.folder),
            "id": evidence.description.id,
            "begun": evidence.description.created,
            "configuration": config.name if config is not None else None,
            "config_digest": config_digest(config) if config is not None else None,
            "steps": spans(evidence.steps),
            "steps_asked_for": self.last.record.steps if self.last is not None else None,
            "segments": [segment.model_dump(mode="json", exclude={"event"}) for segment in _segments(evidence)],
            "seen": {
                fact: {value: spans(steps) for value, steps in values.items()} for fact, values in self.seen.items()
            },
            "last_record": record_digest(self.last) if self.last is not None else None,
        }


def _open(evidence: RunView) -> dict[int, list[str]]:
    """The finished tasks of the step that is under way."""
    last, tasks = max(evidence.steps, default=START - 1), defaultdict(list)
    for _, entry in evidence.entries:
        if isinstance(entry, TaskEntry) and entry.step > last:
            tasks[entry.step].append(entry.task)
    return dict(tasks)


def _segments(evidence: RunView) -> list[SegmentEntry]:
    """The process starts; a line that repeats the last one is no other start."""
    segments: list[SegmentEntry] = []
    for _, entry in evidence.entries:
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
