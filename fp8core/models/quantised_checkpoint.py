"""Checkpoints in block FP8, in the layout of DeepSeek-V3, which vLLM, SGLang and transformers read.

The linears of the decoder's layers are quantised, all else stays in BF16 (arXiv 2412.19437, section 3.3). A matrix that
ends in a partial tile of 128 beside whole ones is refused: neither transformers nor vLLM reads it.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from fp8core.durable import sync_path, write_file
from fp8core.models.checkpoint import Checkpoint, find_checkpoint, whole_folder
from fp8core.models.families.config_json import BLOCK_FP8
from fp8core.models.safetensors_files import WEIGHTS
from fp8core.models.weights import StoredNames, stored_weights
from fp8core.numerics.recipe import TILE, Grouping
from fp8core.user_files import read_json_object


def block_fp8_section(kept_modules: Iterable[str]) -> dict[str, Any]:
    """`quantization_config` of a config.json in block FP8 but for the given modules."""
    return {**BLOCK_FP8, "modules_to_not_convert": list(kept_modules)}


def write_fp8_checkpoint(
    source: Path, target: Path, tiles: Grouping, first_layers: int = 0, last_layers: int = 0
) -> None:
    """Write a folder of `save_checkpoint` in block FP8, but for layers at both ends; equal input gives equal bytes.

    The target, which must not exist or be empty, appears whole or not at all.
    Raises UserError: others could not read a matrix in block FP8, or the target cannot be written."""
    checkpoint = find_checkpoint(source)
    layers = range(checkpoint.architecture.num_layers)
    wide = {*layers[:first_layers], *layers[len(layers) - last_layers :]}
    formats = StoredNames.by_layer(*("bf16" if layer in wide else "fp8_block" for layer in layers))
    fp8_names = {name for name in checkpoint.tensors if formats.of(name) == "fp8_block"}
    for name in sorted(fp8_names):
        for side in (shape := checkpoint.tensors[name].spec.shape):
            if side > TILE and side % TILE:
                raise checkpoint.tensors[name].error(
                    f"{list(shape)} is not cut into whole tiles: {side} is no multiple of {TILE}, and neither "
                    "transformers nor vLLM reads that in block FP8; export it in BF16"
                )
    config = read_json_object(source / "config.json")
    config["quantization_config"] = block_fp8_section(_kept_modules(checkpoint, fp8_names))
    with whole_folder(target) as folder:
        for path in source.iterdir():
            if path.name not in (WEIGHTS, "config.json"):
                shutil.copyfile(path, folder / path.name)
        write_file(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())
        save_file(stored_weights(checkpoint.source(), formats, tiles), folder / WEIGHTS, {"format": "pt"})
        # safetensors creates its file for the owner alone; it is to be as readable as the others.
        shutil.copymode(folder / "config.json", folder / WEIGHTS)
        for path in folder.iterdir():
            sync_path(path)


def _kept_modules(checkpoint: Checkpoint, fp8_names: set[str]) -> list[str]:
    """The modules with a matrix in BF16; of an expert the one that holds all experts, which every reader supports."""
    # A head that shares the embedding's weight has no tensor, and is a module nevertheless.
    modules = {"lm_head"}
    for name, tensor in checkpoint.tensors.items():
        if len(tensor.spec.shape) == 2 and name not in fp8_names and "embed_tokens" not in name:
            stem, experts, _ = name.partition(".experts.")
            modules.add(f"{stem}.experts" if experts else name.removesuffix(".weight"))
    return sorted(modules)
