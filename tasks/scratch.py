"""A run brought back to where it stood before one of its steps, in a folder of its own that goes afterwards.

The original is only read, without its lock: it may be live, or somebody else's. The ledger's earlier lines are copied,
artifacts and checkpoints are read where they are, and what is computed or repaired is written to the scratch folder.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from fp8core.config.load import reload_config
from fp8core.config.run import RunConfig
from fp8core.errors import UserError
from fp8core.report.console import Console
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.ledger import START, LedgerView
from fp8core.store.manifest import StepManifest
from fp8core.store.run_directory import LEDGER, RunDescription, RunDirectory
from fp8core.store.tombstones import read_tombstones
from fp8core.workers.live import LiveRun
from tasks.checkpoint import save_state
from tasks.loop import begin
from tasks.opening import open_run, plan_of
from tasks.repair import manifest_file, read_manifest


@dataclass(frozen=True)
class Original:
    """A run as it is on disk."""

    folder: Path
    described: RunDescription
    ledger: LedgerView
    store: ArtifactStore

    @classmethod
    def read(cls, folder: Path, described: RunDescription) -> "Original":
        """Raises UserError: there is no ledger, or it is malformed."""
        return cls(folder, described, LedgerView.read(folder / LEDGER), ArtifactStore(folder))

    def manifest(self, step: int) -> StepManifest:
        """Of a committed step. Raises UserError: both copies are damaged."""
        return read_manifest(self.store, self.folder, self.ledger.steps()[step])

    def config(self, step: int, overrides: Sequence[str] = ()) -> RunConfig:
        """The configuration that a committed step was made with, and overrides (`key=value`).

        The step's record knows best how long the run was to be and how equal a replay must be: both may have been
        changed when the run was continued.
        """
        begun, changed = (reload_config(self.described.config, settings) for settings in ((), overrides))
        record = self.manifest(step).record
        level = record.level if changed.replay == begun.replay else changed.replay.level
        replay = changed.replay.model_copy(update={"level": level})
        return changed.model_copy(update={"steps": record.steps, "replay": replay})

    def refuse_unknown(self, step: int) -> None:
        """Raises UserError: the step is not committed."""
        committed = self.ledger.steps()
        if step not in committed:
            known = f"steps 0 to {max(committed)} are" if committed else "no step is"
            raise UserError(f"run {self.folder.name}: step {step} is not committed; {known}")

    def refuse_removed(self, config: RunConfig, step: int) -> None:
        """Raises UserError: what leads from a checkpoint to the policy after a step was removed on purpose."""
        removed, plan = read_tombstones(self.folder), plan_of(config)
        kept = [entry.step for entry in self.ledger.checkpoints() if (self.folder / entry.uri).is_dir()]
        nearest = max((checkpoint for checkpoint in kept if checkpoint <= step), default=START)
        read = {name for planned in plan.steps if planned.spec.redo for name in planned.inputs.values()}
        for index in range(nearest + 1, step + 1):
            for artifact, ref in self.ledger.artifacts(index).items():
                if artifact in read and ref.digest in removed and not self.store.path(ref).exists():
                    tombstone = removed[ref.digest]
                    raise UserError(
                        f"run {self.folder.name}: the policy after step {step} cannot be restored: that takes the "
                        f"update of step {index}, whose {artifact} were removed on {tombstone.when} "
                        f"({tombstone.reason}); checkpoints: {', '.join(map(str, sorted(kept))) or 'none'}"
                    )


@contextmanager
def scratch_folder(original: Path, step: int) -> Iterator[Path]:
    """A temporary run folder whose ledger ends where the original's step began.

    Args:
        original: the run's folder.
        step: everything before it is known; 0 leaves nothing.
    """
    with tempfile.TemporaryDirectory(prefix="fp8-grpo-") as temporary:
        folder = Path(temporary) / original.name
        (folder / "manifests").mkdir(parents=True)
        (folder / LEDGER).write_text("".join(f"{line}\n" for line in _lines_before(original, step)))
        for index in range(step):
            manifest_file(folder, index).symlink_to(manifest_file(original, index))
        yield folder


@contextmanager
def scratch_run(config: RunConfig, original: Path, folder: Path, console: Console) -> Iterator[LiveRun]:
    """A scratch folder, live; `tasks.loop.begin` restores it. Nothing is shared with other runs, no warm start either.

    Raises:
        UserError: the configuration cannot be run, or model or data cannot be read.
    """
    own = config.model_copy(update={"runs": folder.parent})
    plan = plan_of(own)
    with (
        RunDirectory.create_or_open(folder, origin=original) as directory,
        open_run(own, plan, directory, console) as run,
    ):
        torch.set_num_threads(own.threads)
        yield run


def restore_as_it_was(config: RunConfig, original: Path, folder: Path, step: int, console: Console) -> None:
    """Leave a checkpoint of an iteration in a scratch folder, restored under the run's own configuration.

    Whoever opens the folder next, with another configuration, goes on from that.
    """
    with scratch_run(config, original, folder, console) as run:
        begin(run)
        save_state(run, step)


def _lines_before(original: Path, step: int) -> Iterator[str]:
    """What the ledger said when a step was made: of earlier steps only, checkpoints where they are.

    A redo that was entered after the step's commit came too late for it.
    """
    for line in (original / LEDGER).read_text().split("\n")[:-1]:
        entry = json.loads(line)
        if entry["event"] == "step" and entry["step"] == step:
            return
        if entry["event"] == "checkpoint":
            entry["uri"] = str(original / entry["uri"])
        if entry.get("step", START) < step:
            yield json.dumps(entry)
