"""The policy after a step as a folder that others load, which says where it comes from and is linked in MLflow."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

from fp8core.errors import UserError, first_line
from fp8core.models.checkpoint import save_checkpoint
from fp8core.report.console import Console
from fp8core.store.durable import make_folder, sync_path, write_file
from fp8core.store.folder_digest import folder_digest
from fp8core.store.ledger import CheckpointEntry
from tasks.loop import begin
from tasks.restore import carried
from tasks.scratch import Original, scratch_folder, scratch_run
from tasks.tracking_record import read_record
from tasks.tracking_store import client_of_existing_store

Format = Literal["bf16", "fp8"]
ORIGIN = "fp8_grpo.json"
"""Beside the weights: the run and the step that they come from."""

_MLFLOW_ERRORS = (MlflowException, SQLAlchemyError, OSError)


@dataclass(frozen=True)
class Policy:
    """A policy in BF16 as a Hugging Face folder, and the digest of the FP32 weights that it was rounded from."""

    folder: Path
    weights_digest: str


@contextmanager
def stored_policy(original: Original, step: int, console: Console) -> Iterator[Policy]:
    """The policy after a committed step: that of its checkpoint, else restored in a folder that goes with the block.

    Raises:
        UserError: the step is not committed, or what leads to its policy was removed or cannot be restored equal.
        RedoError: an update on the way came out different.
    """
    original.refuse_unknown(step)
    checkpoint = _checkpoint(original, step)
    if checkpoint is not None:
        yield Policy(original.folder / checkpoint.uri / "policy", checkpoint.weights_digest)
        return
    config = original.config(step)
    original.refuse_removed(config, step)
    with (
        scratch_folder(original.folder, step + 1) as folder,
        scratch_run(config, original.folder, folder, console) as run,
    ):
        wanted = carried(run, step + 1)["policy"]
        begin(run)
        if carried(run, step + 1)["policy"] != wanted:
            raise UserError(f"run {original.folder.name}: the policy after step {step} cannot be restored equal")
        trainer = run.ready_trainer()
        save_checkpoint(folder / "policy", run.arch, trainer.masters, run.tokenizer)
        yield Policy(folder / "policy", trainer.digest())


def export(
    original: Original, step: int, policy: Policy, format: Format, target: Path, write: Callable[[Path], None]
) -> None:
    """Write a policy and its origin to a folder that appears whole or not at all.

    Args:
        original: the run.
        step: the policy is the one after it.
        policy: from `stored_policy`.
        format: what `write` writes the linears in.
        target: must not exist.
        write: makes the folder it is given, with the weights.

    Raises:
        UserError: the target exists or cannot be written.
    """
    refuse_existing(target)
    partial = target.absolute().with_name(f".{target.name}.export")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        make_folder(partial.parent)
        write(partial)
        origin = {"format": format, **_origin(original, step, policy)}
        write_file(partial / ORIGIN, f"{json.dumps(origin, indent=2)}\n".encode())
        partial.rename(target)
        sync_path(target.absolute().parent)
    except OSError as error:
        raise UserError(f"{target}: the policy cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def refuse_existing(target: Path) -> None:
    """Raises UserError: there is something of this name already."""
    if target.exists() or target.is_symlink():
        raise UserError(f"{target}: already exists; an export is never written over something else")


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder, durably. Raises OSError."""
    shutil.copytree(source, target)
    for path in (*target.rglob("*"), target):
        sync_path(path)


def link_export(run_folder: Path, step: int, target: Path) -> str:
    """Tag the LoggedModel of a step, or the MLflow run when the step has none, with where an export of it lies.

    Returns a line that says what was tagged, or why nothing was: MLflow may be away, and the export stands.
    """
    tags = {f"exported_{json.loads((target / ORIGIN).read_text())['format']}": str(target.absolute())}
    tracking = read_record(run_folder)
    if tracking is None:
        return "the run was never tracked in MLflow: the export is not linked"
    try:
        client = client_of_existing_store(tracking.uri)
        model_id = find_model(client, tracking.run_id, step)
        if model_id is not None:
            client.set_logged_model_tags(model_id, tags)
            return f"linked to the MLflow model {model_id}"
        for key, value in tags.items():
            client.set_tag(tracking.run_id, key, value)
        return f"linked to the MLflow run {tracking.run_id}"
    except _MLFLOW_ERRORS as error:
        return f"the export is not linked: {tracking.uri}: {first_line(error)}"


def _checkpoint(original: Original, step: int) -> CheckpointEntry | None:
    """The newest checkpoint of a step whose files are what the ledger says."""
    for entry in reversed(original.ledger.checkpoints()):
        folder = original.folder / entry.uri
        if entry.step == step and folder.is_dir() and folder_digest(folder) == entry.digest:
            return entry
    return None


def _origin(original: Original, step: int, policy: Policy) -> dict[str, Any]:
    record, tracking = original.manifest(step).record, read_record(original.folder)
    model_id = None
    if tracking is not None:
        try:
            model_id = find_model(client_of_existing_store(tracking.uri), tracking.run_id, step)
        except _MLFLOW_ERRORS:
            model_id = None  # `link_export`, which comes next, says what is wrong.
    return {
        "run": original.folder.name,
        "run_id": original.described.id,
        "step": step,
        "weights_digest": policy.weights_digest,
        "config_digest": record.config_digest,
        "code_version": record.code_version,
        "mlflow_run_id": None if tracking is None else tracking.run_id,
        "mlflow_model_id": model_id,
    }


def find_model(client: MlflowClient, run_id: str, step: int) -> str | None:
    """The LoggedModel of a step's checkpoint."""
    experiment = client.get_run(run_id).info.experiment_id
    own = f"source_run_id = '{run_id}' AND tags.step = '{step}'"
    found = client.search_logged_models([experiment], own, max_results=1)
    return found[0].model_id if found else None
