"""Checkpoints in block FP8, made from Hugging Face BF16 folders and turned back into them, file by file.

This is the layout of DeepSeek-V3, which vLLM, SGLang and transformers read (`models.block_fp8`). A plan is made from
the headers alone; writing it holds the tensors of one file.

Names alone decide what is quantised: the linears of the decoder's layers are (`q_proj` to `down_proj`, those of experts
too). Embeddings, head, norms, biases and routers stay in BF16 (DeepSeek-V3, arXiv 2412.19437, section 3.3), and so does
every unknown name.

A side that is no multiple of 128 ends in a partial tile, whose scale is of the elements that it has. `transformers`
divides such a side into equal tiles: it refuses the tensor, or scales it wrongly (192 rows as two tiles of 96). vLLM
does not read it in fused linears. So a matrix with a partial tile beside whole ones is refused before anything is
written. A side below 128 is one tile to all; vLLM refuses it in fused linears.

Dequantised values of power-of-two scales quantise to the same values again. Bytes are equal too, but for tiles whose
largest code is 224: the smallest scale that holds those is half as large.
"""

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from fp8core.durable import make_folder, sync_path, write_file
from fp8core.errors import UserError
from fp8core.models.architecture import BLOCK_FP8, check_block_fp8
from fp8core.models.block_fp8 import FLOATS, INTEGERS, Conversion, Dequantised, Kept, Quantised
from fp8core.models.checkpoint import whole_folder
from fp8core.models.safetensors_files import INDEX, StoredSpec, StoredTensor, read_folder
from fp8core.models.weights import SCALE_SUFFIX, is_linear
from fp8core.numerics.recipe import TILE, Grouping
from fp8core.user_files import read_json_object

# The second and third are those of models that also see or hear: their other towers are not decoders.
_LAYER = re.compile(r"(?:model|model\.language_model|language_model\.model)\.layers\.(\d+)\..+\.weight")
_EXPERTS = re.compile(r"(.*\.experts)\..+")
_FUSED = re.compile(r"(.*)\.(?:(?P<qkv>[qkv])|(?P<gate_up>gate|up))_proj\.weight")
_CONFIG = "config.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".onnx_data")

Report = Callable[[int], None]


@dataclass(frozen=True)
class KeptInBf16:
    """Weights that the user keeps in BF16 besides embeddings, head, norms, biases and routers.

    `names`: shell patterns of tensors or modules, such as `*.down_proj`.
    """

    first_layers: int = 0
    last_layers: int = 0
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Selection:
    """Names sorted by layer.

    Attributes:
        quantised: Tensors in block FP8; all others stay in BF16.
        kept_modules: Modules with a matrix in BF16, as `modules_to_not_convert` lists them.
    """

    quantised: frozenset[str]
    kept_modules: tuple[str, ...]


def select(shapes: Mapping[str, tuple[int, ...]], num_layers: int, kept: KeptInBf16) -> Selection:
    """Choose the weights to quantise.

    Args:
        num_layers: Decoder layers; what lies beyond them (layers that predict further tokens) is neither first
            nor last.

    Raises:
        UserError: nothing is left to quantise, a pattern matches nothing, or parts that inference engines fuse into
            one weight (q, k and v; gate and up; the experts of a layer) would get different formats.
    """
    for pattern in kept.names:
        if not any(_matches(name, pattern) for name in shapes):
            raise UserError(f"{pattern!r} matches no tensor; names look like {next(iter(shapes), 'none')}")
    layers = {name: layer for name in shapes if is_linear(name) and (layer := _LAYER.fullmatch(name))}
    linears = {
        name: int(layer[1]) for name, layer in layers.items() if len(shapes[name]) == 2 and 0 not in shapes[name]
    }

    def stays(name: str, layer: int) -> bool:
        at_an_end = layer < kept.first_layers or num_layers - kept.last_layers <= layer < num_layers
        return at_an_end or any(_matches(name, pattern) for pattern in kept.names)

    quantised = frozenset(name for name, layer in linears.items() if not stays(name, layer))
    if not quantised:
        raise UserError(
            f"nothing to quantise: {len(linears)} linear weights in {num_layers} decoder layers, all kept in BF16"
        )
    matrices = [name for name in in_layer_order(shapes) if len(shapes[name]) >= 2]
    _check_fused_groups(matrices, quantised)
    # A head that shares the embedding's weight has no tensor, and is a module nevertheless.
    modules = {"lm_head"} | {module for name in matrices if name not in quantised and (module := _module(name))}
    return Selection(quantised, tuple(in_layer_order(modules)))


def in_layer_order(names: Iterable[str]) -> list[str]:
    """Names sorted with their numbers as numbers: layer 2 before layer 10."""
    return sorted(names, key=lambda name: [int(p) if p.isdecimal() else p for p in re.split(r"(\d+)", name)])


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.removesuffix(".weight"), pattern)


def _module(name: str) -> str:
    """The module of a matrix that may belong to a linear; empty for an embedding, or one directly in a layer.

    For an expert it is the module that holds all experts, which every reader supports.
    """
    if experts := _EXPERTS.fullmatch(name):
        return experts[1]
    return name.removesuffix(".weight") if name.endswith(".weight") and "embed_tokens" not in name else ""


def _check_fused_groups(matrices: Iterable[str], quantised: frozenset[str]) -> None:
    """Raises UserError: inference engines fuse a matrix in BF16 with one in block FP8."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in matrices:
        experts, fused = _EXPERTS.fullmatch(name), _FUSED.fullmatch(name)
        groups[experts[1] if experts else f"{fused[1]}.{fused.lastgroup}" if fused else name].append(name)
    for members in groups.values():
        plain = [name for name in members if name not in quantised]
        if 0 < len(plain) < len(members):
            other = next(name for name in members if name in quantised)
            raise UserError(
                f"{plain[0]} would stay in BF16 and {other} would not, but inference engines fuse them: "
                "keep all of their group or none"
            )


@dataclass(frozen=True)
class CheckpointConversion:
    """A conversion, known from the source's headers.

    Attributes:
        config: config.json of the target.
        copied: Files copied byte for byte, relative to the source.
        left_out: Files that are weights in another form, relative to the source.
    """

    source: Path
    config: Mapping[str, Any]
    conversions: tuple[Conversion, ...]
    copied: tuple[Path, ...]
    left_out: tuple[Path, ...]

    @property
    def converted(self) -> tuple[StoredSpec, ...]:
        """Source tensors that change between BF16 and block FP8."""
        return tuple(c.stored.spec for c in self.conversions if not isinstance(c, Kept))

    @property
    def parameters(self) -> int:
        """The number of values in the checkpoint, scales not counted."""
        return sum(conversion.stored.spec.elements for conversion in self.conversions)

    @property
    def size(self) -> int:
        """Bytes of the source's tensors, scales not counted."""
        return sum(conversion.stored.spec.size for conversion in self.conversions)


def plan_quantisation(source: Path, kept: KeptInBf16, tiles: Grouping) -> CheckpointConversion:
    """BF16, FP16 or FP32 (both by way of BF16) to block FP8.

    FP32 tensors beside linears in BF16 or FP16 were left wide on purpose (corrections of a router, decay rates), and
    stay as they are.

    Raises:
        UserError: the folder is no such checkpoint, is quantised already, has a matrix that others could not read in
            block FP8, or `kept` does not fit it.
    """
    config = _read_config(source)
    if config.get("quantization_config") is not None:
        raise UserError(f"{source / _CONFIG}: quantization_config: the checkpoint is quantised already")
    stored = read_folder(source)
    for tensor in stored.values():
        if tensor.spec.dtype not in (*FLOATS, *INTEGERS):
            raise tensor.refused(f"expected BF16, F16, F32 or integers, found {tensor.spec.dtype}")
    layers = (config.get("text_config") or config).get("num_hidden_layers")
    if type(layers) is not int or layers < 1:
        raise UserError(f"{source / _CONFIG}: num_hidden_layers: found {json.dumps(layers)}, expected an integer >= 1")
    selection = select({name: t.spec.shape for name, t in stored.items()}, layers, kept)
    for name in in_layer_order(selection.quantised):
        _check_whole_tiles(stored[name])
    narrowed = {"F16"} | {stored[name].spec.dtype for name in selection.quantised}

    def convert(name: str) -> Conversion:
        tensor = stored[name]
        if name in selection.quantised:
            return Quantised(tensor, tiles)
        return Kept(tensor, "BF16" if tensor.spec.dtype in narrowed else tensor.spec.dtype)

    return CheckpointConversion(
        source,
        {**_with_bf16(config), "quantization_config": block_fp8_section(selection.kept_modules)},
        tuple(convert(name) for name in in_layer_order(stored)),
        *_other_files(source, stored),
    )


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


def plan_dequantisation(source: Path) -> CheckpointConversion:
    """Block FP8 to BF16: `code * scale` in FP32, rounded once; all other tensors as they are.
    Raises UserError: the folder is no checkpoint in block FP8, or codes and scales do not belong together."""
    config = _read_config(source)
    if config.get("quantization_config") is None:
        raise UserError(f"{source / _CONFIG}: has no quantization_config: the checkpoint is not quantised")
    check_block_fp8(config.get("quantization_config"), str(source / _CONFIG))
    stored = read_folder(source)
    codes = [name for name, tensor in stored.items() if tensor.spec.dtype == "F8_E4M3"]
    scales = {name + SCALE_SUFFIX for name in codes}
    for name in scales - stored.keys():
        raise stored[name.removesuffix(SCALE_SUFFIX)].refused(f"its scales {name} are nowhere")

    def convert(name: str) -> Conversion:
        if name + SCALE_SUFFIX in scales:
            return Dequantised(stored[name], stored[name + SCALE_SUFFIX])
        if name.endswith(SCALE_SUFFIX) or stored[name].spec.dtype not in (*FLOATS, *INTEGERS):
            raise stored[name].refused(f"{stored[name].spec.dtype} without a place in a block-FP8 checkpoint")
        return Kept(stored[name], stored[name].spec.dtype)

    return CheckpointConversion(
        source,
        {key: value for key, value in _with_bf16(config).items() if key != "quantization_config"},
        tuple(convert(name) for name in in_layer_order(stored.keys() - scales)),
        *_other_files(source, stored),
    )


def write_checkpoint(plan: CheckpointConversion, target: Path, report: Report) -> None:
    """Carry out a plan, each file of weights from the one of the same name.

    The folder appears whole or not at all; equal input gives equal bytes.

    Args:
        target: Must not exist, or be empty.
        report: Called with the bytes of each tensor that was read.

    Raises:
        UserError: naming the tensor that cannot be converted, or what cannot be written.
    """
    files: dict[str, list[Conversion]] = defaultdict(list)
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


def _read_config(source: Path) -> dict[str, Any]:
    if not source.is_dir():
        raise UserError(f"{source}: no such folder")
    return read_json_object(source / _CONFIG)


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
