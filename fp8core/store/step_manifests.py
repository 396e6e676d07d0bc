"""Read the manifest of a committed step, of which a run's folder has two copies.

The artifact is what the ledger names. `manifests/00012.json` is for people to read, and of use when that is damaged.
"""

import hashlib
from pathlib import Path

from fp8core.errors import StoredFileError
from fp8core.store.artifacts import ArtifactError, ArtifactStore
from fp8core.store.json_text import canonical_json, parse_json, parse_model
from fp8core.store.layout import manifest_place
from fp8core.store.ledger import StepEntry
from fp8core.store.manifest import StepManifest


def read_manifest(store: ArtifactStore, folder: Path, entry: StepEntry) -> StepManifest:
    """The manifest that a line of the ledger names: its artifact, else the copy in the run's folder.

    Raises StoredFileError: both are damaged.
    """
    try:
        return store.get_manifest(entry.manifest)
    except ArtifactError as error:
        damage = error
    try:
        return parse_model(second_copy(folder, entry), StepManifest, "no manifest that this version reads")
    except StoredFileError as error:
        copy = folder / manifest_place(entry.step)
        raise StoredFileError(f"step {entry.step}: the manifest is lost: {damage}; {copy}: {error}") from error


def restore_manifest(store: ArtifactStore, folder: Path, entry: StepEntry) -> bool:
    """Put a damaged artifact back from the copy; returns whether it was damaged.

    Raises StoredFileError: both are damaged; UserError: the disk refuses.
    """
    if store.damage(entry.manifest) is None:
        return False
    store.put_json(entry.manifest.kind, read_manifest(store, folder, entry).model_dump(mode="json"))
    return True


def second_copy(folder: Path, entry: StepEntry) -> bytes:
    """The bytes of a manifest by the copy for people. Raises StoredFileError, without the path."""
    try:
        text = (folder / manifest_place(entry.step)).read_bytes()
    except FileNotFoundError as error:
        raise StoredFileError("the file is missing") from error
    except OSError as error:
        raise StoredFileError(f"cannot be read: {error.strerror}") from error
    copy = canonical_json(parse_json(text, "the manifest"), "manifest")
    if hashlib.sha256(copy).hexdigest() != entry.manifest.digest:
        raise StoredFileError("differs from the manifest that the ledger names")
    return copy
