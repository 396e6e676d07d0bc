"""The ledger of a run: what is committed, one JSON line an event, fsynced line by line.

A torn last line was never acknowledged. Step 0 precedes the iterations (warm start, first scales, first evaluation),
so that the policy after step n is version n. When a task or a step was computed again, its later entry wins.
"""

import hashlib
import os
import threading
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from fp8core import durable
from fp8core.errors import StoredFileError, UserError
from fp8core.store.artifacts import ArtifactStore, Ref
from fp8core.store.json_text import Seconds, StepNumber, UnixMilliseconds, UnixSeconds, canonical_json, mistake
from fp8core.store.metrics import OF_START, start_metrics

START = 0
"""The step that precedes the first iteration."""


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TaskEntry(_Entry):
    """A finished task of a step, its outputs stored."""

    event: Literal["task"] = "task"
    step: StepNumber
    task: str = Field(description="Name of the task in its step.")
    key: str = Field(description="Digest of what the task is a function of: inputs, options, code.")
    outputs: dict[str, Ref] = Field(description="Artifact name -> stored artifact.")
    started: UnixSeconds = Field(description="Unix seconds.")
    seconds: Seconds = Field(description="How long it took, by a clock that never goes back.")


class StepEntry(_Entry):
    """A finished step; every task of it is committed."""

    event: Literal["step"] = "step"
    step: StepNumber
    manifest: Ref = Field(description="The step's manifest; `manifests/` holds a second copy for people.")
    weights_digest: str = Field(description="Of the policy that the step produced.")
    committed_ms: UnixMilliseconds = Field(description="Unix milliseconds.")
    seconds: Seconds = Field(0.0, description="How long its manifest took, up to this line.")


class CheckpointEntry(_Entry):
    """Weights and optimiser as they are after a step, on disk."""

    event: Literal["checkpoint"] = "checkpoint"
    step: StepNumber
    uri: str = Field(pattern=r"^checkpoints/[0-9]{5,8}$", description="Path relative to the run directory.")
    digest: str = Field(description="Of the folder (`durable`).")
    weights_digest: str = Field(description="Of the policy in it (`numerics.fingerprint`).")
    seconds: Seconds = Field(0.0, description="How long it took, up to this line.")


class SegmentEntry(_Entry):
    """The start of a process on this run; steps up to the next one were made by its code."""

    event: Literal["segment"] = "segment"
    pid: int = Field(ge=0, description="Of the process.")
    host: str = Field(description="Name of its machine.")
    code_version: str = Field(description="Digest of its sources (`manifest.code_version`).")
    started: UnixSeconds = Field(description="Unix seconds.")
    steps: int | None = Field(None, ge=1, description="That it was to come to; null in older runs.")
    data: str | None = Field(
        None, description="Of all problems that it used, held-out ones too; null for generated ones and in older runs."
    )
    left_out: int = Field(0, ge=0, description="Rows that it did not use (`data.unreadable`).")


class RedoEntry(_Entry):
    """A task that was redone and gave another outcome than the ledger named; the run went on from the new one."""

    event: Literal["redo"] = "redo"
    step: StepNumber
    task: str = Field(description="Name of the task in its step.")
    outputs: dict[str, Ref] = Field(description="Artifact name -> what the run goes on from, in place of the task's.")
    code_version: str = Field(description="Of the process that redid it.")


class BoundEntry(_Entry):
    """A bound of `alignment.stop` that was crossed, and what was done about it: counting begins anew after the step."""

    event: Literal["bound"] = "bound"
    step: StepNumber
    bound: str = Field(description="The setting, such as alignment.stop.k3.")
    action: Literal["warn", "pause", "fail"] = Field(description="What was done.")
    reason: str = Field(description="The bound and the values beyond it, in words.")


class RemovalEntry(_Entry):
    """Steps that `fp8-grpo gc` thinned out: of their files only manifest, metrics and policy are kept."""

    event: Literal["removal"] = "removal"
    steps: list[StepNumber] = Field(description="Of which files were about to be removed.")
    when: UnixSeconds = Field(description="Unix seconds.")


Entry = Annotated[
    TaskEntry | StepEntry | CheckpointEntry | SegmentEntry | RedoEntry | BoundEntry | RemovalEntry,
    Field(discriminator="event"),
]

ENTRY: TypeAdapter[Entry] = TypeAdapter(Entry)
_EntryOf = TypeVar("_EntryOf", bound=_Entry)


def _read(path: Path) -> tuple[list[Entry], int]:
    try:
        lines, end = durable.read_lines(path)
    except OSError as error:
        raise StoredFileError(f"{path}: cannot be read: {error.strerror}") from error
    entries = list[Entry]()
    for number, line in enumerate(lines, start=1):
        try:
            entries.append(ENTRY.validate_json(line))
        except ValidationError as error:
            raise StoredFileError(f"{path}:{number}: not a ledger entry: {mistake(error)}") from error
    return entries, end


class LedgerView:
    def __init__(self, path: Path, entries: Sequence[Entry] = ()) -> None:
        self._path = path
        self.entries = list[Entry]()
        self._tasks: dict[int, dict[str, TaskEntry]] = {}
        self._steps: dict[int, StepEntry] = {}
        self._redone: dict[int, dict[str, RedoEntry]] = {}
        for entry in entries:
            self._add(entry)

    @classmethod
    def read(cls, path: Path) -> "LedgerView":
        """Raises UserError: no ledger, or a malformed line (file:line)."""
        return LedgerView(path, _read(path)[0])

    def _add(self, entry: Entry) -> None:
        self.entries.append(entry)
        match entry:
            case TaskEntry():
                self._tasks.setdefault(entry.step, {})[entry.task] = entry
                # It ran anew, from other inputs or by other code than what was redone before.
                self._redone.get(entry.step, {}).pop(entry.task, None)
            case StepEntry():
                self._steps[entry.step] = entry
            case RedoEntry():
                self._redone.setdefault(entry.step, {})[entry.task] = entry
            case _:
                pass

    def _of(self, kind: type[_EntryOf]) -> list[_EntryOf]:
        return [entry for entry in self.entries if isinstance(entry, kind)]

    def holds_work(self) -> bool:
        """True if any task is finished; before that, the run's configuration may still change."""
        return bool(self.tasks(START))

    def tasks(self, step: int) -> dict[str, TaskEntry]:
        return dict(self._tasks.get(step, {}))

    def task_steps(self) -> list[int]:
        return sorted(self._tasks.keys() | self._redone.keys())

    def artifacts(self, step: int) -> dict[str, Ref]:
        return {name: ref for task in self.tasks(step).values() for name, ref in task.outputs.items()}

    def redone(self, step: int) -> dict[str, RedoEntry]:
        """The redos of a step, by task, after which the task did not run anew."""
        return dict(self._redone.get(step, {}))

    def outputs(self, step: int) -> list[tuple[str, Ref]]:
        entries: list[TaskEntry | RedoEntry] = [*self.tasks(step).values(), *self.redone(step).values()]
        return [item for entry in entries for item in entry.outputs.items()]

    def effective_outputs(self, step: int) -> dict[str, Ref]:
        """`artifacts` as the next step reads them: a redo that gave another result replaces the task's."""
        redone = [ref for entry in self.redone(step).values() for ref in entry.outputs.items()]
        return {**self.artifacts(step), **dict(redone)}

    def inexact_steps(self) -> list[int]:
        """Steps whose update, redone, gave another policy, and those after which completions began anew."""
        # A copy: another thread may append.
        return sorted(step for step, tasks in list(self._redone.items()) if tasks)

    def step(self, number: int) -> StepEntry | None:
        return self._steps.get(number)

    def check_no_gap(self, first: int, last: int) -> None:
        for index in range(first, last + 1):
            if self.step(index) is None:
                raise StoredFileError(f"{self._path}: step {last} is committed, but step {index} is not")

    def steps(self) -> dict[int, StepEntry]:
        return dict(self._steps)

    def last_step(self) -> int | None:
        return max(self._steps, default=None)

    def checkpoints(self) -> list[CheckpointEntry]:
        return self._of(CheckpointEntry)

    def last_checkpoints(self) -> list[CheckpointEntry]:
        return list({entry.step: entry for entry in self.checkpoints()}.values())[::-1]

    def held_policy(self, entry: CheckpointEntry) -> Ref | None:
        """The policy that the run went on from after a step, if the checkpoint holds it; None: a redo gave another."""
        content = {"version": entry.step, "weights_digest": entry.weights_digest}
        digest = hashlib.sha256(canonical_json(content, "policy")).hexdigest()
        effective = self.effective_outputs(entry.step).values()
        return next((ref for ref in effective if ref.kind == "policy" and ref.digest == digest), None)

    def segments(self) -> list[SegmentEntry]:
        return self._of(SegmentEntry)

    def last_segment(self) -> SegmentEntry | None:
        return next(reversed(self.segments()), None)

    def was_cut(self, number: int) -> bool:
        """True if a process began between the first task of a finished step and its commit."""
        began = min(task.started for task in self._tasks[number].values())
        end = self._steps[number].committed_ms / 1000
        return any(began < segment.started < end for segment in self.segments())

    def bounds(self, since: int) -> list[BoundEntry]:
        return [entry for entry in self._of(BoundEntry) if entry.step >= since]

    def removed_steps(self) -> set[int]:
        return {step for entry in self._of(RemovalEntry) for step in entry.steps}

    def last_bound(self) -> BoundEntry | None:
        return next(reversed(self._of(BoundEntry)), None)


class Ledger(LedgerView):
    def __init__(self, path: Path, file: FileIO, entries: Sequence[Entry]) -> None:
        super().__init__(path, entries)
        self._file = file
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path) -> Self:
        """Truncates a torn last line. Raises UserError: a malformed line (file:line), the disk."""
        durable.make_folder(path.parent)
        entries, end = _read(path) if path.exists() else ([], 0)
        try:
            file = FileIO(path, "a")
            durable.sync_path(path.parent)
            file.truncate(end)
            os.fsync(file.fileno())
        except OSError as error:
            raise durable.unwritable(path, error) from error
        return cls(path, file, entries)

    def append(self, *entries: Entry) -> None:
        """In one write. Raises UserError (a full disk), and then appends nothing."""
        with self._lock:
            lines = b"".join(entry.model_dump_json().encode() + b"\n" for entry in entries)
            try:
                durable.append_durably(self._file, lines)
            except OSError as error:
                raise UserError(f"cannot append to the ledger {self._path}: {error.strerror}") from error
            for entry in entries:
                self._add(entry)

    def close(self) -> None:
        self._file.close()


def weights_of(ledger: LedgerView, store: ArtifactStore, step: int) -> list[str]:
    """Digests of the weights that a finished step made, and then its redos. Raises ArtifactError."""
    redone = [ref for redo in ledger.redone(step).values() for ref in redo.outputs.values() if ref.kind == "policy"]
    return [ledger.steps()[step].weights_digest, *(store.get_json(ref)["weights_digest"] for ref in redone)]


def stored_metrics(ledger: LedgerView, store: ArtifactStore, index: int) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for ref in ledger.artifacts(index).values():
        if index == START and ref.kind in OF_START:
            metrics |= start_metrics(ref.kind, store.get_json(ref))
        if index > START and ref.kind == "metrics":
            metrics |= store.get_json(ref)
    return metrics


class StartTask(NamedTuple):
    """The ledger has it under the name of the step that does the same later, people see `stage`."""

    stage: str
    outputs: Mapping[str, str]


START_TASKS: Final[Mapping[str, StartTask]] = {
    "warm_start": StartTask(
        "warm_start", {"policy": "policy", "reference_policy": "reference_policy", "weights": "weights"}
    ),
    "calibrate": StartTask("first_scales", {"scales": "scales"}),
    "evaluate": StartTask(
        "first_evaluation", {"evaluation": "evaluation", "heldout_turns": "turns", "heldout_judgements": "judgements"}
    ),
    "stream": StartTask("stream", {"stream": "stream"}),
    "draws": StartTask("draws", {"draws": "draws"}),
    "precision_gap": StartTask("precision_gap", {"precision_gap": "precision_gap", "gap_judgements": "judgements"}),
}
"""Name in the ledger -> task, in the order in which they run; not every run has the last three."""

CARRIED_FROM: Final[Mapping[str, str]] = {
    "policy": "warm_start",
    "reference_policy": "warm_start",
    "scales": "calibrate",
    "stream": "stream",
    "draws": "draws",
}
"""Artifact that an iteration may start from -> the task of step 0 that makes the first one."""
CARRIED_KINDS: Final[Mapping[str, str]] = {
    artifact: START_TASKS[task].outputs[artifact] for artifact, task in CARRIED_FROM.items()
}
