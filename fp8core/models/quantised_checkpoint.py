"""Checkpoints in block FP8, made from Hugging Face BF16 folders, file by file.

This is the layout of DeepSeek-V3, which vLLM, SGLang and transformers read (`models.block_fp8`). Names alone decide
what is quantised: the linears of the decoder's layers. All others stay in BF16 (arXiv 2412.19437, section 3.3).

A side that is no multiple of 128 ends in a partial tile, which transformers and vLLM do not read beside whole ones. So
such a matrix is refused before anything is written. A side below 128 is one tile to all; vLLM refuses it in fused
linears.
"""

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from fp8core.durable import make_folder, sync_path, write_file
from fp8core.errors import UserError
from fp8core.models.architecture import BLOCK_FP8
from fp8core.models.block_fp8 import FLOATS, INTEGERS, Kept, Quantised
from fp8core.models.checkpoint import whole_folder
from fp8core.models.safetensors_files import INDEX, StoredSpec, StoredTensor, read_folder
from fp8core.models.weights import is_linear
from fp8core.numerics.recipe import TILE, Grouping
from fp8core.user_files import read_json_object

# The second and third are those of models that also see or hear: their other towers are not decoders.
_LAYER = re.compile(r"(?:model|model\.language_model|language_model\.model)\.layers\.(\d+)\..+\.weight")
_EXPERTS = re.compile(r"(.*\.experts)\..+")
_CONFIG = "config.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".onnx_data")


@dataclass(frozen=True)
class CheckpointConversion:
    """A conversion, known from the source's headers.

    `config`: config.json of the target. `copied`: files copied byte for byte. `left_out`: weights in another form.
    """

    source: Path
    config: Mapping[str, Any]
    conversions: tuple[Quantised | Kept, ...]
    copied: tuple[Path, ...]
    left_out: tuple[Path, ...]

    @property
    def converted(self) -> tuple[StoredSpec, ...]:
        """Source tensors that become block FP8."""
        return tuple(c.stored.spec for c in self.conversions if isinstance(c, Quantised))

    @property
    def parameters(self) -> int:
        return sum(conversion.stored.spec.elements for conversion in self.conversions)

    @property
    def size(self) -> int:
        """Bytes of the source's tensors."""
        return sum(conversion.stored.spec.size for conversion in self.conversions)


def plan_quantisation(
    source: Path, tiles: Grouping, first_layers: int = 0, last_layers: int = 0
) -> CheckpointConversion:
    """BF16, FP16 or FP32 (both by way of BF16) to block FP8, but for layers at both ends that stay in BF16.

    FP32 tensors beside linears in BF16 or FP16 were left wide on purpose (corrections of a router, decay rates), and
    stay as they are.

    Raises:
        UserError: the folder is no such checkpoint, is quantised already, has a matrix that others could not read in
            block FP8, or nothing is left to quantise.
    """
    if not source.is_dir():
        raise UserError(f"{source}: no such folder")
    config = read_json_object(source / _CONFIG)
    if config.get("quantization_config") is not None:
        raise UserError(f"{source / _CONFIG}: quantization_config: the checkpoint is quantised already")
    stored = read_folder(source)
    for tensor in stored.values():
        if tensor.spec.dtype not in (*FLOATS, *INTEGERS):
            raise tensor.refused(f"expected BF16, F16, F32 or integers, found {tensor.spec.dtype}")
    layers = (config.get("text_config") or config).get("num_hidden_layers")
    if type(layers) is not int or layers < 1:
        raise UserError(f"{source / _CONFIG}: num_hidden_layers: found {json.dumps(layers)}, expected an integer >= 1")
    # Layers beyond the decoder's, which predict further tokens, are neither first nor last.
    wide = {*range(first_layers), *range(layers - last_layers, layers)}
    shapes = {name: tensor.spec.shape for name, tensor in stored.items()}
    quantised = {name for name, layer in _linears(shapes).items() if layer not in wide}
    if not quantised:
        raise UserError(f"{source}: nothing to quantise: all linears of {layers} decoder layers are kept in BF16")
    for name in _in_layer_order(quantised):
        _check_whole_tiles(stored[name])
    narrowed = {"F16"} | {stored[name].spec.dtype for name in quantised}

    def convert(name: str) -> Quantised | Kept:
        tensor = stored[name]
        if name in quantised:
            return Quantised(tensor, tiles)
        return Kept(tensor, "BF16" if tensor.spec.dtype in narrowed else tensor.spec.dtype)

    wide_matrices = (name for name, shape in shapes.items() if len(shape) >= 2 and name not in quantised)
    # A head that shares the embedding's weight has no tensor, and is a module nevertheless.
    modules = {"lm_head"} | {module for name in wide_matrices if (module := _module(name))}
    return CheckpointConversion(
        source,
        {**_with_bf16(config), "quantization_config": block_fp8_section(_in_layer_order(modules))},
        tuple(convert(name) for name in _in_layer_order(stored)),
        *_other_files(source, stored),
    )


def _linears(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The layer of each weight that may be quantised."""
    layers = {name: layer for name in shapes if is_linear(name) and (layer := _LAYER.fullmatch(name))}
    return {name: int(layer[1]) for name, layer in layers.items() if len(shapes[name]) == 2 and 0 not in shapes[name]}


def _in_layer_order(names: Iterable[str]) -> list[str]:
    """Names sorted with their numbers as numbers: layer 2 before layer 10."""
    return sorted(names, key=lambda name: [int(p) if p.isdecimal() else p for p in re.split(r"(\d+)", name)])


def _module(name: str) -> str:
    """The module of a matrix that may belong to a linear; empty for an embedding, or one directly in a layer.

    For an expert it is the module that holds all experts, which every reader supports.
    """
    if experts := _EXPERTS.fullmatch(name):
        return experts[1]
    return name.removesuffix(".weight") if name.endswith(".weight") and "embed_tokens" not in name else ""


def _check_whole_tiles(tensor: StoredTensor) -> None:
    for side in tensor.spec.shape:
        if side > TILE and side % TILE:
            raise tensor.refused(
                f"{list(tensor.spec.shape)} is not cut into whole tiles: {side} is no multiple of {TILE}, and "
                "neither transformers nor vLLM reads that in block FP8; keep or export it in BF16"
            )


def block_fp8_section(kept_modules: Iterable[str]) -> dict[str, Any]:
    """`quantization_config` of a config.json in block FP8 but for the given modules."""
    return {**BLOCK_FP8, "modules_to_not_convert": list(kept_modules)}


def write_checkpoint(plan: CheckpointConversion, target: Path, report: Callable[[int], None]) -> None:
    """Carry out a plan, each file of weights from the one of the same name; `report` hears the bytes of each tensor.

    The folder, which must not exist or be empty, appears whole or not at all; equal input gives equal bytes.
    Raises UserError: naming the tensor that cannot be converted, or what cannot be written.
    """
    files: dict[str, list[Quantised | Kept]] = defaultdict(list)
    for conversion in plan.conversions:
        files[conversion.stored.file.name].append(conversion)
    with whole_folder(target) as folder:
        write_file(folder / _CONFIG, (json.dumps(plan.config, indent=2) + "\n").encode())
        weight_map, size = dict[str, str](), 0
        for name, conversions in sorted(files.items()):
            tensors = dict[str, Tensor]()
            for conversion in conversions:
                tensors |= conversion.tensors()
                report(conversion.stored.spec.size)
            save_file(tensors, folder / name, {"format": "pt"})
            # safetensors creates its file for the owner alone; it is to be as readable as the others.
            shutil.copymode(folder / _CONFIG, folder / name)
            sync_path(folder / name)
            weight_map |= dict.fromkeys(tensors, name)
            size += sum(tensor.nbytes for tensor in tensors.values())
        if len(files) > 1:
            index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
            write_file(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())
        for path in plan.copied:
            make_folder((folder / path).parent)
            shutil.copyfile(plan.source / path, folder / path)
            sync_path(folder / path)


def _with_bf16(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with its type of weights, under either name and in every section, set to BF16."""
    named = config if config.keys() & {"dtype", "torch_dtype"} else {**config, "torch_dtype": None}
    sections = {key: _with_bf16(value) for key, value in named.items() if isinstance(value, dict) and "dtype" in value}
    return {**named, **sections, **dict.fromkeys(named.keys() & {"dtype", "torch_dtype"}, "bfloat16")}


def _other_files(source: Path, stored: Mapping[str, StoredTensor]) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Files to copy and weights in other forms, relative to the source; hidden files are neither."""
    known = {source / _CONFIG} | {tensor.file for tensor in stored.values()}
    others = sorted(
        path.relative_to(source)
        for path in source.rglob("*")
        if path.is_file() and path not in known and not path.name.endswith(".index.json")
    )
    others = [path for path in others if not any(part.startswith(".") for part in path.parts)]
    weights = tuple(path for path in others if path.suffix in _WEIGHT_SUFFIXES)
    return tuple(path for path in others if path.suffix not in _WEIGHT_SUFFIXES), weights
