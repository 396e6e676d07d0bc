"""The content of a checkpoint's folder, and reading it so that damage is one line with the file and the field.

The chain of records names the digest of the FP32 masters. `check_weights` computes it from the stored masters, and
compares the stored policy with the masters in BF16. With adapters the digest is of these and of the stored policy. So a
policy that was exchanged is found even where the ledger has the digest of the changed folder.

| file                  | content                                                  |
| --------------------- | -------------------------------------------------------- |
| trainer.json          | version, updates and digest; with Megatron its grid too, |
|                       | with adapters the digest of what is frozen               |
| masters.safetensors   | FP32 masters, or adapters                                |
| optimiser.safetensors | moments                                                  |
| megatron/             | both, sharded, instead of the two files above            |
| policy/               | the BF16 policy in the Hugging Face layout               |
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8core.config.training import TrainingConfig
from fp8core.durable import read_stored
from fp8core.errors import StoredFileError, UserError, printable
from fp8core.models.architecture import architecture_from_hf, parameter_shapes
from fp8core.models.safetensors_files import StoredTensor, read_folder
from fp8core.models.tokenizer import Tokenizer
from fp8core.numerics.fingerprint import digest_of, fingerprint
from fp8core.store.json_text import MOST_STEPS, StepNumber, parse_model
from fp8core.store.layout import POLICY
from fp8core.store.schemas import tensor_header
from fp8core.training.lora import adapter_shapes
from fp8core.training.registry import trainer_of
from fp8core.user_files import read_json_object

STATE, MASTERS, OPTIMISER, SHARDS = "trainer.json", "masters.safetensors", "optimiser.safetensors", "megatron"


class SavedState(BaseModel):
    """trainer.json."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    version: StepNumber
    updates: int = Field(ge=0, le=1000 * MOST_STEPS, description="Optimiser updates so far, some of each step.")
    digest: str = Field(min_length=1, max_length=128, description="Of the masters.")
    grid: dict[str, JsonValue] | None = Field(None, description="Of Megatron's processes.")
    base: str | None = Field(None, min_length=1, max_length=128, description="Digest of the weights under adapters.")


def save_training(folder: Path, masters: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
    """Write FP32 masters, or adapters, and optimiser moments of a trainer in one process; the folder exists.

    Raises OSError.
    """
    try:
        save_file({name: tensor.detach().cpu().clone() for name, tensor in masters.items()}, folder / MASTERS)
        save_file({name: tensor.cpu().contiguous() for name, tensor in moments.items()}, folder / OPTIMISER)
    except SafetensorError as error:
        raise OSError(f"{folder}: {error}") from error


def write_state(folder: Path, version: int, updates: int, digest: str, base: str | None = None) -> None:
    """Write the counters of a checkpoint, and the digest of what is frozen under adapters."""
    frozen = {} if base is None else {"base": base}
    (folder / STATE).write_text(json.dumps({"version": version, "updates": updates, "digest": digest, **frozen}))


def read_state(folder: Path) -> SavedState:
    """The counters of a checkpoint. Raises StoredFileError."""
    return parse_model(_bytes(folder / STATE), SavedState, folder / STATE)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file of a checkpoint. Raises StoredFileError."""
    tensor_header(path)
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise StoredFileError(f"{path}: cannot be read: {error}") from error
    return tensors


def refuse_other_shapes(path: Path, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Raises StoredFileError: the tensors of a file are not those of this model, by name and shape."""
    _compare(path, *({name: tuple(tensor.shape) for name, tensor in tensors.items()} for tensors in (found, wanted)))


def header_of(path: Path, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, StoredTensor]:
    """The tensors of a file, which must have these names and shapes. Raises StoredFileError."""
    found = tensor_header(path)
    _compare(path, _shapes(found), wanted)
    return found


def refuse_other_digest(folder: Path, found: str, state: SavedState) -> None:
    """Raises StoredFileError: the weights are not those that the counters were saved with."""
    if found != state.digest:
        problem = f"digest: {state.digest}, but the weights have {found}"
        raise StoredFileError(f"{folder / STATE}: {problem}: not what was saved together")


def refuse_other_base(folder: Path, base: str | None, state: SavedState) -> None:
    """Raises StoredFileError: the adapters were saved over other frozen weights, or there are none."""
    if state.base != base:
        there, here = state.base or "nothing frozen", base or "nothing frozen"
        raise StoredFileError(f"{folder / STATE}: base: {there}, but the run has {here}")


def check_checkpoint(folder: Path, step: int, weights_digest: str, training: TrainingConfig) -> None:
    """Open every part of a checkpoint but the values of its tensors. Raises StoredFileError: file, field, problem.

    Shards are only there or not: they are read by torch, in a format of its own.

    Args:
        step: the checkpoint is of the policy after it.
        weights_digest: that of this policy's masters.
        training: the run's settings, which name the trainer that wrote it.
    """
    state = read_state(folder)
    if state.version != step:
        raise StoredFileError(f"{folder / STATE}: version: {state.version}, but the checkpoint is of step {step}")
    if state.digest != weights_digest:
        raise StoredFileError(f"{folder / STATE}: digest: {state.digest}, but the step's weights have {weights_digest}")
    shapes = _policy_shapes(folder / POLICY)
    trainer = trainer_of(training)
    if trainer.saves_shards:
        if state.grid is None:
            raise StoredFileError(f"{folder / STATE}: grid: missing, but the trainer is {trainer.name}")
        if not any((folder / SHARDS).glob("*")):
            raise StoredFileError(f"{folder / SHARDS}: the folder is missing or empty")
        return
    if state.grid is not None:
        raise StoredFileError(f"{folder / STATE}: grid: there is one, but the trainer is {trainer.name}")
    if (state.base is None) != (training.lora is None):
        found = "missing, but adapters learn" if state.base is None else "there is one, but no adapters learn"
        raise StoredFileError(f"{folder / STATE}: base: {found}")
    learnt = shapes if training.lora is None else adapter_shapes(shapes, training.lora)
    masters = tensor_header(folder / MASTERS)
    _compare(folder / MASTERS, _shapes(masters), learnt)
    _refuse_other_type(masters, "F32")
    _refuse_unknown_moments(folder / OPTIMISER, learnt)


def check_weights(folder: Path, weights_digest: str) -> None:
    """Read the values that `check_checkpoint` leaves out, one tensor at a time. Raises StoredFileError.

    The masters have the digest, the policy is the masters in BF16, and the moments are finite. Adapters have it
    together with the policy. The digest of a model in Megatron's shards depends on their grid: only its trainer
    computes it, when it loads them.
    """
    state = read_state(folder)
    if state.grid is not None:
        return
    masters, policy = tensor_header(folder / MASTERS), read_folder(folder / POLICY)
    found: dict[str, tuple[str, tuple[int, ...], str]] = {}
    if state.base is not None:
        found = {name: ("bfloat16", each.spec.shape, fingerprint(each.whole())) for name, each in policy.items()}
    other: StoredTensor | None = None
    for name, stored in masters.items():
        master = stored.whole()
        found[name] = ("float32", stored.spec.shape, fingerprint(master))
        if state.base is not None:
            continue
        rounded = policy[name].whole()
        if not torch.equal(master.bfloat16().view(torch.int16), rounded.view(torch.int16)):
            other = other or policy[name]
    if (made := digest_of(found)) != weights_digest:
        raise StoredFileError(
            f"{folder / MASTERS}: its weights have the digest {made}, those of the step have {weights_digest}"
        )
    if other is not None:
        raise StoredFileError(f"{other.file}: tensor {other.spec.name}: is not what {MASTERS} has, in BF16")
    for stored in tensor_header(folder / OPTIMISER).values():
        if not bool(stored.whole().isfinite().all()):
            raise StoredFileError(f"{stored.file}: tensor {stored.spec.name}: holds NaN or infinity")


def _refuse_unknown_moments(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises StoredFileError: a tensor of the optimiser is not `moment/parameter`, of its shape or a single number."""
    moments = tensor_header(path)
    for name, stored in moments.items():
        shape = shapes.get(name.partition("/")[2])
        if shape is None or stored.spec.shape not in (shape, ()):
            raise StoredFileError(f"{path}: tensor {printable(name)[:80]}: fits no parameter of the policy")
    _refuse_other_type(moments, "F32", "BF16")


def _refuse_other_type(tensors: Mapping[str, StoredTensor], *wanted: str) -> None:
    for name, stored in tensors.items():
        if stored.spec.dtype not in wanted:
            problem = f"expected type {' or '.join(wanted)}, found {stored.spec.dtype}"
            raise StoredFileError(f"{stored.file}: tensor {printable(name)[:80]}: {problem}")


def _policy_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the model that the policy's config.json describes, which its weights have."""
    try:
        config = folder / "config.json"
        architecture = architecture_from_hf(read_json_object(config), str(config))
        stored = read_folder(folder)
        # A layer, and an expert, has tensors of its own: what claims millions of them is not counted up.
        parts = max(architecture.num_layers, 0 if architecture.experts is None else architecture.experts.count)
        if parts > len(stored):
            raise StoredFileError(f"{config}: {parts} layers or experts, but the weights are {len(stored)} tensors")
        shapes = parameter_shapes(architecture)
        _compare(folder, _shapes(stored), shapes)
        _refuse_other_type(stored, "BF16")
        Tokenizer.load(folder)
    except StoredFileError:
        raise
    except UserError as error:
        raise StoredFileError(str(error)) from error
    return shapes


def _shapes(stored: Mapping[str, StoredTensor]) -> dict[str, tuple[int, ...]]:
    return {name: tensor.spec.shape for name, tensor in stored.items()}


def _compare(path: Path, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in wanted.items():
        if found.get(name) != shape:
            there = f"shape {list(found[name])}" if name in found else "nothing"
            raise StoredFileError(f"{path}: tensor {name}: expected shape {list(shape)}, found {there}")
    for name in found:
        if name not in wanted:
            raise StoredFileError(f"{path}: tensor {name}: expected nothing of this name")


def _bytes(path: Path) -> bytes:
    try:
        return read_stored(path)
    except OSError as error:
        raise StoredFileError(f"{path}: cannot be read: {error.strerror}") from error
