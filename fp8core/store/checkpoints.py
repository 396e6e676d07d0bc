"""Checkpoints that a run can resume from: undamaged ones of the policies that it went on from."""

from collections.abc import Iterator
from pathlib import Path

from fp8core.durable import folder_digest
from fp8core.errors import StoredFileError
from fp8core.store.artifacts import ArtifactStore, Ref
from fp8core.store.ledger import CheckpointEntry, LedgerView


def last_written(ledger: LedgerView) -> Iterator[CheckpointEntry]:
    """The checkpoint of each step that was written last, from the newest step back."""
    seen = set[int]()
    for entry in ledger.newest_checkpoints():
        if entry.step not in seen:
            seen.add(entry.step)
            yield entry


def content_of_policy(entry: CheckpointEntry) -> dict[str, int | str]:
    return {"version": entry.step, "weights_digest": entry.weights_digest}


def held_policy(ledger: LedgerView, store: ArtifactStore, entry: CheckpointEntry) -> Ref | None:
    """The policy that the run went on from after the step, if the checkpoint holds it.

    None: a redo of the step gave another one.
    """
    digest = store.digest_json(content_of_policy(entry))
    effective = ledger.effective_outputs(entry.step).values()
    return next((ref for ref in effective if ref.kind == "policy" and ref.digest == digest), None)


def is_intact(checkpoint: Path, digest: str) -> bool:
    """True if a checkpoint has the digest of the ledger. Raises StoredFileError: it cannot be read."""
    try:
        return folder_digest(checkpoint) == digest
    except OSError as error:
        raise StoredFileError(f"{error.filename}: cannot be read: {error.strerror}") from error
