"""Remove artifacts and checkpoints of a run by its `artifacts.keep`.

A kept step keeps every artifact that it made or starts from. Kept are step 0, the steps that a rule selects, and the
steps from the last intact checkpoint on. In a run that generates ahead that checkpoint is older than every policy that
the next step scores tokens with. The other steps keep their manifest, metrics and policy, which curves, MLflow and the
chain need. All functions are for the holder of the run's lock.
"""

import re
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from fp8core.config.run import KeepConfig
from fp8core.durable import folder_digest, remove_folder
from fp8core.errors import StoredFileError, UserError
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.layout import ARTIFACTS, CHECKPOINTS, LEDGER
from fp8core.store.ledger import CARRIED_KINDS, START, Ledger, LedgerView, RemovalEntry, stored_metrics

_STAYS = frozenset({"metrics", "policy"})
_CONTENT = re.compile(r"[0-9a-f]{64}\.[a-z]+")


class RemovedFile(NamedTuple):
    """A file, or the folder of a checkpoint, by its path in the run's folder; `kind` is `orphan` without a line."""

    uri: str
    kind: str
    size: int


class Removal(NamedTuple):
    """A plan for `remove`: the finished steps that are kept and dropped, and the files that go."""

    kept: list[int]
    dropped: list[int]
    files: list[RemovedFile]


def kept_steps(keep: KeepConfig, steps: Collection[int], values: Mapping[int, float]) -> set[int]:
    """The finished steps that the rules select; between equal values of `keep.best.metric` the later is better."""
    every = [] if keep.every is None else [step for step in steps if step % keep.every == 0]
    best = []
    if keep.best is not None:
        sign = 1 if keep.best.mode == "max" else -1
        best = sorted(values, key=lambda step: (sign * values[step], step))[-keep.best.count :]
    return {START, *every, *sorted(steps)[-keep.last :], *best}


def metric_values(ledger: LedgerView, store: ArtifactStore, metric: str) -> dict[int, float]:
    """A metric of all finished iterations that have it. Raises ArtifactError."""
    recorded = {step: stored_metrics(ledger, store, step) for step in ledger.steps() if step > START}
    return {step: metrics[metric] for step, metrics in recorded.items() if metric in metrics}


def plan_removal(folder: Path, keep: KeepConfig | None, published: int | None = None, reach: int = 0) -> Removal:
    """Plan what to remove from a run's folder; without `keep` only files that the ledger does not name.

    Steps after `published` are kept (None: all are published). So are those from a checkpoint on that is `reach`
    updates older than the last step (`pipeline.reach`). Raises UserError: a file that is needed cannot be read, or no
    step has the metric of `keep.best`."""
    ledger, store = LedgerView.read(folder / LEDGER), ArtifactStore(folder)
    ledger.refuse_gap(START, max(ledger.steps(), default=START - 1))
    kept = set(ledger.steps()) if keep is None else _kept(folder, keep, ledger, store, reach)
    kept |= {step for step in ledger.steps() if published is not None and step > published}
    dropped = ledger.steps().keys() - kept
    kinds = {ref.digest: ref.kind for step in dropped for _, ref in ledger.outputs(step)}
    staying = _staying(ledger, kept)
    # A checkpoint becomes such a rest while it goes.
    going = [(path, "checkpoint") for path in sorted((folder / CHECKPOINTS).glob(".*.partial"))]
    going += [
        (path, kinds.get(path.stem, "orphan"))
        for path in sorted((folder / ARTIFACTS).glob("??/*"))
        if _CONTENT.fullmatch(path.name) and path.stem not in staying
    ]
    checkpoints = sorted({folder / entry.uri for entry in ledger.checkpoints() if entry.step in dropped})
    going += [(path, "checkpoint") for path in checkpoints if path.is_dir()]
    files = [RemovedFile(path.relative_to(folder).as_posix(), kind, _size(path)) for path, kind in going]
    return Removal(sorted(kept), sorted(dropped), files)


def remove(folder: Path, removal: Removal) -> None:
    """Name the dropped steps in the ledger, then remove the files. Raises UserError: the disk refuses."""
    ledger = Ledger.open(folder / LEDGER)
    try:
        if removal.files and set(removal.dropped) - ledger.removed():
            ledger.append(RemovalEntry(steps=removal.dropped, when=time.time()))
        for each in removal.files:
            path = folder / each.uri
            if each.kind == "checkpoint":
                remove_folder(path)
            else:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot remove {error.filename}: {error.strerror}") from error
    finally:
        ledger.close()


def is_intact(checkpoint: Path, digest: str) -> bool:
    """True if a checkpoint has the digest of the ledger. Raises StoredFileError: it cannot be read."""
    try:
        return folder_digest(checkpoint) == digest
    except OSError as error:
        raise StoredFileError(f"{error.filename}: cannot be read: {error.strerror}") from error


def _kept(folder: Path, keep: KeepConfig, ledger: LedgerView, store: ArtifactStore, reach: int) -> set[int]:
    steps = set(ledger.steps())
    values = {} if keep.best is None else metric_values(ledger, store, keep.best.metric)
    if keep.best is not None and not values:
        raise UserError(f"artifacts.keep.best.metric: no step has a metric {keep.best.metric}")
    newest = max(steps, default=START) - reach
    reached = (entry for entry in ledger.last_checkpoints() if entry.step <= newest)
    ours = (entry for entry in reached if ledger.held_policy(entry) is not None)
    intact = (entry.step for entry in ours if is_intact(folder / entry.uri, entry.digest))
    resumable = next(intact, START)
    return steps & (kept_steps(keep, steps, values) | {step for step in steps if step >= resumable})


def _staying(ledger: LedgerView, kept: set[int]) -> set[str]:
    """Digests of kept steps, of what they start from, and of the step that is not finished."""
    steps = ledger.steps()
    made = [(step, ref) for step in ledger.begun() for _, ref in ledger.outputs(step)]
    staying = {entry.manifest.digest for entry in steps.values()}
    for step, ref in made:
        is_input = step + 1 in kept and ref.kind in CARRIED_KINDS.values()
        if step in kept or step not in steps or is_input or ref.kind in _STAYS:
            staying.add(ref.digest)
    return staying


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
    return path.stat().st_size
