"""Weights and optimiser on disk, and the policy as a Hugging Face folder beside them."""

import shutil

from fp8core.errors import UserError
from fp8core.models.checkpoint import save_checkpoint
from fp8core.store.durable import sync_path
from fp8core.store.folder_digest import folder_digest
from fp8core.store.ledger import CheckpointEntry
from fp8core.workers.live import LiveRun


def checkpoint_due(run: LiveRun, index: int) -> bool:
    """Every `checkpoint.every` iterations, and after the last."""
    return index % run.config.checkpoint.every == 0 or index == run.config.steps


def save_state(run: LiveRun, index: int) -> None:
    """Write `checkpoints/<step>/`, enter it in the ledger, and remove checkpoints beyond `checkpoint.keep`.

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
        for path in partial.iterdir():
            sync_path(path)
        sync_path(partial)
        partial.rename(folder)
        sync_path(folder.parent)
    except OSError as error:
        raise UserError(f"{folder}: the checkpoint cannot be written: {error.strerror}") from error
    run.directory.ledger.append(
        CheckpointEntry(step=index, uri=uri, digest=folder_digest(folder), weights_digest=trainer.digest())
    )
    _prune(run)


def _prune(run: LiveRun) -> None:
    """The last `keep` + 1 checkpoints stay."""
    folders = sorted((run.directory.path / "checkpoints").glob("[0-9]*"))
    for folder in folders[: -(run.config.checkpoint.keep + 1)]:
        shutil.rmtree(folder)
