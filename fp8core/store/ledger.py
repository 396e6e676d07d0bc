"""The ledger of a run: what is committed, one JSON line an event, fsynced line by line.

A line counts once it ends with a newline. Only the last line can be torn, by a kill or a power cut in the middle of an
append that was never acknowledged; `Ledger.open` cuts it off. Iterations count from 1; what precedes them (warm start,
first scales, first evaluation) is step 0, so that the policy after step n is version n. When a step was done again (a
redo after a crash), its later entry wins.
"""

import os
import threading
from io import FileIO
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from fp8core.errors import UserError
from fp8core.store.artifacts import Ref
from fp8core.store.durable import make_folder, sync_path

START = 0
"""The step that precedes the first iteration."""

Step = Annotated[int, Field(ge=0)]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TaskEntry(_Entry):
    """A finished task of a step, its outputs stored."""

    event: Literal["task"] = "task"
    step: Step
    task: str
    key: str = Field(description="Digest of what the task is a function of: inputs, options, code.")
    outputs: dict[str, Ref] = Field(description="Artifact name -> stored artifact.")
    started: float = Field(description="Unix seconds.")
    seconds: float = Field(ge=0, description="How long it took, by a clock that never goes back.")


class StepEntry(_Entry):
    """A finished step; every task of it is committed."""

    event: Literal["step"] = "step"
    step: Step
    manifest: Ref
    weights_digest: str = Field(description="Of the policy that the step produced.")
    committed_ms: int = Field(description="Unix milliseconds.")


class CheckpointEntry(_Entry):
    """Weights and optimiser as they are after a step, on disk."""

    event: Literal["checkpoint"] = "checkpoint"
    step: Step
    uri: str = Field(description="Path relative to the run directory.")
    digest: str
    weights_digest: str


class SegmentEntry(_Entry):
    """The start of a process on this run; steps up to the next one were made by its code."""

    event: Literal["segment"] = "segment"
    pid: int
    host: str
    code_version: str
    started: float = Field(description="Unix seconds.")


class RedoEntry(_Entry):
    """An update that was redone and gave another policy than the ledger named; the run went on from the new one."""

    event: Literal["redo"] = "redo"
    step: Step
    task: str
    outputs: dict[str, Ref] = Field(description="Artifact name -> what the run goes on from, in place of the task's.")
    code_version: str = Field(description="Of the process that redid it.")


Entry = Annotated[TaskEntry | StepEntry | CheckpointEntry | SegmentEntry | RedoEntry, Field(discriminator="event")]

_ENTRY: TypeAdapter[Entry] = TypeAdapter(Entry)


def _whole_lines(content: bytes) -> list[bytes]:
    """The lines of a ledger but for a torn last one."""
    lines = content.split(b"\n")[:-1]
    # After a power cut a file can have its new length and zeros for content.
    if lines and b"\0" in lines[-1]:
        lines.pop()
    return lines


def _parse(path: Path, number: int, line: bytes) -> Entry:
    try:
        return _ENTRY.validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(["entry", *(str(part) for part in first["loc"])])
        raise UserError(f"{path}:{number}: not a ledger {place}: {first['msg']}") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the ledger {path}: {error.strerror}") from error


class LedgerView:
    """The entries of a ledger and questions about them; reading changes nothing, a live run can be looked at."""

    def __init__(self, entries: list[Entry]) -> None:
        self._tasks: dict[int, dict[str, TaskEntry]] = {}
        self._steps: dict[int, StepEntry] = {}
        self._checkpoints: list[CheckpointEntry] = []
        self._segments: list[SegmentEntry] = []
        self._redone: dict[int, dict[str, RedoEntry]] = {}
        for entry in entries:
            self._index(entry)

    @classmethod
    def read(cls, path: Path) -> "LedgerView":
        """What is committed at this moment. Raises UserError: no ledger, or a malformed line (file:line)."""
        return LedgerView([_parse(path, i, line) for i, line in enumerate(_whole_lines(_read(path)), start=1)])

    def holds_work(self) -> bool:
        """Whether any task was ever finished; before that, a run may still become another one."""
        return bool(self._tasks or self._steps)

    def tasks(self, step: int) -> dict[str, TaskEntry]:
        """The finished tasks of a step by name."""
        return dict(self._tasks.get(step, {}))

    def artifacts(self, step: int) -> dict[str, Ref]:
        """What the finished tasks of a step stored, by artifact name."""
        return {name: ref for task in self._tasks.get(step, {}).values() for name, ref in task.outputs.items()}

    def redone(self, step: int) -> dict[str, RedoEntry]:
        """The updates of a step, by task, whose redo gave something else."""
        return dict(self._redone.get(step, {}))

    def handed_over(self, step: int) -> dict[str, Ref]:
        """`artifacts` as the next step finds them: where a redo gave something else, that."""
        redone = [ref for entry in self._redone.get(step, {}).values() for ref in entry.outputs.items()]
        return {**self.artifacts(step), **dict(redone)}

    def steps(self) -> dict[int, StepEntry]:
        """The finished steps by number."""
        return dict(self._steps)

    def last_step(self) -> int | None:
        """The highest finished step (0: the warm start); None when there is none."""
        return max(self._steps, default=None)

    def checkpoints(self) -> list[CheckpointEntry]:
        """The checkpoints in the order in which they were written."""
        return list(self._checkpoints)

    def segments(self) -> list[SegmentEntry]:
        """The process starts in order."""
        return list(self._segments)

    def _index(self, entry: Entry) -> None:
        match entry:
            case TaskEntry():
                self._tasks.setdefault(entry.step, {})[entry.task] = entry
            case StepEntry():
                self._steps[entry.step] = entry
            case CheckpointEntry():
                self._checkpoints.append(entry)
            case SegmentEntry():
                self._segments.append(entry)
            case RedoEntry():
                self._redone.setdefault(entry.step, {})[entry.task] = entry


class Ledger(LedgerView):
    """A ledger open for appending; the one writer holds the run's lock. Safe for threads."""

    def __init__(self, path: Path, file: FileIO, entries: list[Entry]) -> None:
        super().__init__(entries)
        self._path = path
        self._file = file
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path) -> Self:
        """Opens or creates a ledger and cuts off a torn last line.

        Raises UserError for any other malformed line (file:line), and when the file cannot be read or written.
        """
        make_folder(path.parent)
        content = _read(path) if path.exists() else b""
        lines = _whole_lines(content)
        entries = [_parse(path, i, line) for i, line in enumerate(lines, start=1)]
        try:
            file = FileIO(path, "a")
            sync_path(path.parent)
            file.truncate(sum(len(line) + 1 for line in lines))
            os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"cannot write the ledger {path}: {error.strerror}") from error
        return cls(path, file, entries)

    def append(self, entry: Entry) -> None:
        """Commits an entry: it is on disk when this returns. Raises UserError (a full disk) and then adds nothing."""
        line = entry.model_dump_json().encode() + b"\n"
        with self._lock:
            end = os.fstat(self._file.fileno()).st_size
            try:
                written = 0
                while written < len(line):
                    written += self._file.write(line[written:])
                os.fsync(self._file.fileno())
            except OSError as error:
                # Part of a line in the middle would make the whole ledger unreadable.
                self._file.truncate(end)
                raise UserError(f"cannot append to the ledger {self._path}: {error.strerror}") from error
            self._index(entry)

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        self._file.close()
