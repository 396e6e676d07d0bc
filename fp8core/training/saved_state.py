"""The content of a checkpoint's folder, and reading it so that damage is one line with the file and the field.

| file                  | content                                                  |
| --------------------- | -------------------------------------------------------- |
| trainer.json          | version, updates and digest; with Megatron its grid too, |
|                       | with adapters the digest of what is frozen               |
| masters.safetensors   | FP32 masters, or adapters                                |
| optimiser.safetensors | moments                                                  |
| megatron/             | both, sharded, instead of the two files above            |
| policy/               | the BF16 policy in the Hugging Face layout               |"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fp8core.errors import StoredFileError
from fp8core.models.safetensors_files import StoredTensor, read_folder
from fp8core.numerics.fingerprint import digest_of, fingerprint
from fp8core.store.json_text import StepNumber, parse_model
from fp8core.store.layout import POLICY
from fp8core.store.tables import tensor_header

STATE = "trainer.json"
MASTERS = "masters.safetensors"
OPTIMISER = "optimiser.safetensors"
SHARDS = "megatron"


class SavedState(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    version: StepNumber
    updates: int = Field(ge=0, description="Optimiser updates so far, some of each step.")
    digest: str = Field(min_length=1, max_length=128, description="Of the masters.")
    grid: dict[str, JsonValue] | None = Field(None, description="Of Megatron's processes.")
    base: str | None = Field(None, min_length=1, max_length=128, description="Digest of the weights under adapters.")


def write_state(folder: Path, version: int, updates: int, digest: str, base: str | None = None) -> None:
    frozen = {} if base is None else {"base": base}
    (folder / STATE).write_text(json.dumps({"version": version, "updates": updates, "digest": digest, **frozen}))


def read_state(folder: Path) -> SavedState:
    """Raises StoredFileError."""
    try:
        return parse_model((folder / STATE).read_bytes(), SavedState, folder / STATE)
    except OSError as error:
        raise StoredFileError(f"{folder / STATE}: cannot be read: {error.strerror}") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Raises StoredFileError."""
    tensor_header(path)
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise StoredFileError(f"{path}: cannot be read: {error}") from error
    return tensors


def check_shapes(path: Path, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    _compare(path, *({name: tuple(tensor.shape) for name, tensor in actual.items()} for actual in (actual, expected)))


def header_of(path: Path, expected: Mapping[str, tuple[int, ...]]) -> dict[str, StoredTensor]:
    """The tensors of a file, which must have these names and shapes. Raises StoredFileError."""
    header = tensor_header(path)
    _compare(path, {name: tensor.spec.shape for name, tensor in header.items()}, expected)
    return header


def check_digest(folder: Path, digest: str, state: SavedState) -> None:
    """Raises StoredFileError: the weights are not those that the counters were saved with."""
    if digest != state.digest:
        problem = f"digest: {state.digest}, but the weights have {digest}"
        raise StoredFileError(f"{folder / STATE}: {problem}: not what was saved together")


def check_base(folder: Path, base: str | None, state: SavedState) -> None:
    """Raises StoredFileError: the adapters were saved over other frozen weights."""
    if state.base != base:
        there = state.base or "nothing frozen"
        here = base or "nothing frozen"
        raise StoredFileError(f"{folder / STATE}: base: {there}, but the run has {here}")


def check_checkpoint(folder: Path, step: int, weights_digest: str) -> None:
    """Check the counters of the policy after `step`. Raises StoredFileError: file, field, problem."""
    state = read_state(folder)
    if state.version != step:
        raise StoredFileError(f"{folder / STATE}: version: {state.version}, but the checkpoint is of step {step}")
    if state.digest != weights_digest:
        raise StoredFileError(f"{folder / STATE}: digest: {state.digest}, but the step's weights have {weights_digest}")


def check_weights(folder: Path, weights_digest: str) -> None:
    """Read the values, one tensor at a time. Raises StoredFileError.

    The masters have the digest, and the policy is the masters in BF16. Adapters have it together with the policy. Of
    Megatron's shards it depends on their grid: only its trainer computes it."""
    state = read_state(folder)
    if state.grid is not None:
        return
    masters = tensor_header(folder / MASTERS)
    policy = read_folder(folder / POLICY)
    prints: dict[str, tuple[str, tuple[int, ...], str]] = {}
    if state.base is not None:
        prints = {name: ("bfloat16", each.spec.shape, fingerprint(each.whole())) for name, each in policy.items()}
    other: str | None = None
    for name, tensor in masters.items():
        master = tensor.whole()
        prints[name] = ("float32", tensor.spec.shape, fingerprint(master))
        if state.base is not None:
            continue
        bits = master.bfloat16().view(torch.int16)
        if name not in policy or not torch.equal(bits, policy[name].whole().view(torch.int16)):
            other = other or name
    if (digest := digest_of(prints)) != weights_digest:
        raise StoredFileError(
            f"{folder / MASTERS}: its weights have the digest {digest}, those of the step have {weights_digest}"
        )
    if other is not None:
        raise StoredFileError(f"{folder / POLICY}: tensor {other}: is not what {MASTERS} has, in BF16")


def _compare(path: Path, shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in expected.items():
        if shapes.get(name) != shape:
            there = f"shape {list(shapes[name])}" if name in shapes else "nothing"
            raise StoredFileError(f"{path}: tensor {name}: expected shape {list(shape)}, found {there}")
    for name in shapes:
        if name not in expected:
            raise StoredFileError(f"{path}: tensor {name}: expected nothing of this name")
