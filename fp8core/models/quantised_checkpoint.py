"""Checkpoints in block FP8, made from Hugging Face BF16 folders and turned back into them, tensor by tensor.

`X.weight` becomes E4M3 codes with `X.weight_scale_inv`, the FP32 scales of its 128x128 tiles that multiply them back
(the layout of DeepSeek-V3, which vLLM, SGLang and transformers read). A plan is made from the headers alone; writing
it holds blocks of rows, never a whole tensor.

Dequantised values of power-of-two scales quantise to the same values again, and to the same bytes but for tiles whose
largest code is 224: half their scale holds them as well, and is the smallest that does.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fp8core.errors import UserError
from fp8core.models.fp8_selection import KeptInBf16, in_layer_order, select
from fp8core.models.hf_config import read_json_object
from fp8core.models.safetensors_stream import (
    INDEX,
    WEIGHTS,
    StoredTensor,
    TensorSpec,
    file_order,
    read_folder,
    write_tensors,
)
from fp8core.models.tensor_conversion import FLOATS, INTEGERS, Conversion, Dequantised, Kept, Quantised
from fp8core.models.weights import SCALE_SUFFIX
from fp8core.numerics.e4m3 import TILE, ScaleRule
from fp8core.store.durable import make_folder, sync_path, write_file

SHARD_BYTES = 4_000_000_000
_CONFIG = "config.json"
_FORMAT = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [TILE, TILE]}
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".onnx_data")

Report = Callable[[int, int], None]


@dataclass(frozen=True)
class Plan:
    """A conversion, known from the source's headers.

    Attributes:
        source: The checkpoint.
        config: config.json of the target.
        conversions: Every tensor, by layer.
        copied: Files copied byte for byte, relative to the source.
        left_out: Files that are weights in another form, relative to the source.
        unrecognised: Matrices in BF16 whose names say nothing about what they are.
    """

    source: Path
    config: Mapping[str, Any]
    conversions: tuple[Conversion, ...]
    copied: tuple[Path, ...]
    left_out: tuple[Path, ...]
    unrecognised: tuple[str, ...] = ()

    @property
    def converted(self) -> tuple[TensorSpec, ...]:
        """Source tensors that change between BF16 and block FP8."""
        return tuple(c.stored.spec for c in self.conversions if isinstance(c, Quantised | Dequantised))

    @property
    def parameters(self) -> int:
        """How many values the checkpoint has, scales not counted."""
        return sum(conversion.stored.spec.elements for conversion in self.conversions)

    @property
    def size(self) -> int:
        """Bytes of the target's tensors."""
        return sum(spec.size for conversion in self.conversions for spec in conversion.results)


def plan_quantisation(source: Path, kept: KeptInBf16, rule: ScaleRule) -> Plan:
    """BF16, FP16 or FP32 (both by way of BF16) to block FP8.

    FP32 tensors beside linears in BF16 or FP16 were left wide on purpose (corrections of a router, decay rates), and
    stay as they are.

    Raises:
        UserError: the folder is no such checkpoint, is quantised already, or `kept` does not fit it.
    """
    config = _read_config(source)
    if config.get("quantization_config") is not None:
        raise UserError(f"{source / _CONFIG}: quantization_config: the checkpoint is quantised already")
    stored = read_folder(source)
    for tensor in stored.values():
        if tensor.spec.dtype not in (*FLOATS, *INTEGERS):
            raise tensor.refused(f"expected BF16, F16, F32 or integers, found {tensor.spec.dtype}")
    selection = select({name: t.spec.shape for name, t in stored.items()}, _num_layers(config, source), kept)
    narrowed = {"F16"} | {stored[name].spec.dtype for name in selection.quantised}

    def convert(name: str) -> Conversion:
        tensor = stored[name]
        if name in selection.quantised:
            return Quantised(tensor, rule)
        return Kept(tensor, "BF16" if tensor.spec.dtype in narrowed else tensor.spec.dtype)

    return Plan(
        source,
        {**_with_bf16(config), "quantization_config": block_fp8_section(selection.kept_modules)},
        tuple(convert(name) for name in in_layer_order(stored)),
        *_other_files(source, stored),
        selection.unrecognised,
    )


def block_fp8_section(kept_modules: Iterable[str]) -> dict[str, Any]:
    """`quantization_config` of a config.json in block FP8 but for the given modules."""
    return {**_FORMAT, "modules_to_not_convert": list(kept_modules)}


def plan_dequantisation(source: Path) -> Plan:
    """Block FP8 to BF16: `code * scale` in FP32, rounded once; all other tensors as they are.

    Raises:
        UserError: the folder is no checkpoint in block FP8, or codes and scales do not belong together.
    """
    config = _read_config(source)
    _check_format(config.get("quantization_config"), source / _CONFIG)
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

    return Plan(
        source,
        {key: value for key, value in _with_bf16(config).items() if key != "quantization_config"},
        tuple(convert(name) for name in in_layer_order(stored.keys() - scales)),
        *_other_files(source, stored),
    )


def write_checkpoint(plan: Plan, target: Path, report: Report, shard_bytes: int = SHARD_BYTES) -> None:
    """Carry out a plan. The folder appears whole or not at all; equal input gives equal bytes.

    Args:
        plan: From `plan_quantisation` or `plan_dequantisation`.
        target: Must not exist, or be empty.
        report: Called with what was added: tensors finished, bytes written.
        shard_bytes: Largest weights file, unless one tensor alone is larger.

    Raises:
        UserError: naming the tensor that cannot be converted, or what cannot be written.
    """
    with _whole_folder(target) as folder:
        _write_weights(folder, plan.conversions, report, shard_bytes)
        write_file(folder / _CONFIG, (json.dumps(plan.config, indent=2) + "\n").encode())
        for path in plan.copied:
            make_folder((folder / path).parent)
            with (plan.source / path).open("rb") as original, (folder / path).open("xb") as copy:
                shutil.copyfileobj(original, copy)
                copy.flush()
                os.fsync(copy.fileno())


def _write_weights(folder: Path, conversions: Sequence[Conversion], report: Report, shard_bytes: int) -> None:
    shards = _shards(conversions, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        specs = [spec for conversion in shard for spec in conversion.results]
        write_tensors(folder / name, specs, _pieces(shard, report))
        weight_map.update({spec.name: name for spec in specs})
    if len(shards) > 1:
        size = sum(spec.size for conversion in conversions for spec in conversion.results)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        write_file(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())


def _shards(conversions: Sequence[Conversion], limit: int) -> list[list[Conversion]]:
    shards: list[list[Conversion]] = [[]]
    filled = 0
    for conversion in conversions:
        size = sum(spec.size for spec in conversion.results)
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(conversion)
        filled += size
    return [sorted(shard, key=lambda conversion: file_order(conversion.results[0])) for shard in shards]


def _pieces(conversions: Sequence[Conversion], report: Report) -> Iterator[tuple[str, Tensor]]:
    for conversion in conversions:
        for name, values in conversion.pieces():
            yield name, values
            report(0, values.nbytes)
        report(1, 0)


@contextmanager
def _whole_folder(target: Path) -> Iterator[Path]:
    """A folder beside the target that takes its name when the body ends well, and goes when it does not."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target}: already exists; a checkpoint is never overwritten")
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        make_folder(partial)
        yield partial
        sync_path(partial)
        partial.replace(target)
        sync_path(target.parent)
    except OSError as error:
        raise UserError(f"{target}: the checkpoint cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _read_config(source: Path) -> dict[str, Any]:
    if not source.is_dir():
        raise UserError(f"{source}: no such folder")
    return read_json_object(source / _CONFIG)


def _num_layers(config: Mapping[str, Any], source: Path) -> int:
    section = config.get("text_config") or config
    found = section.get("num_hidden_layers") if isinstance(section, dict) else None
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise UserError(f"{source / _CONFIG}: num_hidden_layers: found {json.dumps(found)}, expected an integer >= 1")
    return found


def _check_format(found: object, where: Path) -> None:
    section = found if isinstance(found, dict) else {}
    for key, expected in _FORMAT.items():
        if section.get(key, expected if key == "fmt" else None) != expected:
            raise UserError(
                f"{where}: quantization_config: {key}: found {json.dumps(section.get(key))}, "
                f"expected {json.dumps(expected)}"
            )


def _with_bf16(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with its type of weights, under either name and in every section, set to BF16."""
    named = config if config.keys() & {"dtype", "torch_dtype"} else {**config, "torch_dtype": None}
    return _replace_dtypes(named)


def _replace_dtypes(section: Mapping[str, Any]) -> dict[str, Any]:
    def replaced(key: str, value: Any) -> Any:
        if key in ("dtype", "torch_dtype"):
            return "bfloat16"
        return _replace_dtypes(value) if isinstance(value, dict) else value

    return {key: replaced(key, value) for key, value in section.items()}


def _other_files(source: Path, stored: Mapping[str, StoredTensor]) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Files to copy and weights in other forms, relative to the source; hidden files are neither."""
    known = {source / _CONFIG} | {tensor.file for tensor in stored.values()}
    found = []
    for folder, subfolders, names in os.walk(source):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        found += [Path(folder) / name for name in names if not name.startswith(".")]
    others = sorted(path for path in found if path not in known and not path.name.endswith(".index.json"))
    weights = [path.relative_to(source) for path in others if path.suffix in _WEIGHT_SUFFIXES]
    copied = [path.relative_to(source) for path in others if path.suffix not in _WEIGHT_SUFFIXES]
    return tuple(copied), tuple(weights)
