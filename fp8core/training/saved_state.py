"""The content of a checkpoint's folder, and reading it so that damage is one line with the file and the field.

| file                  | content                                                  |
| --------------------- | -------------------------------------------------------- |
| trainer.json          | version, updates and digest; with Megatron its grid too  |
| masters.safetensors   | FP32 masters                                             |
| optimiser.safetensors | moments                                                  |
| megatron/             | both, sharded, instead of the two files above            |
| policy/               | the BF16 policy in the Hugging Face layout               |
"""

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, JsonValue
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8core.errors import StoredFileError, UserError
from fp8core.input_file import read_json_object
from fp8core.models.architecture import architecture_from_hf, parameter_shapes
from fp8core.models.safetensors_stream import StoredTensor, read_folder
from fp8core.models.tokenizer import Tokenizer
from fp8core.store.json_text import MOST_STEPS, StepNumber, parse_model
from fp8core.store.schemas import tensor_header

STATE, MASTERS, OPTIMISER, SHARDS = "trainer.json", "masters.safetensors", "optimiser.safetensors", "megatron"


class SavedState(BaseModel):
    """trainer.json."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    version: StepNumber
    updates: int = Field(ge=0, le=1000 * MOST_STEPS, description="Optimiser updates so far, some of each step.")
    digest: str = Field(min_length=1, max_length=128, description="Of the masters.")
    grid: dict[str, JsonValue] | None = Field(None, description="Of Megatron's processes.")


def save_training(
    folder: Path, masters: Mapping[str, Tensor], moments: Mapping[str, Tensor], version: int, updates: int, digest: str
) -> None:
    """Write FP32 masters, optimiser moments and counters of a trainer in one process; the folder exists."""
    save_file({name: tensor.detach().cpu().clone() for name, tensor in masters.items()}, folder / MASTERS)
    save_file({name: tensor.cpu().contiguous() for name, tensor in moments.items()}, folder / OPTIMISER)
    (folder / STATE).write_text(json.dumps({"version": version, "updates": updates, "digest": digest}))


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


def refuse_other_digest(folder: Path, found: str, state: SavedState) -> None:
    """Raises StoredFileError: the weights are not those that the counters were saved with."""
    if found != state.digest:
        problem = f"digest: {state.digest}, but the weights have {found}"
        raise StoredFileError(f"{folder / STATE}: {problem}: not what was saved together")


def check_checkpoint(folder: Path, step: int) -> None:
    """Open every part of a checkpoint but the values of its tensors. Raises StoredFileError: file, field, problem.

    Megatron's shards are only there or not: they are read by torch, in a format of its own.
    """
    state = read_state(folder)
    if state.version != step:
        raise StoredFileError(f"{folder / STATE}: version: {state.version}, but the checkpoint is of step {step}")
    shapes = _policy_shapes(folder / "policy")
    if state.grid is not None:
        if not any((folder / SHARDS).glob("*")):
            raise StoredFileError(f"{folder / SHARDS}: the folder is missing or empty")
        return
    _compare(folder / MASTERS, _shapes(tensor_header(folder / MASTERS)), shapes)
    tensor_header(folder / OPTIMISER)


def _policy_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the model that the policy's config.json describes, which its weights have."""
    try:
        config = folder / "config.json"
        architecture = architecture_from_hf(read_json_object(config), str(config))
        stored = _shapes(read_folder(folder))
        # A layer, and an expert, has tensors of its own: what claims millions of them is not counted up.
        parts = max(architecture.num_layers, 0 if architecture.experts is None else architecture.experts.count)
        if parts > len(stored):
            raise StoredFileError(f"{config}: {parts} layers or experts, but the weights are {len(stored)} tensors")
        shapes = parameter_shapes(architecture)
        _compare(folder, stored, shapes)
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
        return path.read_bytes()
    except OSError as error:
        raise StoredFileError(f"{path}: cannot be read: {error.strerror}") from error
