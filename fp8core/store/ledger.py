"""The ledger of a run: what is committed, one JSON line an event, fsynced line by line.

A torn last line (`durable`) was never acknowledged; `Ledger.open` cuts it off. Iterations count from 1. Step 0
precedes them (warm start, first scales, first evaluation), so that the policy after step n is version n. When a task or
a step was computed again, its later entry wins.

Tasks and steps never go back to an earlier step, and a redo comes after its step. So a run resumes from both ends of
its ledger: step 0 at the start, steps from the last checkpoint on at the tail. The middle is read when a question needs
it.
"""

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from fp8core.durable import (
    Line,
    append_durably,
    lines_backward,
    lines_forward,
    make_folder,
    read_stored,
    sole_file,
    stored_file,
    sync_path,
    unwritable,
    whole_end,
)
from fp8core.errors import StoredFileError, UserError
from fp8core.store.artifacts import Ref
from fp8core.store.json_text import MOST_STEPS, Seconds, StepNumber, UnixMilliseconds, UnixSeconds, mistake
from fp8core.store.layout import checkpoint_place

START = 0
"""The step that precedes the first iteration."""

Name = Annotated[str, Field(max_length=500)]
Digest = Annotated[str, Field(max_length=128)]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TaskEntry(_Entry):
    """A finished task of a step, its outputs stored."""

    event: Literal["task"] = "task"
    step: StepNumber
    task: Name = Field(description="Name of the task in its step.")
    key: Digest = Field(description="Digest of what the task is a function of: inputs, options, code.")
    outputs: dict[str, Ref] = Field(description="Artifact name -> stored artifact.")
    started: UnixSeconds = Field(description="Unix seconds.")
    seconds: Seconds = Field(description="How long it took, by a clock that never goes back.")
    storing: Seconds = Field(0.0, description="Of these, seconds of encoding, hashing, writing and reading files.")


class StepEntry(_Entry):
    """A finished step; every task of it is committed."""

    event: Literal["step"] = "step"
    step: StepNumber
    manifest: Ref = Field(description="The step's manifest; `manifests/` holds a second copy for people.")
    weights_digest: Digest = Field(description="Of the policy that the step produced.")
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
    digest: Digest = Field(description="Of the folder (`durable`).")
    weights_digest: Digest = Field(description="Of the policy in it (`numerics.fingerprint`).")
    seconds: Seconds = Field(0.0, description="How long it took, up to this line.")

    @model_validator(mode="after")
    def _named_by_its_step(self) -> Self:
        if self.uri != checkpoint_place(self.step):
            raise ValueError("uri: is not that of the step")
        return self


class SegmentEntry(_Entry):
    """The start of a process on this run; steps up to the next one were made by its code."""

    event: Literal["segment"] = "segment"
    pid: int = Field(ge=0, lt=1 << 63, description="Of the process.")
    host: Name = Field(description="Name of its machine.")
    code_version: Digest = Field(description="Digest of its sources (`manifest.code_version`).")
    started: UnixSeconds = Field(description="Unix seconds.")
    steps: int | None = Field(None, ge=1, le=MOST_STEPS, description="That it was to come to; null in older runs.")
    data: Digest | None = Field(
        None, description="Of all problems that it used, held-out ones too; null for generated ones and in older runs."
    )
    left_out: int = Field(0, ge=0, description="Rows that it did not use (`data.unreadable`).")


class RedoEntry(_Entry):
    """A task that was redone and gave another outcome than the ledger named; the run went on from the new one."""

    event: Literal["redo"] = "redo"
    step: StepNumber
    task: Name = Field(description="Name of the task in its step.")
    outputs: dict[str, Ref] = Field(description="Artifact name -> what the run goes on from, in place of the task's.")
    code_version: Digest = Field(description="Of the process that redid it.")

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


Entry = Annotated[
    TaskEntry | StepEntry | CheckpointEntry | SegmentEntry | RedoEntry | BoundEntry, Field(discriminator="event")
]

ENTRY: TypeAdapter[Entry] = TypeAdapter(Entry)


class _Index:
    """Entries by kind and step; later ones replace earlier ones."""

    def __init__(self, reached: int = -1) -> None:
        self.tasks: dict[int, dict[str, TaskEntry]] = {}
        self.steps: dict[int, StepEntry] = {}
        self.checkpoints: list[CheckpointEntry] = []
        self.segments: list[SegmentEntry] = []
        self.redone: dict[int, dict[str, RedoEntry]] = {}
        self.bounds: list[BoundEntry] = []
        self._reached = reached

    def misplaced(self, entry: Entry) -> str | None:
        match entry:
            case TaskEntry() | StepEntry() if entry.step < self._reached:
                return f"an entry of step {entry.step} after step {self._reached}"
            case RedoEntry() if entry.step > self._reached:
                return f"a redo of step {entry.step}, which was not done before"
            case BoundEntry() if entry.step > self._reached:
                return f"a bound crossed by step {entry.step}, which was not done before"
        return None

    def refuse_misplaced(self, entries: Iterable[Entry]) -> None:
        """Asserts that entries keep the order, each after those before it."""
        checked = _Index(self._reached)
        for entry in entries:
            reason = checked.misplaced(entry)
            assert reason is None, reason
            checked.add(entry)

    def add(self, entry: Entry) -> None:
        match entry:
            case TaskEntry():
                self.tasks.setdefault(entry.step, {})[entry.task] = entry
                # It ran anew, from other inputs or by other code than what was redone before.
                self.redone.get(entry.step, {}).pop(entry.task, None)
                self._reached = entry.step
            case StepEntry():
                self.steps[entry.step] = entry
                self._reached = entry.step
            case CheckpointEntry():
                self.checkpoints.append(entry)
            case SegmentEntry() if entry not in self.segments[-1:]:
                self.segments.append(entry)
            case RedoEntry():
                self.redone.setdefault(entry.step, {})[entry.task] = entry
            case BoundEntry() if entry not in self.bounds[-1:]:
                self.bounds.append(entry)


class _Read(NamedTuple):
    """The entries of step 0, those of the steps from `since` on, and the end of the file.

    With `since` 0 everything was read, and start and tail are one index.
    """

    start: _Index
    tail: _Index
    since: int
    end: int


@contextmanager
def _reading(path: Path) -> Iterator[FileIO]:
    try:
        with FileIO(path, opener=stored_file) as file:
            yield file
    except OSError as error:
        raise StoredFileError(f"cannot read the ledger {path}: {error.strerror}") from error


def _refusal(path: Path, offset: int, reason: str) -> StoredFileError:
    number = read_stored(path)[:offset].count(b"\n") + 1
    return StoredFileError(f"{path}:{number}: {reason}")


def _parse(path: Path, line: Line) -> tuple[int, Entry]:
    offset, content = line
    try:
        return offset, ENTRY.validate_json(content)
    except ValidationError as error:
        raise _refusal(path, offset, f"not a ledger entry: {mistake(error)}") from error


def _indexed(path: Path, entries: Iterable[tuple[int, Entry]], reached: int = -1) -> _Index:
    index = _Index(reached)
    for offset, entry in entries:
        reason = index.misplaced(entry)
        if reason is not None:
            raise _refusal(path, offset, f"not in the order of the steps: {reason}")
        index.add(entry)
    return index


def _read_whole(path: Path, end: int | None = None) -> _Read:
    with _reading(path) as file:
        end = whole_end(file) if end is None else end
        index = _indexed(path, (_parse(path, line) for line in lines_forward(file, 0, end)))
    return _Read(index, index, START, end)


def _read_ends(path: Path) -> _Read:
    with _reading(path) as file:
        end = whole_end(file)
        start, begin = _read_start(path, file, end)
        tail, since, reached = _read_tail(path, file, begin, end)
    if since == START:
        whole = _indexed(path, [*start, *tail])
        return _Read(whole, whole, START, end)
    return _Read(_indexed(path, start), _indexed(path, tail, reached), since, end)


def _read_start(path: Path, file: FileIO, end: int) -> tuple[list[tuple[int, Entry]], int]:
    """The entries before the first one of an iteration, and where that one begins."""
    entries: list[tuple[int, Entry]] = []
    for line in lines_forward(file, 0, end):
        offset, entry = located = _parse(path, line)
        if isinstance(entry, TaskEntry | StepEntry) and entry.step > START:
            return entries, offset
        entries.append(located)
    return entries, end


def _read_tail(path: Path, file: FileIO, begin: int, end: int) -> tuple[list[tuple[int, Entry]], int, int]:
    """The entries from the step of the last checkpoint on, that step (0: read back to `begin`), and the step before."""
    entries: list[tuple[int, Entry]] = []
    checkpoint = None
    for line in islice(lines_backward(file, end), 1, None):
        if line[0] < begin:
            break
        _, entry = located = _parse(path, line)
        match entry:
            case TaskEntry() | StepEntry() if checkpoint is not None and entry.step < checkpoint:
                return entries[::-1], checkpoint, entry.step
            case CheckpointEntry() if checkpoint is None:
                checkpoint = entry.step
        entries.append(located)
    return entries[::-1], START, -1


class LedgerView:
    """The entries of a ledger, read-only: the run may be live.

    After `glance`, which reads the two ends, a question about the middle reads the whole file once. It may raise
    UserError as `read` does.
    """

    def __init__(self, path: Path, read: _Read) -> None:
        self._path = path
        self._read = read
        self._lock = threading.Lock()

    @classmethod
    def read(cls, path: Path) -> "LedgerView":
        """The entries of this moment, every line checked.

        Raises UserError: no ledger, or a line that is malformed or in the wrong place (file:line).
        """
        return LedgerView(path, _read_whole(path))

    @classmethod
    def glance(cls, path: Path) -> "LedgerView":
        """The entries of this moment, at the cost of the steps since the last checkpoint; raises as `read`."""
        return LedgerView(path, _read_ends(path))

    def holds_work(self) -> bool:
        """True if any task is finished; before that, the run's configuration may still change."""
        return bool(self.tasks(START))

    def tasks(self, step: int) -> dict[str, TaskEntry]:
        return dict(self._of(step).tasks.get(step, {}))

    def begun(self) -> list[int]:
        """Steps with a finished task or a redo that gave another result, finished or not, in order."""
        return sorted(self._all().tasks.keys() | self._all().redone.keys())

    def artifacts(self, step: int) -> dict[str, Ref]:
        return {name: ref for task in self.tasks(step).values() for name, ref in task.outputs.items()}

    def redone(self, step: int) -> dict[str, RedoEntry]:
        """The redos of a step, by task, that gave another result, and after which the task did not run anew."""
        # A redo may be anywhere after its step.
        index = self._read.tail if step >= self._read.since else self._all()
        return dict(index.redone.get(step, {}))

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
        redone = [entry for tasks in list(self._all().redone.values()) for entry in list(tasks.values())]
        return sorted({entry.step for entry in redone})

    def step(self, number: int) -> StepEntry | None:
        return self._of(number).steps.get(number)

    def refuse_gap(self, first: int, last: int) -> None:
        """Raises StoredFileError: a step from `first` to `last` is not finished."""
        for index in range(first, last + 1):
            if self.step(index) is None:
                raise StoredFileError(f"{self._path}: step {last} is committed, but step {index} is not")

    def steps(self) -> dict[int, StepEntry]:
        return dict(self._all().steps)

    def last_step(self) -> int | None:
        """The highest finished step (0: the warm start); None when there is none."""
        return max(self._read.tail.steps or self._all().steps, default=None)

    def checkpoints(self) -> list[CheckpointEntry]:
        """The checkpoints in the order in which they were written."""
        return list(self._all().checkpoints)

    def newest_checkpoints(self) -> Iterator[CheckpointEntry]:
        """The checkpoints from the last one back; the second may need the whole file."""
        newest = list(self._read.tail.checkpoints)
        yield from reversed(newest)
        older = self.checkpoints()
        yield from reversed(older[: len(older) - len(newest)])

    def segments(self) -> list[SegmentEntry]:
        return list(self._all().segments)

    def last_segment(self) -> SegmentEntry | None:
        segments = self._read.tail.segments or self._all().segments
        return segments[-1] if segments else None

    def was_cut(self, number: int) -> bool:
        """True if a process began between the first task of a finished step and its commit."""
        index = self._of(number)
        began, ended = (
            min(task.started for task in index.tasks[number].values()),
            index.steps[number].committed_ms / 1000,
        )
        return any(began < segment.started < ended for segment in index.segments)

    def bounds(self, since: int) -> list[BoundEntry]:
        """The crossings of bounds by step `since`, an iteration, and later ones, in order."""
        return [entry for entry in self._of(since).bounds if entry.step >= since]

    def last_bound(self) -> BoundEntry | None:
        return self._read.tail.bounds[-1] if self._read.tail.bounds else None

    def _of(self, step: int) -> _Index:
        read = self._read
        if step >= read.since:
            return read.tail
        return read.start if step == START else self._all()

    def _all(self) -> _Index:
        with self._lock:
            if self._read.since > START:
                self._read = _read_whole(self._path, self._read.end)
            return self._read.tail


class Ledger(LedgerView):
    """A ledger open for appending; the one writer holds the run's lock. Safe for threads."""

    def __init__(self, path: Path, file: FileIO, read: _Read) -> None:
        super().__init__(path, read)
        self._file = file

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open or create a ledger, read its ends, and cut off a torn last line.

        Raises UserError for any other line there that is malformed or in the wrong place (file:line), and when the
        file cannot be read or written.
        """
        make_folder(path.parent)
        read = _read_ends(path) if path.exists() else _Read(empty := _Index(), empty, START, 0)
        try:
            file = FileIO(path, "a", opener=sole_file)
            sync_path(path.parent)
            file.truncate(read.end)
            os.fsync(file.fileno())
        except OSError as error:
            raise unwritable(path, error) from error
        return cls(path, file, read)

    def append(self, *entries: Entry) -> None:
        """Append entries durably, in one write. Raises UserError (a full disk), and then appends nothing."""
        with self._lock:
            index = self._read.tail
            index.refuse_misplaced(entries)
            # Repeated with every checkpoint, so that the tail has the last process start and crossing.
            checkpoint = any(isinstance(entry, CheckpointEntry) for entry in entries)
            repeated = [*index.segments[-1:], *index.bounds[-1:]] if checkpoint else []
            lines = b"".join(line.model_dump_json().encode() + b"\n" for line in [*repeated, *entries])
            try:
                append_durably(self._file, lines)
            except OSError as error:
                raise UserError(f"cannot append to the ledger {self._path}: {error.strerror}") from error
            for entry in entries:
                index.add(entry)
            self._read = self._read._replace(end=self._read.end + len(lines))

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()
