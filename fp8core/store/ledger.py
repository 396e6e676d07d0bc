"""The ledger of a run: what is committed, one JSON line an event, fsynced line by line.

A torn last line (`durable`) was never acknowledged; `Ledger.open` cuts it off. Iterations count from 1. Step 0
precedes them (warm start, first scales, first evaluation), so that the policy after step n is version n. When a task or
a step was computed again, its later entry wins.
"""

import os
import threading
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from fp8core import durable
from fp8core.errors import StoredFileError, UserError
from fp8core.store.artifacts import Ref
from fp8core.store.json_text import Seconds, StepNumber, UnixMilliseconds, UnixSeconds, mistake

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
    storing: Seconds = Field(0.0, description="Of these, seconds of encoding, hashing, writing and reading files.")


class StepEntry(_Entry):
    """A finished step; every task of it is committed."""

    event: Literal["step"] = "step"
    step: StepNumber
    manifest: Ref = Field(description="The step's manifest; `manifests/` holds a second copy for people.")
    weights_digest: str = Field(description="Of the policy that the step produced.")
    committed_ms: UnixMilliseconds = Field(description="Unix milliseconds.")
    seconds: Seconds = Field(0.0, description="How long its manifest took, up to this line.")
    compiled: int | None = Field(
        None, ge=0, description="Kernels that were compiled since the step before; null: not counted (no GPU)."
    )


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

    @property
    def gave_policy(self) -> bool:
        """True for an update; of any other task, completions began anew."""
        return any(ref.kind == "policy" for ref in self.outputs.values())


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


class _Index:
    """Entries by kind and step; later ones replace earlier ones."""

    def __init__(self) -> None:
        self.tasks: dict[int, dict[str, TaskEntry]] = {}
        self.steps: dict[int, StepEntry] = {}
        self.checkpoints: list[CheckpointEntry] = []
        self.segments: list[SegmentEntry] = []
        self.redone: dict[int, dict[str, RedoEntry]] = {}
        self.bounds: list[BoundEntry] = []
        self.removed: set[int] = set()

    def add(self, entry: Entry) -> None:
        match entry:
            case TaskEntry():
                self.tasks.setdefault(entry.step, {})[entry.task] = entry
                # It ran anew, from other inputs or by other code than what was redone before.
                self.redone.get(entry.step, {}).pop(entry.task, None)
            case StepEntry():
                self.steps[entry.step] = entry
            case CheckpointEntry():
                self.checkpoints.append(entry)
            case SegmentEntry():
                self.segments.append(entry)
            case RedoEntry():
                self.redone.setdefault(entry.step, {})[entry.task] = entry
            case BoundEntry():
                self.bounds.append(entry)
            case RemovalEntry():
                self.removed |= set(entry.steps)


def _read(path: Path) -> tuple[_Index, int]:
    """The entries of a ledger, and where its last whole line ends."""
    try:
        lines, end = durable.read_lines(path)
    except OSError as error:
        raise StoredFileError(f"cannot read the ledger {path}: {error.strerror}") from error
    index = _Index()
    for number, line in enumerate(lines, start=1):
        try:
            entry = ENTRY.validate_json(line)
        except ValidationError as error:
            raise StoredFileError(f"{path}:{number}: not a ledger entry: {mistake(error)}") from error
        index.add(entry)
    return index, end


class LedgerView:
    """The entries of a ledger, read-only: the run may be live."""

    def __init__(self, path: Path, index: _Index) -> None:
        self._path = path
        self._index = index

    @classmethod
    def read(cls, path: Path) -> "LedgerView":
        """The entries of this moment.

        Raises UserError: no ledger, or a malformed line (file:line).
        """
        return LedgerView(path, _read(path)[0])

    def holds_work(self) -> bool:
        """True if any task is finished; before that, the run's configuration may still change."""
        return bool(self.tasks(START))

    def tasks(self, step: int) -> dict[str, TaskEntry]:
        return dict(self._index.tasks.get(step, {}))

    def begun(self) -> list[int]:
        """Steps with a finished task or a redo that gave another result, finished or not, in order."""
        return sorted(self._index.tasks.keys() | self._index.redone.keys())

    def artifacts(self, step: int) -> dict[str, Ref]:
        return {name: ref for task in self.tasks(step).values() for name, ref in task.outputs.items()}

    def redone(self, step: int) -> dict[str, RedoEntry]:
        """The redos of a step, by task, that gave another result, and after which the task did not run anew."""
        return dict(self._index.redone.get(step, {}))

    def outputs(self, step: int) -> list[tuple[str, Ref]]:
        """All artifacts by name that the finished tasks of a step stored, and that their redos gave."""
        made: list[TaskEntry | RedoEntry] = [*self.tasks(step).values(), *self.redone(step).values()]
        return [named for entry in made for named in entry.outputs.items()]

    def effective_outputs(self, step: int) -> dict[str, Ref]:
        """`artifacts` as the next step reads them: a redo that gave another result replaces the task's."""
        redone = [ref for entry in self.redone(step).values() for ref in entry.outputs.items()]
        return {**self.artifacts(step), **dict(redone)}

    def inexact_steps(self) -> list[int]:
        """Steps whose update, redone, gave another policy, and those after which completions began anew."""
        # Copies: another thread may append.
        redone = [entry for tasks in list(self._index.redone.values()) for entry in list(tasks.values())]
        return sorted({entry.step for entry in redone})

    def step(self, number: int) -> StepEntry | None:
        return self._index.steps.get(number)

    def refuse_gap(self, first: int, last: int) -> None:
        """Raises StoredFileError: a step from `first` to `last` is not finished."""
        for index in range(first, last + 1):
            if self.step(index) is None:
                raise StoredFileError(f"{self._path}: step {last} is committed, but step {index} is not")

    def steps(self) -> dict[int, StepEntry]:
        return dict(self._index.steps)

    def last_step(self) -> int | None:
        """The highest finished step (0: the warm start); None when there is none."""
        return max(self._index.steps, default=None)

    def checkpoints(self) -> list[CheckpointEntry]:
        """The checkpoints in the order in which they were written."""
        return list(self._index.checkpoints)

    def newest_checkpoints(self) -> Iterator[CheckpointEntry]:
        """The checkpoints from the last one back."""
        yield from reversed(self.checkpoints())

    def segments(self) -> list[SegmentEntry]:
        return list(self._index.segments)

    def last_segment(self) -> SegmentEntry | None:
        return self._index.segments[-1] if self._index.segments else None

    def was_cut(self, number: int) -> bool:
        """True if a process began between the first task of a finished step and its commit."""
        index = self._index
        began, ended = (
            min(task.started for task in index.tasks[number].values()),
            index.steps[number].committed_ms / 1000,
        )
        return any(began < segment.started < ended for segment in index.segments)

    def bounds(self, since: int) -> list[BoundEntry]:
        """The crossings of bounds by step `since`, an iteration, and later ones, in order."""
        return [entry for entry in self._index.bounds if entry.step >= since]

    def removed(self) -> set[int]:
        """Steps whose files, but for metrics and policy, gc removed."""
        return set(self._index.removed)

    def last_bound(self) -> BoundEntry | None:
        return self._index.bounds[-1] if self._index.bounds else None


class Ledger(LedgerView):
    """A ledger open for appending; the one writer holds the run's lock. Safe for threads."""

    def __init__(self, path: Path, file: FileIO, index: _Index) -> None:
        super().__init__(path, index)
        self._file = file
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open or create a ledger, and cut off a torn last line.

        Raises UserError for any other line that is malformed (file:line), and when the file cannot be read or written.
        """
        durable.make_folder(path.parent)
        index, end = _read(path) if path.exists() else (_Index(), 0)
        try:
            file = FileIO(path, "a")
            durable.sync_path(path.parent)
            file.truncate(end)
            os.fsync(file.fileno())
        except OSError as error:
            raise durable.unwritable(path, error) from error
        return cls(path, file, index)

    def append(self, *entries: Entry) -> None:
        """Append entries durably, in one write. Raises UserError (a full disk), and then appends nothing."""
        with self._lock:
            lines = b"".join(entry.model_dump_json().encode() + b"\n" for entry in entries)
            try:
                durable.append_durably(self._file, lines)
            except OSError as error:
                raise UserError(f"cannot append to the ledger {self._path}: {error.strerror}") from error
            for entry in entries:
                self._index.add(entry)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()
