"""Remove artifacts and checkpoints by `artifacts.keep`; a step that is kept has all that it made or starts from."""

import re
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from fp8core.config.run import KeepConfig
from fp8core.durable import folder_digest, remove_folder
from fp8core.errors import StoredFileError, UserError
from fp8core.store.layout import ARTIFACTS, CHECKPOINTS, LEDGER
from fp8core.store.ledger import CARRIED_KINDS, START, Ledger, LedgerView, RemovalEntry

_STAYS = frozenset({"metrics", "policy"})
_CONTENT = re.compile(r"[0-9a-f]{64}\.[a-z]+")


class RemovedFile(NamedTuple):
    """`kind` is `checkpoint`, that of an artifact, or `orphan` without a line in the ledger."""

    uri: str
    kind: str
    size: int


class Removal(NamedTuple):
    remaining_steps: list[int]
    dropped_steps: list[int]
    files: list[RemovedFile]


def kept_steps(keep: KeepConfig, steps: Collection[int]) -> set[int]:
    every = [] if keep.every is None else [step for step in steps if step % keep.every == 0]
    return {START, *every, *sorted(steps)[-keep.last :]}


def plan_removal(folder: Path, keep: KeepConfig | None, last_published: int | None = None, reach: int = 0) -> Removal:
    """`last_published`: the last step that every tracking service has (None: all); `reach`: as of `pipeline.reach`.

    Raises UserError.
    """
    ledger = LedgerView.read(folder / LEDGER)
    ledger.check_no_gap(START, max(ledger.steps(), default=START - 1))
    remaining = set(ledger.steps()) if keep is None else _remaining_steps(folder, keep, ledger, reach)
    remaining |= {step for step in ledger.steps() if last_published is not None and step > last_published}
    dropped_steps = ledger.steps().keys() - remaining
    kinds = {ref.digest: ref.kind for step in dropped_steps for _, ref in ledger.outputs(step)}
    staying = _remaining_digests(ledger, remaining)
    # A checkpoint becomes such a rest while it goes.
    going = [(path, "checkpoint") for path in sorted((folder / CHECKPOINTS).glob(".*.partial"))]
    going += [
        (path, kinds.get(path.stem, "orphan"))
        for path in sorted((folder / ARTIFACTS).glob("??/*"))
        if _CONTENT.fullmatch(path.name) and path.stem not in staying
    ]
    checkpoints = sorted({folder / entry.uri for entry in ledger.checkpoints() if entry.step in dropped_steps})
    going += [(path, "checkpoint") for path in checkpoints if path.is_dir()]
    files = [RemovedFile(path.relative_to(folder).as_posix(), kind, _size(path)) for path, kind in going]
    return Removal(sorted(remaining), sorted(dropped_steps), files)


def remove(folder: Path, removal: Removal) -> None:
    ledger = Ledger.open(folder / LEDGER)
    try:
        if removal.files and set(removal.dropped_steps) - ledger.removed_steps():
            ledger.append(RemovalEntry(steps=removal.dropped_steps, when=time.time()))
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
    try:
        return folder_digest(checkpoint) == digest
    except OSError as error:
        raise StoredFileError(f"{error.filename}: cannot be read: {error.strerror}") from error


def _remaining_steps(folder: Path, keep: KeepConfig, ledger: LedgerView, reach: int) -> set[int]:
    steps = set(ledger.steps())
    newest = max(steps, default=START) - reach
    candidates = (entry for entry in ledger.last_checkpoints() if entry.step <= newest)
    ours = (entry for entry in candidates if ledger.held_policy(entry) is not None)
    intact = (entry.step for entry in ours if is_intact(folder / entry.uri, entry.digest))
    resumable = next(intact, START)
    return steps & (kept_steps(keep, steps) | {step for step in steps if step >= resumable})


def _remaining_digests(ledger: LedgerView, remaining: set[int]) -> set[str]:
    steps = ledger.steps()
    outputs = [(step, ref) for step in ledger.task_steps() for _, ref in ledger.outputs(step)]
    staying = {entry.manifest.digest for entry in steps.values()}
    for step, ref in outputs:
        is_input = step + 1 in remaining and ref.kind in CARRIED_KINDS.values()
        if step in remaining or step not in steps or is_input or ref.kind in _STAYS:
            staying.add(ref.digest)
    return staying


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
    return path.stat().st_size
