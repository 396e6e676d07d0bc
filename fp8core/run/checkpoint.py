"""Weights and optimiser on disk, and the policy as a Hugging Face folder beside them."""

import gc
import shutil
import time
from pathlib import Path

from safetensors import SafetensorError

from fp8core.durable import folder_digest, partial_folder, remove_folder, sync_path, write_problem
from fp8core.errors import StoredFileError, UserError
from fp8core.run.context import RunContext, gc_freeze
from fp8core.run.policy import initial_trainer
from fp8core.run.reference import check_reference, load_reference, reset_reference, save_reference
from fp8core.store.gc import kept_steps
from fp8core.store.layout import POLICY, checkpoint_place
from fp8core.store.ledger import START, CheckpointEntry
from fp8core.store.run_directory import checkpoint_folders
from fp8core.training.saved_state import check_checkpoint


def checkpoint_due(run: RunContext, index: int) -> bool:
    return index % run.config.checkpoint.every == 0 or index == run.config.steps


def unsaved_step(run: RunContext) -> int | None:
    """The last committed iteration, when no checkpoint of it can be resumed from; else None."""
    ledger = run.directory.ledger
    last = ledger.last_step()
    newest = next(iter(ledger.last_checkpoints()), None)
    if last is None or last == START or newest is None or newest.step < last:
        return last or None
    is_resumable = run.directory.checkpoint(newest).is_dir() and ledger.held_policy(newest) is not None
    return None if newest.step > last or is_resumable else last


def save_state(run: RunContext, index: int) -> None:
    began = time.perf_counter()
    uri = checkpoint_place(index)
    folder = run.directory.path / uri
    trainer = run.trainer
    partial = partial_folder(folder)
    try:
        if partial.exists():
            shutil.rmtree(partial)
        if folder.exists():
            # By the other's name, which is free now.
            remove_folder(folder)
        partial.mkdir()
        trainer.save(partial)
        trainer.save_policy(partial / POLICY, run.tokenizer)
        save_reference(run.workers.reference, partial, run.tokenizer)
        for path in partial.rglob("*"):
            sync_path(path)
        sync_path(partial)
        partial.rename(folder)
        sync_path(folder.parent)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder}: the checkpoint cannot be written: {write_problem(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    digests = {"digest": folder_digest(folder), "weights_digest": trainer.digest()}
    run.directory.ledger.append(CheckpointEntry(step=index, uri=uri, **digests, seconds=time.perf_counter() - began))
    _prune(run, index)


def load_state(run: RunContext, version: int) -> None:
    """Put the trainer at the newest policy up to `version` whose checkpoint matches the ledger, else at policy 0."""
    entries = run.directory.ledger.last_checkpoints()
    for entry in entries:
        place = run.directory.checkpoint(entry)
        if entry.step <= version:
            problem = _load(run, entry, place)
            if problem is None:
                return
            if place.is_dir():
                run.console.note(f"{place}: {problem}; an older state is taken, and more updates are redone")
    if not entries and run.trainer.version == START:
        return
    run.trainer.close()
    run.workers.trainer = None  # There may be no room for two.
    reset_reference(run)
    gc.unfreeze()
    gc.collect()
    run.workers.trainer = initial_trainer(run)
    gc_freeze()


def _load(run: RunContext, entry: CheckpointEntry, folder: Path) -> str | None:
    if run.directory.ledger.held_policy(entry) is None:
        return "the checkpoint holds another policy than the run went on from"
    if not folder.is_dir():
        return "the checkpoint is missing"
    try:
        digest = folder_digest(folder)
        if digest != entry.digest:
            return f"the checkpoint is damaged: digest {digest}, the ledger says {entry.digest}"
        check_checkpoint(folder, entry.step, entry.weights_digest)
        check_reference(run.directory.ledger, run.store, entry.step, folder)
        run.trainer.load(folder)
        load_reference(run, folder)
    except OSError as error:
        return f"the checkpoint cannot be read: {error.strerror}"
    except StoredFileError as error:
        return f"the checkpoint is damaged: {error}"
    return None


def _prune(run: RunContext, index: int) -> None:
    folders = checkpoint_folders(run.directory.path)
    older = [*folders][: -(run.config.checkpoint.keep + 1)]
    if run.config.pipeline.reach:
        old_enough = [step for step in folders if step <= index - run.config.pipeline.reach]
        older = [step for step in older if step in old_enough[:-1]]
    keep = run.config.artifacts.keep
    kept_numbers = set() if keep is None else kept_steps(keep, range(index + 1))
    for step in older:
        if step not in kept_numbers:
            remove_folder(folders[step])
