"""One run's folder: its lock, its description, its ledger and its artifacts.

    run.json      resolved configuration and code version, written before any work and never after
    ledger.jsonl  what is committed
    lock          held (flock) by the one process that runs it; names that process
    artifacts/    content-addressed files        manifests/    one file a step
    shards/       groups of unfinished steps     checkpoints/  weights and optimiser

A run that may be live is read without the lock.
"""

import os
import shutil
import uuid
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from fp8core import durable
from fp8core.errors import StoredFileError, UserError
from fp8core.store.artifacts import ArtifactStore, RolloutShards
from fp8core.store.json_text import parse_model
from fp8core.store.layout import CHECKPOINTS, DESCRIPTION, FOLDERS, LEDGER, LOCK, shards_of_steps
from fp8core.store.ledger import START, CheckpointEntry, Ledger
from fp8core.store.lock import RunLock


class RunDescription(BaseModel):
    """The settings that a run was started with (run.json)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(description="Identity of the run, under which MLflow finds it again.")
    config: dict[str, JsonValue] = Field(description="The resolved configuration; it can be loaded again.")
    code_version: str = Field(description="Of the code that began it; the ledger's segments name the later ones.")
    begun_in: str = Field(description="Working directory, to which paths in the configuration are relative.")
    created: str = Field(description="ISO 8601, UTC.")

    @property
    def tracking_uri(self) -> str | None:
        section = self.config.get("tracking")
        uri = section.get("uri") if isinstance(section, dict) else None
        return uri if isinstance(uri, str) else None


class RunDirectory:
    def __init__(self, path: Path, store: ArtifactStore, lock: RunLock, ledger: Ledger, origin: Path | None) -> None:
        self.path = path
        self.store = store
        self.ledger = ledger
        self._lock = lock
        self._origin = origin

    @classmethod
    def create_or_open(cls, root: Path, origin: Path | None = None) -> Self:
        """Raises UserError: it cannot be written, another process holds it, or the ledger is malformed."""
        path = root.absolute()
        durable.make_folder(path, durable.PRIVATE)
        with ExitStack() as resources:
            lock = RunLock.acquire(path / LOCK)
            resources.callback(lock.release)
            for name in FOLDERS:
                durable.make_folder(path / name, durable.PRIVATE)
            ledger = Ledger.open(path / LEDGER)
            resources.callback(ledger.close)
            _sweep(path, ledger)
            resources.pop_all()
            return cls(path, ArtifactStore(path, origin), lock, ledger, origin)

    def write_description(self, config: dict[str, JsonValue], code_version: str) -> RunDescription:
        assert not self.ledger.holds_work(), "no work may depend on another run.json"
        stored_text = self.description()
        description = RunDescription(
            id=uuid.uuid4().hex if stored_text is None else stored_text.id,
            config=config,
            code_version=code_version,
            begun_in=os.getcwd(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        self.write_text(DESCRIPTION, description.model_dump_json(indent=2) + "\n")
        return description

    def description(self) -> RunDescription | None:
        """Raises UserError: malformed, or gone from a run with work."""
        description = read_description(self.path)
        if description is None and self.ledger.tasks(START):
            raise StoredFileError(f"{self.path / DESCRIPTION}: the file is missing, but the run has begun; put it back")
        return description

    def checkpoint(self, entry: CheckpointEntry) -> Path:
        own = self.path / entry.uri
        return own if self._origin is None or own.exists() else self._origin / entry.uri

    def write_text(self, name: str, text: str) -> Path:
        path = self.path / name
        durable.write_file(path, text.encode())
        return path

    def close(self) -> None:
        self.ledger.close()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def checkpoint_folders(run: Path) -> dict[int, Path]:
    paths = (run / CHECKPOINTS).glob("[0-9]*")
    folders = (path for path in paths if path.name.isdecimal() and path.is_dir() and not path.is_symlink())
    return dict(sorted((int(folder.name), folder) for folder in folders))


def _sweep(path: Path, ledger: Ledger) -> None:
    ledger_uris = {entry.uri for entry in ledger.checkpoints()}
    for folder in shards_of_steps(path):
        if ledger.step(int(folder.name)) is not None:
            RolloutShards(folder).clear()
    partial = (path / CHECKPOINTS).glob(durable.partial_folder(Path("*")).name)
    folders = checkpoint_folders(path).values()
    strays = [folder for folder in folders if folder.relative_to(path).as_posix() not in ledger_uris]
    for folder in (*partial, *strays):
        shutil.rmtree(folder)
    durable.sweep(path)


def check_no_owner(folder: Path) -> None:
    RunLock.acquire(folder / LOCK).release()


def read_description(folder: Path) -> RunDescription | None:
    """Raises UserError when malformed."""
    path = folder / DESCRIPTION
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoredFileError(f"{path}: cannot be read: {error.strerror}") from error
    return parse_model(data, RunDescription, f"{path}: not a description of a run")


def stored_description(folder: Path) -> RunDescription:
    if (description := read_description(folder)) is None:
        raise UserError(f"{folder}: no run (no {DESCRIPTION})")
    return description
