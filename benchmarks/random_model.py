"""A Hugging Face folder of a given shape with random BF16 weights, for benchmarks of models that are not available."""

import json
from collections import defaultdict
from multiprocessing import get_context
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

from fp8core.models.architecture import Architecture, architecture_to_hf, parameter_shapes
from fp8core.models.safetensors_stream import INDEX
from fp8core.models.tokenizer import Tokenizer
from fp8core.models.weights import layer_of

_DEVIATION = 0.02
_SEED = 0
_END, _PAD = "<|im_end|>", "<|endoftext|>"
# Layers of a shard: some 1.5 GB of Qwen3-8B, the part that lies on the host at a time.
_SHARD_LAYERS = 4


def make_model(folder: Path, arch: Architecture, device: str) -> None:
    """Write the folder if it is not there; in a process of its own, of which nothing stays on a device."""
    if folder.exists():
        return
    process = get_context("spawn").Process(target=write_model, args=(folder, arch, device))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"{folder}: the model was not written (exit code {process.exitcode})")


def write_model(folder: Path, arch: Architecture, device: str) -> None:
    """Norms are 1, everything else is normal with deviation 0.02; the folder appears whole or not at all."""
    partial = folder.with_name(f".{folder.name}.{arch.num_layers}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer(arch.vocab_size)
    tokenizer.save(partial)
    tokens = {"bos_id": None, "eos_ids": tokenizer.eos_ids, "pad_id": tokenizer.pad_id}
    config = architecture_to_hf(arch, **tokens, dtype="bfloat16")
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shards: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, shape in parameter_shapes(arch).items():
        layer = layer_of(name)
        shards[name if layer is None else f"layers.{layer // _SHARD_LAYERS}"][name] = shape
    generator = torch.Generator(device).manual_seed(_SEED)
    places = {}
    for shard, shapes in shards.items():
        file = f"{shard}.safetensors"
        save_file({name: _weight(shape, generator) for name, shape in shapes.items()}, partial / file, {"format": "pt"})
        places |= dict.fromkeys(shapes, file)
    (partial / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    partial.rename(folder)


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """A token for each byte and for the end of a text, and unused ones up to the size of the vocabulary."""
    known = [*sorted(pre_tokenizers.ByteLevel.alphabet()), _PAD, _END]
    names = [*known, *(f"<unused{i}>" for i in range(vocab_size - len(known)))]
    backend = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([_PAD, _END])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END, "pad_token": _PAD}
    return Tokenizer(backend, config, frozenset(), None, "random model")


def _weight(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    weight = torch.ones(shape, dtype=torch.bfloat16, device=generator.device)
    return (weight if len(shape) == 1 else weight.normal_(0, _DEVIATION, generator=generator)).cpu()
