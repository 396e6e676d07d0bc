"""Weights and optimiser on disk, and the policy as a Hugging Face folder beside them."""

import shutil
import time

from safetensors import SafetensorError

from fp8core.durable import folder_digest, partial_folder, remove_folder, sync_path, why_not_written
from fp8core.errors import StoredFileError, UserError
from fp8core.run.context import RunContext, gc_unfrozen
from fp8core.run.policy import initial_trainer
from fp8core.store.checkpoints import held_policy, last_written
from fp8core.store.gc import kept_steps, metric_values
from fp8core.store.layout import POLICY, checkpoint_place
from fp8core.store.ledger import START, CheckpointEntry
from fp8core.store.run_directory import checkpoint_folders
from fp8core.training.saved_state import check_checkpoint


def checkpoint_due(run: RunContext, index: int) -> bool:
    """Every `checkpoint.every` iterations, and after the last."""
    return index % run.config.checkpoint.every == 0 or index == run.config.steps


def missing_checkpoint(run: RunContext) -> int | None:
    """The last committed iteration, when its checkpoint was due and there is none to resume from; else None."""
    last = _beyond_checkpoints(run)
    return last if last is not None and checkpoint_due(run, last) else None


def unsaved_step(run: RunContext) -> int | None:
    """The last committed iteration, when no checkpoint holds its policy and the trainer still does; else None."""
    last = _beyond_checkpoints(run)
    return last if last is not None and run.ready_trainer().version == last else None


def _beyond_checkpoints(run: RunContext) -> int | None:
    """The last committed iteration, when no checkpoint of it can be resumed from; else None."""
    last, newest = run.directory.ledger.last_step(), next(last_written(run.directory.ledger), None)
    entered = START if newest is None else newest.step
    if last is None or last < entered or last == START:
        return None
    return None if newest is not None and last == entered and _is_resumable(run, newest) else last


def _is_resumable(run: RunContext, entry: CheckpointEntry) -> bool:
    """Its files were read when the run was restored: they may be large, and are not read again at every stop."""
    held = held_policy(run.directory.ledger, run.directory.store, entry)
    return held is not None and entry.step not in run.lost_checkpoints and run.directory.checkpoint(entry).is_dir()


def save_state(run: RunContext, index: int) -> None:
    """Write `checkpoints/<step>/`, enter it in the ledger, and remove older checkpoints that nothing keeps.

    The folder holds the trainer's state, and in `policy/` the BF16 policy in the Hugging Face layout.
    """
    began = time.perf_counter()
    uri = checkpoint_place(index)
    folder = run.directory.path / uri
    trainer = run.ready_trainer()
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
        for path in partial.rglob("*"):
            sync_path(path)
        sync_path(partial)
        partial.rename(folder)
        sync_path(folder.parent)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder}: the checkpoint cannot be written: {why_not_written(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    digests = {"digest": folder_digest(folder), "weights_digest": trainer.digest()}
    run.lost_checkpoints.discard(index)
    run.directory.ledger.append(CheckpointEntry(step=index, uri=uri, **digests, seconds=time.perf_counter() - began))
    _prune(run, index)


def load_state(run: RunContext, version: int) -> None:
    """Put the trainer at the newest policy up to `version` whose checkpoint matches the ledger, else at policy 0.

    A checkpoint that should be there and is missing or damaged is named on the console.
    """
    count = 0
    for count, entry in enumerate(last_written(run.directory.ledger), start=1):
        if entry.step <= version:
            problem = _load(run, entry)
            if problem is None:
                run.lost_checkpoints.discard(entry.step)
                return
            run.lost_checkpoints.add(entry.step)
            place = run.directory.checkpoint(entry)
            if place.is_dir() or not _is_pruned(run, entry, count - 1):
                run.console.note(f"{place}: {problem}; an older state is taken, and more updates are redone")
    if not count and run.ready_trainer().version == START:
        return
    run.ready_trainer().close()
    run.trainer = None  # There may be no room for two.
    with gc_unfrozen():
        run.trainer = initial_trainer(run)


def _is_pruned(run: RunContext, entry: CheckpointEntry, later: int) -> bool:
    """True of one that as many later ones have replaced as are kept beside the newest.

    A replay's ledger, of which `later` is the count, ends early: that of the run which it makes again has them all.
    """
    if run.replayed is not None:
        later = sum(other.step > entry.step for other in last_written(run.replayed.ledger))
    return later > run.config.checkpoint.keep


def _load(run: RunContext, entry: CheckpointEntry) -> str | None:
    """Load a checkpoint; returns what forbids it, None when it is loaded."""
    folder = run.directory.checkpoint(entry)
    if held_policy(run.directory.ledger, run.directory.store, entry) is None:
        return "the checkpoint holds another policy than the run went on from"
    if not folder.is_dir():
        return "the checkpoint is missing"
    try:
        found = folder_digest(folder)
        if found != entry.digest:
            return f"the checkpoint is damaged: digest {found}, the ledger says {entry.digest}"
        check_checkpoint(folder, entry.step, entry.weights_digest)
        run.ready_trainer().load(folder)
    except OSError as error:
        return f"the checkpoint cannot be read: {error.strerror}"
    except StoredFileError as error:
        return f"the checkpoint is damaged: {error}"
    return None


def _prune(run: RunContext, index: int) -> None:
    """The last `checkpoint.keep` + 1 checkpoints stay, and those of the steps that `artifacts.keep` names.

    So do those from which every policy follows that a resumed run scores tokens with, now and later.
    """
    folders = checkpoint_folders(run.directory.path)
    older = [*folders][: -(run.config.checkpoint.keep + 1)]
    if run.config.pipeline.reach:
        reached = [step for step in folders if step <= index - run.config.pipeline.reach]
        older = [step for step in older if step in reached[:-1]]
    kept = _kept_steps(run, index) if older else set()
    for step in older:
        if step not in kept:
            remove_folder(folders[step])


def _kept_steps(run: RunContext, index: int) -> set[int]:
    """Of the steps up to `index`, those that `artifacts.keep` names; all, where none has the metric of the best."""
    keep, ledger = run.config.artifacts.keep, run.directory.ledger
    if keep is None:
        return set()
    if keep.best is None:
        return kept_steps(keep, range(index + 1), {})
    metric = keep.best.metric
    values = metric_values(ledger, run.directory.store, metric)
    # Held-out metrics begin with the first evaluation; no step before it can be the best.
    due = index >= run.config.evaluation.every or not metric.startswith("reward/heldout_")
    if due and not values:
        run.console.note(f"artifacts.keep.best.metric: no step has {metric} yet; all checkpoints stay")
        return {*range(index + 1)}
    return kept_steps(keep, range(index + 1), values)
