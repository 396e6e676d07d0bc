"""What may be removed from a run, by its `artifacts.keep`.

A step that is kept keeps everything that its manifest names. That is step 0, every step that a rule names, and every
step from the last intact checkpoint on: a run resumes from there. Of the other steps stay the manifest and what is of
kind `metrics` and `policy`, which curves, MLflow and the chain of manifests need; the rest goes, and so do their
checkpoints and the files that no line of the ledger names.

All functions are for the holder of the run's lock.
"""

import json
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from fp8core.config.run import BestConfig, KeepConfig
from fp8core.errors import UserError
from fp8core.store.artifacts import ArtifactStore, Ref
from fp8core.store.durable import remove_folder
from fp8core.store.folder_digest import folder_digest
from fp8core.store.ledger import START, CheckpointEntry, LedgerView
from fp8core.store.manifest import StepManifest
from fp8core.store.run_directory import LEDGER
from fp8core.store.tombstones import Tombstone, bury

_STAYS = frozenset({"metrics", "policy"})
_CONTENT = re.compile(r"[0-9a-f]{64}\.[a-z]+")


class Removal(NamedTuple):
    """What `remove` will do: finished steps that keep everything and that do not, and a tombstone for all that goes."""

    kept: list[int]
    dropped: list[int]
    tombstones: list[Tombstone]


def kept_steps(keep: KeepConfig, steps: Collection[int], values: Mapping[int, float]) -> set[int]:
    """Steps that the rules name.

    Args:
        keep: the rules.
        steps: the finished steps.
        values: `keep.best.metric` of the steps that have it; of equal ones the later step is better.
    """
    every = [] if keep.every is None else [step for step in steps if step % keep.every == 0]
    return {START, *every, *sorted(steps)[-keep.last :], *_best(keep.best, values)}


def metric_values(ledger: LedgerView, store: ArtifactStore, metric: str) -> dict[int, float]:
    """A metric of all finished iterations that have it. Raises ArtifactError."""
    recorded = (
        (step, store.get_json(ref))
        for step in ledger.steps()
        for ref in ledger.artifacts(step).values()
        if ref.kind == "metrics"
    )
    return {step: metrics[metric] for step, metrics in recorded if metric in metrics}


def plan_removal(folder: Path, keep: KeepConfig | None, when: str, published: int | None = None) -> Removal:
    """What goes from a run's folder; None keeps every step.

    Steps after `published` stay whatever `keep` says: their tables are still to be shown elsewhere. None: all are.

    Raises:
        UserError: the ledger, a manifest or a metric that is needed cannot be read, or no step has the metric of
            `keep.best`.
    """
    ledger, store = LedgerView.read(folder / LEDGER), ArtifactStore(folder)
    kept = set(ledger.steps()) if keep is None else _kept(folder, keep, ledger, store)
    kept |= {step for step in ledger.steps() if published is not None and step > published}
    dropped = ledger.steps().keys() - kept
    going = {
        ref.digest: Tombstone(**ref.model_dump(), step=step, reason=_reason(step), when=when)
        for step in sorted(dropped)
        for ref in _refs(ledger, step)
    }
    staying = _staying(ledger, store, kept)
    tombstones = [
        going.get(path.stem) or _orphan(path, when)
        for path in sorted((folder / "artifacts").glob("??/*"))
        if _CONTENT.fullmatch(path.name) and path.stem not in staying
    ]
    checkpoints = {entry.uri: entry for entry in ledger.checkpoints() if entry.step in dropped}
    tombstones += [
        _checkpoint_tombstone(folder, entry, when) for uri, entry in checkpoints.items() if (folder / uri).is_dir()
    ]
    return Removal(sorted(kept), sorted(dropped), tombstones)


def remove(folder: Path, tombstones: Collection[Tombstone]) -> None:
    """Removes what tombstones name, once they are on disk.

    A kill in between leaves files that `plan_removal` finds again. Raises UserError when the disk refuses.
    """
    try:
        for partial in (folder / "checkpoints").glob(".*.partial"):
            shutil.rmtree(partial)
        bury(folder, tombstones)
        for tombstone in tombstones:
            path = folder / tombstone.uri
            if path.is_dir():
                remove_folder(path)
            else:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot remove {error.filename}: {error.strerror}") from error


def _best(best: BestConfig | None, values: Mapping[int, float]) -> list[int]:
    if best is None:
        return []
    sign = 1 if best.mode == "max" else -1
    return sorted(values, key=lambda step: (sign * values[step], step))[-best.count :]


def _kept(folder: Path, keep: KeepConfig, ledger: LedgerView, store: ArtifactStore) -> set[int]:
    """The finished steps that keep everything."""
    steps = set(ledger.steps())
    values = {} if keep.best is None else metric_values(ledger, store, keep.best.metric)
    if keep.best is not None and not values:
        raise UserError(f"artifacts.keep.best.metric: no step has a metric {keep.best.metric}")
    intact = (entry.step for entry in ledger.newest_checkpoints() if _is_intact(folder / entry.uri, entry.digest))
    resumable = next(intact, START)
    return steps & (kept_steps(keep, steps, values) | {step for step in steps if step >= resumable})


def _is_intact(checkpoint: Path, digest: str) -> bool:
    try:
        return folder_digest(checkpoint) == digest
    except OSError as error:
        raise UserError(f"{checkpoint}: cannot be read: {error.strerror}") from error


def _staying(ledger: LedgerView, store: ArtifactStore, kept: set[int]) -> set[str]:
    """Digests of all that stays."""
    steps = ledger.steps()
    finished = [ref for step in steps for ref in _refs(ledger, step) if step in kept or ref.kind in _STAYS]
    unfinished = _refs(ledger, START if (last := ledger.last_step()) is None else last + 1)
    manifests = [entry.manifest for entry in steps.values()]
    contents = {digest for step in kept for digest in _contents(store, steps[step].manifest)}
    return contents | {ref.digest for ref in [*finished, *unfinished, *manifests]}


def _refs(ledger: LedgerView, step: int) -> Iterator[Ref]:
    """What the tasks of a step stored, and what redoing them gave."""
    yield from ledger.artifacts(step).values()
    for redo in ledger.redone(step).values():
        yield from redo.outputs.values()


def _contents(store: ArtifactStore, manifest: Ref) -> Iterator[str]:
    """Digests of the inputs and outputs that a manifest names."""
    record = StepManifest.model_validate_json(json.dumps(store.get_json(manifest))).record
    for task in [*record.inputs.values(), *record.outputs.values()]:
        yield from (content.digest for content in task.values())


def _reason(step: int) -> str:
    return f"artifacts.keep does not keep step {step}"


def _orphan(path: Path, when: str) -> Tombstone:
    uri, size = path.relative_to(path.parents[2]).as_posix(), path.stat().st_size
    return Tombstone(digest=path.stem, uri=uri, kind="orphan", size=size, step=None, reason="orphan", when=when)


def _checkpoint_tombstone(folder: Path, entry: CheckpointEntry, when: str) -> Tombstone:
    size = sum(path.stat().st_size for path in (folder / entry.uri).rglob("*") if path.is_file())
    return Tombstone(
        digest=entry.digest,
        uri=entry.uri,
        kind="checkpoint",
        size=size,
        step=entry.step,
        reason=_reason(entry.step),
        when=when,
    )
