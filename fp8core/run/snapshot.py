"""A run as it is on disk, and its copy in a folder of its own, in which steps are made again.

The original is only read, without its lock: it may be live, or somebody else's. The ledger's earlier lines are copied,
artifacts and checkpoints are read where they are. New and repaired files are written to the scratch folder.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import JsonValue

from fp8core.config.load import reload_config
from fp8core.config.run import RunConfig
from fp8core.durable import read_lines
from fp8core.errors import NotRecordedError, ProcessLost, UserError
from fp8core.report.console import Console
from fp8core.run.behaviour import versions_in_flight
from fp8core.run.checkpoint import save_state
from fp8core.run.checks.settings import graph_of
from fp8core.run.context import Replayed, RunContext
from fp8core.run.execute import StepError
from fp8core.run.loop import begin
from fp8core.run.open import open_run
from fp8core.run.policy import SyncError
from fp8core.run.recompute import rewind_to
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.layout import LEDGER, MANIFESTS, manifest_place
from fp8core.store.ledger import START, LedgerView
from fp8core.store.manifest import StepManifest
from fp8core.store.run_directory import RunDescription, RunDirectory, stored_description
from fp8core.store.step_manifests import read_manifest
from fp8core.training.trainer import UpdateError

FAILURES = (StepError, UpdateError, SyncError, NotRecordedError, ProcessLost)
"""What a step that was committed once can fail with when it is made again: other code, libraries or settings."""


@dataclass(frozen=True)
class RunSnapshot:
    folder: Path
    described: RunDescription
    ledger: LedgerView
    store: ArtifactStore

    @classmethod
    def read(cls, folder: Path) -> "RunSnapshot":
        """Raises UserError: there is no run.json or ledger, or one is malformed."""
        return cls(folder, stored_description(folder), LedgerView.read(folder / LEDGER), ArtifactStore(folder))

    def manifest(self, step: int) -> StepManifest:
        """Of a committed step. Raises UserError: both copies are damaged."""
        return read_manifest(self.store, self.folder, self.ledger.steps()[step])

    def environment(self, step: int) -> dict[str, JsonValue]:
        """The description of the environment that answered in a committed step; empty without one."""
        described = self.manifest(step).record.executed.get("environment")
        return described if isinstance(described, dict) else {}

    def config(self, step: int, overrides: Sequence[str] = ()) -> RunConfig:
        """The configuration that a committed step was made with, and overrides (`key=value`).

        The step's record decides how long the run was to be and how equal a replay must be. Both may have been changed
        when the run was continued.
        """
        begun, changed = (reload_config(self.described.config, settings) for settings in ((), overrides))
        record = self.manifest(step).record
        level = record.level if changed.replay == begun.replay else changed.replay.level
        replay = changed.replay.model_copy(update={"level": level})
        return changed.model_copy(update={"steps": record.steps, "replay": replay})

    def refuse_unknown(self, step: int) -> None:
        """Raises UserError: the step is not committed; StoredFileError: the ledger leaves one out."""
        committed = self.ledger.steps()
        self.ledger.refuse_gap(START, max(committed, default=START - 1))
        if step not in committed:
            known = f"steps 0 to {max(committed)} are" if committed else "no step is"
            raise UserError(f"run {self.folder.name}: step {step} is not committed; {known}")

    def refuse_removed(self, step: int, older: int = 0) -> None:
        """Raises UserError: gc removed what leads from a checkpoint to the policy after a step, or to `older` ones."""
        oldest = max(START, step - older)
        kept = sorted(entry.step for entry in self.ledger.checkpoints() if (self.folder / entry.uri).is_dir())
        nearest = max((checkpoint for checkpoint in kept if checkpoint <= oldest), default=START)
        which = f"the policy after step {step}" if oldest == step else f"policies {oldest} to {step}"
        for index in sorted(self.ledger.removed().intersection(range(nearest + 1, step + 1))):
            raise UserError(
                f"run {self.folder.name}: {which} cannot be restored: that takes the update of step {index}, whose "
                f"files gc removed; checkpoints: {', '.join(map(str, kept)) or 'none'}"
            )


@contextmanager
def scratch_folder(original: Path, step: int, *configs: RunConfig) -> Iterator[Path]:
    """A temporary run folder whose ledger ends where the original's step began.

    Args:
        step: everything before it is known; 0 leaves nothing.
        configs: what it will be run with. On a cluster at an address, ranks of other nodes read and write files of it:
            it lies beside the run, where all nodes see it.

    Raises:
        UserError: nothing can be written there.
    """
    place = original.parent if any(config.cluster.address is not None for config in configs) else None
    try:
        made = tempfile.TemporaryDirectory(prefix=".fp8-grpo-", dir=place)
    except OSError as error:
        raise UserError(f"{place or 'the folder of temporary files'}: cannot be written: {error.strerror}") from error
    with made as temporary:
        folder = Path(temporary) / original.name
        (folder / MANIFESTS).mkdir(parents=True)
        (folder / LEDGER).write_text("".join(f"{line}\n" for line in _lines_before(original, step)))
        for index in range(step):
            # One that is missing or damaged is reported by whoever needs it.
            with suppress(OSError):
                (folder / manifest_place(index)).write_bytes((original / manifest_place(index)).read_bytes())
        yield folder


@contextmanager
def scratch_run(
    config: RunConfig,
    original: Path,
    folder: Path,
    console: Console,
    recorded: Mapping[str, JsonValue] | None,
) -> Iterator[RunContext]:
    """A scratch folder, live; `loop.begin` restores it. It shares nothing with other runs, not even a warm start.

    `recorded`: `Replayed.environment` (`RunSnapshot.environment`); None runs the environments again. Raises UserError:
    the configuration cannot be run, or model or data cannot be read.
    """
    own = config.model_copy(update={"runs": folder.parent})
    graph = graph_of(own)
    with (
        RunDirectory.create_or_open(folder, origin=original) as directory,
        open_run(
            own, graph, directory, console, replayed=Replayed(LedgerView.read(original / LEDGER), recorded)
        ) as run,
    ):
        torch.set_num_threads(own.threads)
        yield run


def restore_as_it_was(config: RunConfig, original: RunSnapshot, folder: Path, step: int, console: Console) -> None:
    """Leave a checkpoint of an iteration in a scratch folder, restored under the run's own configuration.

    A caller that opens the folder next, with another configuration, goes on from that. It scores tokens with older
    policies, which have checkpoints too.
    """
    with scratch_run(config, original.folder, folder, console, original.environment(step)) as run:
        begin(run)
        for version in [*(each for each in versions_in_flight(run, step + 1) if START < each < step), step]:
            rewind_to(run, version)
            save_state(run, version)


def _lines_before(original: Path, step: int) -> Iterator[str]:
    """The lines of the ledger when a step was made: of earlier steps only.

    A redo that was entered after the step's commit came too late for it.
    """
    for line in read_lines(original / LEDGER)[0]:
        entry = json.loads(line)
        if entry["event"] == "step" and entry["step"] == step:
            return
        if entry.get("step", START) < step:
            yield json.dumps(entry)
