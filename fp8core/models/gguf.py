"""Checkpoints of llama.cpp (GGUF), which transformers dequantises, as Hugging Face folders."""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fp8core.errors import UserError, first_line
from fp8core.models.architecture import Architecture, architecture_from_hf, parameter_shapes
from fp8core.models.checkpoint import check_unoccupied, check_vocabulary, save_checkpoint
from fp8core.models.tokenizer import Tokenizer

_MAGIC = b"GGUF"


class Converted(NamedTuple):
    architecture: Architecture
    elements: int


def convert_gguf(source: Path, target: Path) -> Converted:
    """Write the weights of a GGUF file of any quantisation in BF16, with its tokenizer and chat template.
    Raises UserError: not such a file, another architecture, or something is in the way of the target."""
    try:
        with source.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise UserError(f"{source}: cannot be read: {error.strerror}") from error
    if magic != _MAGIC:
        raise UserError(f"{source}: not a GGUF file, which begins with {_MAGIC.decode()}")
    check_unoccupied(target)
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    set_verbosity_error()  # type: ignore[no-untyped-call]  # What it would say of a file is an error here.
    if not sys.stderr.isatty():
        disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        scaling = _rotary_scaling(source)
        read: Any = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype="float32", output_loading_info=True
        )
        model, loaded = read
        tokenizer: Any = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    except Exception as error:  # the libraries raise nothing more specific
        raise UserError(f"{source}: transformers cannot read it: {first_line(error)}") from error
    if scaling is not None:
        raise UserError(f"{source}: {scaling}: transformers reads no rotary scaling from GGUF, and would leave it out")
    if missing := sorted(loaded["missing_keys"]):
        raise UserError(f"{source}: it has no weights for {', '.join(missing[:3])} ({len(missing)} in all)")
    config = model.config.to_dict()
    # The file has FP32 numbers; as FP64 they would show digits that nobody wrote.
    config |= {"architectures": [type(model).__name__], "quantization_config": None}
    if "rms_norm_eps" in config:
        config["rms_norm_eps"] = float(str(np.float32(config["rms_norm_eps"])))
    arch = architecture_from_hf(config, str(source))
    found = model.state_dict()
    tensors = {name: found[name] for name in parameter_shapes(arch)}
    saved = Tokenizer(tokenizer, frozenset(), str(source))
    check_vocabulary(str(source), arch, saved)
    save_checkpoint(target, arch, tensors, saved)
    return Converted(arch, sum(tensor.numel() for tensor in tensors.values()))


def _rotary_scaling(source: Path) -> str | None:
    """The tensor or key that scales the rotary frequencies; None where nothing does."""
    from gguf import GGUFReader

    reader = GGUFReader(source)
    tensors = [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_f")]
    keys = [key for key in reader.fields if key.endswith(".rope.scaling.type")]
    return next((key for key in [*tensors, *keys] if key in tensors or reader.fields[key].contents() != "none"), None)
