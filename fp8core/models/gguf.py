"""Checkpoints of llama.cpp (GGUF), which transformers dequantises, as Hugging Face folders."""

import struct
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from fp8core.errors import UserError, first_line
from fp8core.models.architecture import Architecture, architecture_from_hf, parameter_shapes
from fp8core.models.checkpoint import refuse_occupied, save_checkpoint
from fp8core.models.tokenizer import Tokenizer

_MAGIC = b"GGUF"
_LIBRARIES = ("gguf", "transformers")


class Converted(NamedTuple):
    """A folder that was written, and how many elements its tensors have."""

    architecture: Architecture
    elements: int


def convert_gguf(source: Path, target: Path) -> Converted:
    """Write the weights of a GGUF file in BF16, with its tokenizer and chat template.

    Args:
        source: the file, of any quantisation that transformers reads.
        target: must not exist, or be empty.

    Raises:
        UserError: not such a file, a library is missing, another architecture, or the target is in the way.
    """
    _refuse_other_files(source)
    refuse_occupied(target)
    missing = [name for name in _LIBRARIES if find_spec(name) is None]
    if missing:
        raise UserError(f"{source}: {' and '.join(missing)} must be installed to read it: pip install 'fp8-grpo[gguf]'")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    if not sys.stderr.isatty():
        disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    except (ValueError, KeyError, IndexError, NotImplementedError, RuntimeError, struct.error) as error:
        raise UserError(f"{source}: transformers cannot read it: {first_line(error)}") from error
    config = model.config.to_dict()
    # The file has FP32 numbers; as FP64 they would show digits that nobody wrote.
    config |= {"architectures": [type(model).__name__], "quantization_config": None}
    config["rms_norm_eps"] = float(str(np.float32(config["rms_norm_eps"])))
    arch = architecture_from_hf(config, str(source))
    found = model.state_dict()
    tensors = {name: found[name] for name in parameter_shapes(arch)}
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        save_checkpoint(target, arch, tensors, Tokenizer.load(Path(folder)))
    return Converted(arch, sum(tensor.numel() for tensor in tensors.values()))


def _refuse_other_files(source: Path) -> None:
    try:
        with source.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise UserError(f"{source}: cannot be read: {error.strerror}") from error
    if magic != _MAGIC:
        raise UserError(f"{source}: not a GGUF file, which begins with {_MAGIC.decode()}")
