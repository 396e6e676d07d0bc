"""The policy after a step as a folder that others load, which names its origin."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import save_file

from fp8core.config.run import RunConfig
from fp8core.durable import make_folder, sync_path, write_file
from fp8core.errors import StoredFileError, UserError, first_line
from fp8core.numerics.fingerprint import masters_digest
from fp8core.report.console import Console
from fp8core.run.execute import carried_artifacts
from fp8core.run.loop import begin
from fp8core.run.replay import RunSnapshot, scratch_folder, scratch_run
from fp8core.store.gc import is_intact
from fp8core.store.json_text import StepNumber, parse_model
from fp8core.store.layout import POLICY
from fp8core.store.ledger import START, CheckpointEntry, weights_of
from fp8core.training.saved_state import MASTERS, check_checkpoint, check_weights, read_tensors

Format = Literal["bf16", "fp8", "peft"]
ORIGIN = "fp8_grpo.json"
"""Beside the weights: the run and the step that they come from."""


@dataclass(frozen=True)
class ExportedPolicy:
    """`weights_digest` is of the FP32 weights; `state` has the trainer's state of a run that learns adapters."""

    folder: Path
    weights_digest: str
    state: Path


class Origin(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Format
    run: str = Field(description="Name of the run.")
    run_id: str
    step: StepNumber
    weights_digest: str = Field(description="Of the FP32 weights that these were rounded from.")
    config_digest: str
    code_version: str


def read_origin(folder: Path) -> Origin:
    path = folder / ORIGIN
    try:
        return parse_model(path.read_bytes(), Origin, path)
    except OSError as error:
        raise StoredFileError(f"{path}: cannot be read: {error.strerror}") from error


@contextmanager
def stored_policy(original: RunSnapshot, step: int, console: Console) -> Iterator[ExportedPolicy]:
    """Raises UserError: the policy cannot be restored equal; StoredFileError: its checkpoint is of other weights."""
    original.check_step(step)
    checkpoint = _checkpoint(original, step)
    if checkpoint is not None:
        _check_weights(original, step, checkpoint.weights_digest)
        folder = original.folder / checkpoint.uri
        check_checkpoint(folder, step, checkpoint.weights_digest)
        check_weights(folder, checkpoint.weights_digest)
        yield ExportedPolicy(folder / POLICY, checkpoint.weights_digest, folder)
        return
    config = original.config(step)
    with scratch_folder(original.folder, step + 1, config) as folder:
        with scratch_run(config, original, folder, step, console) as run:
            policy = carried_artifacts(run, step + 1)["policy"]
            begin(run)
            if carried_artifacts(run, step + 1)["policy"] != policy:
                raise UserError(f"run {original.folder.name}: the policy after step {step} cannot be restored equal")
            trainer = run.trainer
            # The warm start names its weights as a whole, Megatron's trainer those of each process.
            whole = step == START
            digest = masters_digest(run.initial_policy(), torch.device("cpu")) if whole else trainer.digest()
            _check_weights(original, step, digest)
            trainer.save_policy(folder / POLICY, run.tokenizer)
            state = folder / "state"
            state.mkdir()
            if config.training.lora is not None:  # The state of a whole model is large, and nothing of it is exported.
                trainer.save(state)
        # The caller may need the places of its processes.
        yield ExportedPolicy(folder / POLICY, digest, state)


def export(
    original: RunSnapshot,
    step: int,
    policy: ExportedPolicy,
    format: Format,
    target: Path,
    write: Callable[[Path], object],
) -> None:
    """Write a policy and its origin to a folder that appears whole or not at all. Raises UserError."""
    check_target(target)
    partial = target.absolute().with_name(f".{target.name}.export")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        make_folder(partial.parent)
        write(partial)
        record = original.manifest(step).record
        origin = Origin(
            format=format,
            run=original.folder.name,
            run_id=original.description.id,
            step=step,
            weights_digest=policy.weights_digest,
            config_digest=record.config_digest,
            code_version=record.code_version,
        )
        write_file(partial / ORIGIN, f"{origin.model_dump_json(indent=2)}\n".encode())
        partial.rename(target)
        sync_path(target.absolute().parent)
    except OSError as error:
        raise UserError(f"{target}: the policy cannot be written: {error.strerror or first_line(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_format(config: RunConfig, format: Format) -> None:
    if format == "peft" and config.training.lora is None:
        raise UserError("--format peft: the run has no adapters (training.lora is null); choose bf16 or fp8")


def write_adapter(policy: ExportedPolicy, config: RunConfig, target: Path) -> None:
    """Write the adapters as a folder that PEFT loads over the policy after step 0. Raises OSError."""
    lora = config.training.lora
    assert lora is not None, "the format was checked"
    has_warm_start = config.warm_start is not None
    tensors = {f"base_model.model.{name}": each for name, each in read_tensors(policy.state / MASTERS).items()}
    adapter_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if has_warm_start else config.model,
        "revision": None if has_warm_start else config.revision,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": lora.targets,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    make_folder(target)
    save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})
    sync_path(target / "adapter_model.safetensors")
    write_file(target / "adapter_config.json", f"{json.dumps(adapter_config, indent=2)}\n".encode())


def check_target(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise UserError(f"{target}: already exists; an export is never written over something else")


def copy_folder(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    for path in (*target.rglob("*"), target):
        sync_path(path)


def _checkpoint(original: RunSnapshot, step: int) -> CheckpointEntry | None:
    for entry in reversed(original.ledger.checkpoints()):
        folder = original.folder / entry.uri
        if entry.step == step and folder.is_dir() and is_intact(folder, entry.digest):
            return entry
    return None


def _check_weights(original: RunSnapshot, step: int, weights_digest: str) -> None:
    digest = weights_of(original.ledger, original.store, step)
    if weights_digest not in digest:
        raise StoredFileError(
            f"run {original.folder.name}: the policy after step {step} has weights {weights_digest}, the ledger says "
            f"{digest[0]}"
        )
