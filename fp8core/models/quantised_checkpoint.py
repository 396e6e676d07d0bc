"""Checkpoints in block FP8, in the layout of DeepSeek-V3, which vLLM, SGLang and transformers read.

The linears of the decoder's layers are quantised, all else stays in BF16 (arXiv 2412.19437, section 3.3). A matrix that
ends in a partial tile of 128 beside whole ones is refused: neither transformers nor vLLM reads it.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from fp8core.durable import make_folder, sync_path, write_file
from fp8core.errors import UserError
from fp8core.models.architecture import BLOCK_FP8
from fp8core.models.checkpoint import StoredCheckpoint, find_checkpoint, whole_folder
from fp8core.models.safetensors_files import INDEX, StoredTensor
from fp8core.models.weights import StoredNames, stored_weights
from fp8core.numerics.e4m3 import GroupNotFinite
from fp8core.numerics.recipe import TILE, Grouping
from fp8core.user_files import read_json_object

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True)
class Quantisation:
    """A checkpoint in BF16, FP16 or FP32, not read yet, and the formats that its tensors are to have."""

    source: StoredCheckpoint
    formats: StoredNames
    tiles: Grouping

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        return tuple(self.source.stored.values())

    @property
    def quantised(self) -> tuple[StoredTensor, ...]:
        return tuple(tensor for tensor in self.tensors if self.formats.of(tensor.spec.name) == "fp8_block")

    @property
    def size(self) -> int:
        """Bytes of the source's tensors."""
        return sum(tensor.spec.size for tensor in self.tensors)


def plan_quantisation(source: Path, tiles: Grouping, first_layers: int = 0, last_layers: int = 0) -> Quantisation:
    """To block FP8, but for layers at both ends.
    Raises UserError: no such checkpoint, nothing to quantise, or a matrix that others could not read in block FP8."""
    found = find_checkpoint(source)
    if found.codes:
        raise UserError(f"{source / 'config.json'}: quantization_config: the checkpoint is quantised already")
    layers = range(found.architecture.num_layers)
    wide = {*layers[:first_layers], *layers[len(layers) - last_layers :]}
    if len(wide) == len(layers):
        raise UserError(f"{source}: nothing to quantise: all {len(layers)} layers are kept in BF16")
    formats = StoredNames.by_layer(*("bf16" if layer in wide else "fp8_block" for layer in layers))
    plan = Quantisation(found, formats, tiles)
    for tensor in plan.quantised:
        for side in tensor.spec.shape:
            if side > TILE and side % TILE:
                raise tensor.refused(
                    f"{list(tensor.spec.shape)} is not cut into whole tiles: {side} is no multiple of {TILE}, and "
                    "neither transformers nor vLLM reads that in block FP8; keep or export it in BF16"
                )
    return plan


def block_fp8_section(kept_modules: Iterable[str]) -> dict[str, Any]:
    """`quantization_config` of a config.json in block FP8 but for the given modules."""
    return {**BLOCK_FP8, "modules_to_not_convert": list(kept_modules)}


def write_checkpoint(plan: Quantisation, target: Path, report: Callable[[int], None]) -> None:
    """Carry out a plan, each file of weights from the one of the same name; `report` hears the bytes of each tensor.

    The folder, which must not exist or be empty, appears whole or not at all; equal input gives equal bytes.
    Raises UserError: naming the tensor that cannot be converted, or what cannot be written.
    """
    source, files = plan.source.folder, dict[str, list[StoredTensor]]()
    config = read_json_object(source / "config.json") | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    config["quantization_config"] = block_fp8_section(_kept_modules(plan))
    for tensor in plan.tensors:
        files.setdefault(tensor.file.name, []).append(tensor)
    with whole_folder(target) as folder:
        write_file(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())
        weight_map, size = dict[str, str](), 0
        for name, stored in sorted(files.items()):
            tensors = dict[str, Tensor]()
            for tensor in sorted(stored, key=lambda tensor: _in_layer_order(tensor.spec.name)):
                tensors |= _converted(plan, tensor)
                report(tensor.spec.size)
            save_file(tensors, folder / name, {"format": "pt"})
            # safetensors creates its file for the owner alone; it is to be as readable as the others.
            shutil.copymode(folder / "config.json", folder / name)
            sync_path(folder / name)
            weight_map |= dict.fromkeys(tensors, name)
            size += sum(tensor.nbytes for tensor in tensors.values())
        if len(files) > 1:
            index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
            write_file(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())
        for path in _other_files(source):
            make_folder((folder / path).parent)
            shutil.copyfile(source / path, folder / path)
            sync_path(folder / path)


def _converted(plan: Quantisation, tensor: StoredTensor) -> dict[str, Tensor]:
    try:
        return stored_weights({tensor.spec.name: tensor.whole()}, plan.formats, plan.tiles)
    except GroupNotFinite as error:
        raise tensor.refused("holds NaN or infinity in BF16") from error


def _kept_modules(plan: Quantisation) -> list[str]:
    """The modules with a matrix in BF16; of an expert the one that holds all experts, which every reader supports."""
    quantised = {tensor.spec.name for tensor in plan.quantised}
    # A head that shares the embedding's weight has no tensor, and is a module nevertheless.
    modules = {"lm_head"}
    for tensor in plan.tensors:
        name = tensor.spec.name
        if len(tensor.spec.shape) == 2 and name not in quantised and "embed_tokens" not in name:
            stem, experts, _ = name.partition(".experts.")
            modules.add(f"{stem}.experts" if experts else name.removesuffix(".weight"))
    return sorted(modules, key=_in_layer_order)


def _in_layer_order(name: str) -> list[int | str]:
    """A key that sorts numbers as numbers: layer 2 before layer 10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _other_files(source: Path) -> list[Path]:
    """All that are neither hidden nor weights in some form, relative to the source."""
    found = sorted(path.relative_to(source) for path in source.rglob("*") if path.is_file())
    return [
        path
        for path in found
        if path.suffix not in _WEIGHT_SUFFIXES
        and not path.name.endswith(".index.json")
        and path != Path("config.json")
        and not any(part.startswith(".") for part in path.parts)
    ]
