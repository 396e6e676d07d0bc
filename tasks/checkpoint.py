"""Weights and optimiser on disk, and the policy as a Hugging Face folder beside them."""

import shutil

from fp8core.errors import UserError
from fp8core.models.checkpoint import save_checkpoint
from fp8core.store.durable import remove_folder, sync_path
from fp8core.store.folder_digest import folder_digest
from fp8core.store.ledger import CheckpointEntry
from fp8core.store.retention import kept_steps, metric_values
from fp8core.workers.live import LiveRun


def checkpoint_due(run: LiveRun, index: int) -> bool:
    """Every `checkpoint.every` iterations, and after the last."""
    return index % run.config.checkpoint.every == 0 or index == run.config.steps


def save_state(run: LiveRun, index: int) -> None:
    """Write `checkpoints/<step>/`, enter it in the ledger, and remove older checkpoints that nothing keeps.

    The folder holds the trainer's state, and in `policy/` the BF16 policy in the Hugging Face layout.
    """
    uri = f"checkpoints/{index:05d}"
    folder = run.directory.path / uri
    trainer = run.ready_trainer()
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        for stale in (partial, folder):
            if stale.exists():
                shutil.rmtree(stale)
        partial.mkdir()
        trainer.save(partial)
        save_checkpoint(partial / "policy", run.arch, trainer.masters, run.tokenizer)
        for path in partial.rglob("*"):
            sync_path(path)
        sync_path(partial)
        partial.rename(folder)
        sync_path(folder.parent)
    except OSError as error:
        raise UserError(f"{folder}: the checkpoint cannot be written: {error.strerror}") from error
    run.directory.ledger.append(
        CheckpointEntry(step=index, uri=uri, digest=folder_digest(folder), weights_digest=trainer.digest())
    )
    _prune(run, index)


def _prune(run: LiveRun, index: int) -> None:
    """The last `checkpoint.keep` + 1 checkpoints stay, and those of the steps that `artifacts.keep` names."""
    folders = sorted((run.directory.path / "checkpoints").glob("[0-9]*"))
    older = folders[: -(run.config.checkpoint.keep + 1)]
    kept = _kept_steps(run, index) if older else set()
    for folder in older:
        if int(folder.name) not in kept:
            remove_folder(folder)


def _kept_steps(run: LiveRun, index: int) -> set[int]:
    """Of the steps up to `index`, those that `artifacts.keep` names."""
    keep, ledger = run.config.artifacts.keep, run.directory.ledger
    if keep is None:
        return set()
    values = {} if keep.best is None else metric_values(ledger, run.directory.store, keep.best.metric)
    return kept_steps(keep, range(index + 1), values)
