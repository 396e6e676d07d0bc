"""Damaged files of a run, put back: an artifact by running its task again, a manifest from its second copy."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import ValidationError

from fp8core.errors import UserError
from fp8core.store.artifacts import ArtifactError, ArtifactStore, Ref
from fp8core.store.ledger import StepEntry
from fp8core.store.manifest import StepManifest
from fp8core.workers.live import LiveRun


def mend(run: LiveRun, index: int, task: str, expected: Mapping[str, Ref], body: Callable[[], dict[str, Ref]]) -> bool:
    """Run a finished task again when one of its files is damaged; returns whether it was.

    Args:
        run: the live run.
        index: the step of the task.
        task: its name.
        expected: what it stored, artifact name -> reference.
        body: makes the outputs, and in storing them replaces the damaged files; called at most once.

    Raises:
        UserError: what `body` makes is not what a damaged file held.
    """
    damaged = damages(run, expected)
    if damaged:
        check_mended(run, index, task, damaged, expected, body())
    return bool(damaged)


def damages(run: LiveRun, refs: Mapping[str, Ref]) -> dict[str, ArtifactError]:
    """What is wrong with each damaged file; empty when all are whole."""
    found = {name: run.directory.store.damage(ref) for name, ref in refs.items()}
    return {name: error for name, error in found.items() if error is not None}


def check_mended(
    run: LiveRun,
    index: int,
    task: str,
    damaged: Mapping[str, ArtifactError],
    expected: Mapping[str, Ref],
    made: Mapping[str, Ref],
) -> None:
    """Say for each damaged file that it is back; raises UserError when what was made is not what it held."""
    for name, error in damaged.items():
        if made[name].digest != expected[name].digest:
            raise UserError(
                f"step {index}: artifact {name} is damaged and cannot be restored: {error}; running {task} again gave "
                f"{made[name].digest}, the ledger says {expected[name].digest}{_other_code(run, index)}"
            )
        run.console.note(f"step {index}: artifact {name} was damaged ({error}); made again by {task}, equal")


def code_of(run: LiveRun, index: int) -> str:
    """The code version that made a step; of one that is not committed, this one."""
    committed = run.directory.ledger.step(index) is not None
    return stored_manifest(run, index).record.code_version if committed else run.code_version


def stored_manifest(run: LiveRun, index: int) -> StepManifest:
    """The manifest of a committed step, put back first from `manifests/` when its artifact is damaged.

    Raises:
        UserError: both copies are damaged.
    """
    entry = committed_step(run, index)
    manifest = read_manifest(run.directory.store, run.directory.path, entry)
    if (damage := run.directory.store.damage(entry.manifest)) is not None:
        run.directory.store.put_json(entry.manifest.kind, manifest.model_dump(mode="json"))
        run.console.note(f"step {index}: the manifest was damaged ({damage}); put back from its second copy")
    return manifest


def committed_step(run: LiveRun, index: int) -> StepEntry:
    """The ledger's entry of an iteration that is committed."""
    entry = run.directory.ledger.step(index)
    assert entry is not None, f"step {index} is not committed"
    return entry


def read_manifest(store: ArtifactStore, folder: Path, entry: StepEntry) -> StepManifest:
    """The manifest that a ledger entry names, from the store or else from `manifests/` in the run's folder.

    Raises:
        UserError: both copies are damaged.
    """
    damage = store.damage(entry.manifest)
    if damage is None:
        return StepManifest.model_validate_json(json.dumps(store.get_json(entry.manifest)))
    copy = manifest_file(folder, entry.step)
    try:
        manifest = StepManifest.model_validate_json(copy.read_bytes())
    except (OSError, ValidationError) as error:
        raise UserError(f"step {entry.step}: the manifest is lost: {damage}; {copy} cannot be read either") from error
    if store.digest_json(manifest.model_dump(mode="json")) != entry.manifest.digest:
        raise UserError(f"step {entry.step}: the manifest is lost: {damage}; {copy} has other content")
    return manifest


def manifest_file(folder: Path, index: int) -> Path:
    """Where the manifest of a step lies for people to read."""
    return folder / "manifests" / f"{index:05d}.json"


def _other_code(run: LiveRun, index: int) -> str:
    made_by = code_of(run, index)
    if made_by == run.code_version:
        return ""
    return f" (made by code version {made_by[:12]}, this is {run.code_version[:12]})"
