"""Checkpoint folders in the Hugging Face layout: read with every tensor checked, written whole or not at all."""

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fp8core.errors import UserError
from fp8core.models.architecture import Architecture, parameter_shapes
from fp8core.models.hf_config import architecture_from_hf, architecture_to_hf, one_or_list, read_json_object
from fp8core.models.tokenizer import Tokenizer
from fp8core.store.durable import sync_path

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class Checkpoint:
    """A model as it lies on disk; `tensors` has exactly the names of `parameter_shapes`, in their stored types."""

    architecture: Architecture
    tensors: dict[str, Tensor]
    tokenizer: Tokenizer

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a completion."""
        return self.tokenizer.eos_ids


@dataclass(frozen=True)
class _Stored:
    """What a safetensors header says of one tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read config.json, the weights (one safetensors file or an index of several) and the tokenizer.

    Raises:
        UserError: naming the file, and the key or tensor with what was expected and found.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    config_path = folder / "config.json"
    architecture = architecture_from_hf(read_json_object(config_path), str(config_path))
    tensors = _read_tensors(folder, architecture)
    tokenizer = Tokenizer.load(folder)
    largest = max(tokenizer.vocab_size - 1, *tokenizer.eos_ids)
    if largest >= architecture.vocab_size:
        raise UserError(f"{folder}: token {largest} is beyond vocab_size={architecture.vocab_size} of config.json")
    return Checkpoint(architecture, tensors, tokenizer)


def save_checkpoint(
    folder: Path,
    architecture: Architecture,
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a folder that `load_checkpoint`, transformers and vLLM read.

    Everything is written and synced in `.<name>.partial` beside it, which is then renamed; a leftover of an
    interrupted call is replaced. Equal input gives equal bytes.

    Args:
        folder: Must not exist, or be empty.
        architecture: The decoder.
        tensors: Exactly the names and shapes of `parameter_shapes(architecture)`.
        tokenizer: Saved with it.
        dtype: Type of the stored weights.

    Raises:
        UserError: the folder is in the way or cannot be written.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == parameter_shapes(architecture), "tensors do not fit the architecture"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: already exists; a checkpoint is never overwritten")
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write(partial, architecture, tensors, tokenizer, dtype)
        for path in (*partial.iterdir(), partial):
            sync_path(path)
        partial.replace(folder)
        sync_path(folder.parent)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder}: the checkpoint cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(
    folder: Path, arch: Architecture, tensors: Mapping[str, Tensor], tokenizer: Tokenizer, dtype: torch.dtype
) -> None:
    tokens: dict[str, Any] = {"bos_id": tokenizer.bos_id, "eos_ids": tokenizer.eos_ids, "pad_id": tokenizer.pad_id}
    _write_json(folder / "config.json", architecture_to_hf(arch, **tokens, dtype=str(dtype).removeprefix("torch.")))
    generation = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": one_or_list(tokenizer.eos_ids),
        "pad_token_id": tokenizer.pad_id,
    }
    _write_json(folder / "generation_config.json", generation)
    tokenizer.save(folder)
    cast = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    save_file(cast, folder / _WEIGHTS, metadata={"format": "pt"})
    # safetensors creates its file for the owner alone; it is to be as readable as the others.
    shutil.copymode(folder / "config.json", folder / _WEIGHTS)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _read_tensors(folder: Path, arch: Architecture) -> dict[str, Tensor]:
    shapes = parameter_shapes(arch)
    files = _weight_files(folder)
    try:
        stored = _headers(files)
        _check(stored, shapes, arch.tie_embeddings, files[0] if len(files) == 1 else folder / _INDEX)
        tensors = _load(stored)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{folder}: the weights cannot be read: {error}") from error
    if arch.tie_embeddings and _HEAD in tensors and not torch.equal(tensors[_HEAD], tensors[_EMBEDDING]):
        raise UserError(
            f"{stored[_HEAD].file}: tensor {_HEAD}: expected the values of {_EMBEDDING} (config.json says "
            f"tie_word_embeddings), found others"
        )
    return {name: tensors[name] for name in shapes}


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / _WEIGHTS, folder / _INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        raise UserError(f"{folder}: neither {_WEIGHTS} nor {_INDEX}; only safetensors weights are read")
    weight_map = read_json_object(index).get("weight_map")
    names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise UserError(f"{index}: weight_map: expected an object from tensors to files of this folder")
    return [folder / name for name in sorted(names)]


def _headers(files: Iterable[Path]) -> dict[str, _Stored]:
    stored: dict[str, _Stored] = {}
    for file in files:
        if not file.is_file():
            raise UserError(f"{file}: no such file, but the index names it")
        with _open(file) as handle:
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                if name in stored:
                    raise UserError(f"{file}: tensor {name}: expected once, found in {stored[name].file.name} as well")
                entry = handle.get_slice(name)
                stored[name] = _Stored(file, tuple(entry.get_shape()), entry.get_dtype())
    # Old Llama conversions store the rotary frequencies, which the configuration determines.
    return {name: entry for name, entry in stored.items() if not name.endswith("rotary_emb.inv_freq")}


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise UserError(f"{file}: not a complete safetensors file: {error}") from error


def _check(stored: Mapping[str, _Stored], shapes: Mapping[str, tuple[int, ...]], tied: bool, where: Path) -> None:
    allowed = {**shapes, _HEAD: shapes[_EMBEDDING]} if tied else shapes
    missing = [name for name in shapes if name not in stored]
    problems = [f"{where}: tensor {name}: expected shape {list(shapes[name])}, found nothing" for name in missing]
    for name, entry in stored.items():
        place = f"{entry.file}: tensor {name}"
        if name not in allowed:
            problems.append(f"{place}: expected nothing of this name, found shape {list(entry.shape)}")
        elif entry.shape != allowed[name]:
            problems.append(f"{place}: expected shape {list(allowed[name])}, found {list(entry.shape)}")
        elif entry.dtype not in _DTYPES:
            problems.append(f"{place}: expected dtype {', '.join(_DTYPES)}, found {entry.dtype}")
    if problems:
        others = f" (and {len(problems) - 1} more tensors differ)" if len(problems) > 1 else ""
        raise UserError(problems[0] + others)


def _load(stored: Mapping[str, _Stored]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in {entry.file for entry in stored.values()}:
        with _open(file) as handle:
            tensors.update({name: handle.get_tensor(name) for name, entry in stored.items() if entry.file == file})
    return tensors
