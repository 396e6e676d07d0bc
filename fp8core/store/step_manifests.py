"""Read the manifest of a committed step, of which a run's folder has two copies.

The artifact is what the ledger names. `manifests/00012.json` is for people to read, and of use when that is damaged.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from fp8core.durable import read_stored
from fp8core.errors import StoredFileError
from fp8core.store.artifacts import ArtifactError, ArtifactStore
from fp8core.store.json_text import canonical_json, parse_json, parse_model, shown, value_differences
from fp8core.store.layout import LEDGER, manifest_place
from fp8core.store.ledger import LedgerView, StepEntry
from fp8core.store.manifest import StepManifest


class FoundManifest(NamedTuple):
    """A manifest, and the damage of its artifact where it is that of the second copy."""

    manifest: StepManifest
    damage: ArtifactError | None


def read_manifest(store: ArtifactStore, folder: Path, entry: StepEntry) -> StepManifest:
    return find_manifest(store, folder, entry).manifest


def find_manifest(store: ArtifactStore, folder: Path, entry: StepEntry) -> FoundManifest:
    """The manifest that a line of the ledger names: its artifact, else the copy in the run's folder.

    Raises StoredFileError: both are damaged.
    """
    try:
        return FoundManifest(store.get_manifest(entry.manifest), None)
    except ArtifactError as error:
        damage = error
    copy = folder / manifest_place(entry.step)
    try:
        found = parse_model(read_second_copy(folder, entry), StepManifest, "no manifest that this version reads")
    except StoredFileError as error:
        lost = f"step {entry.step}: the manifest is lost: {damage}; its copy {copy}: {error}"
        raise StoredFileError(lost) from error
    return FoundManifest(found, damage)


def put_back_manifest(store: ArtifactStore, folder: Path, entry: StepEntry) -> FoundManifest:
    """As `find_manifest`, and a damaged artifact is put back from the copy. Raises UserError: the disk refuses."""
    found = find_manifest(store, folder, entry)
    if found.damage is not None:
        store.put_json(entry.manifest.kind, found.manifest.model_dump(mode="json"))
    return found


def refuse_other_outputs(folder: Path, store: ArtifactStore, ledger: LedgerView, steps: Iterable[int]) -> None:
    """Raises StoredFileError: the ledger has other tasks or artifacts of a committed step than its manifest.

    Names alone are compared. `verify` compares digests, and whoever reads an artifact its content.
    """
    for entry in filter(None, map(ledger.step, steps)):
        try:
            record = read_manifest(store, folder, entry).record
        except StoredFileError:
            continue  # Whoever needs it says so, or puts it back.
        stored = {task: sorted(made.outputs) for task, made in ledger.tasks(entry.step).items()}
        named = {task: sorted(contents) for task, contents in record.outputs.items()}
        for task in sorted(stored.keys() | named.keys()):
            if stored.get(task) != named.get(task):
                ours, theirs = (", ".join(side.get(task, ())) or "nothing" for side in (stored, named))
                raise StoredFileError(
                    f"{LEDGER}: step {entry.step}: differs from its manifest: task {task} stored {ours}, by the "
                    f"manifest {theirs}"
                )


def read_second_copy(folder: Path, entry: StepEntry, stored: bytes | None = None) -> bytes:
    """The bytes of the manifest, made from the copy for people; `stored` are those of the artifact, if it has them.

    Raises StoredFileError: the copy's problem, without its path; and where it differs from `stored`.
    """
    try:
        text = read_stored(folder / manifest_place(entry.step))
    except FileNotFoundError as error:
        raise StoredFileError("the file is missing") from error
    except OSError as error:
        raise StoredFileError(f"cannot be read: {error.strerror}") from error
    copy = canonical_json(parse_json(text, "the manifest"), "manifest")
    if hashlib.sha256(copy).hexdigest() != entry.manifest.digest:
        raise StoredFileError(f"differs from the manifest that the ledger names{_where(stored, copy)}")
    return copy


def _where(stored: bytes | None, copy: bytes) -> str:
    if stored is None:
        return ""
    try:
        named, copied = parse_json(stored, "the manifest"), parse_json(copy, "its copy")
    except StoredFileError as error:
        return f": {error}"
    first = next(value_differences("manifest", named, copied), None)
    if first is None:
        return ""
    # One that is no manifest at all is against a whole one.
    ours, theirs = (text if len(text) <= 80 else f"{text[:77]}..." for text in map(shown, (first.ours, first.theirs)))
    return f": {first.path}: {ours} against {theirs}"
