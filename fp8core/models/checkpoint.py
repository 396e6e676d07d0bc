"""Checkpoint folders in the Hugging Face layout: read with every tensor checked, written whole or not at all."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fp8core.config.model import ArchitectureConfig
from fp8core.config.section import suggestion
from fp8core.durable import make_folder, sync_path, write_file, write_problem
from fp8core.errors import UserError
from fp8core.models.architecture import Architecture, Experts
from fp8core.models.families import FAMILIES, parameter_shapes
from fp8core.models.families.config_json import BLOCK_FP8, architecture_from_hf, architecture_to_hf, one_or_list
from fp8core.models.safetensors_files import INDEX, WEIGHTS, FileTensors, StoredTensor, TensorSource, read_folder
from fp8core.models.tokenizer import Tokenizer
from fp8core.models.weights import StoredNames, stored_weights
from fp8core.numerics.recipe import TILE, Grouping
from fp8core.user_files import read_json_object

_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk, checked but for the values of its weights, which are not read yet."""

    folder: Path
    architecture: Architecture
    tensors: Mapping[str, StoredTensor]
    tokenizer: Tokenizer

    def source(self) -> FileTensors:
        """The weights in their files, of exactly the names of `parameter_shapes`, in their stored types.
        Raises UserError: as `check_head`."""
        self.check_head()
        return FileTensors({name: self.tensors[name] for name in parameter_shapes(self.architecture)})

    def check_head(self) -> None:
        """Read a stored head that is tied to the embedding. Raises UserError: it has other values."""
        tied = self.architecture.tie_embeddings and _HEAD in self.tensors
        if tied and not torch.equal(self.tensors[_HEAD].whole(), self.tensors[_EMBEDDING].whole()):
            raise self.tensors[_HEAD].error(
                f"expected the values of {_EMBEDDING} (config.json says tie_word_embeddings), found others"
            )


def find_checkpoint(folder: Path) -> Checkpoint:
    """Read config.json, the names and shapes of the weights, and the tokenizer.
    Raises UserError: naming the file, and the key or tensor with what was expected and found."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    config_path = folder / "config.json"
    architecture = architecture_from_hf(read_json_object(config_path), str(config_path))
    # Old Llama conversions store the rotary frequencies, which the configuration determines.
    stored = {name: t for name, t in read_folder(folder).items() if not name.endswith("rotary_emb.inv_freq")}
    single = folder / WEIGHTS
    where = single if single.is_file() else folder / INDEX
    _check(stored, parameter_shapes(architecture), architecture.tie_embeddings, where)
    tokenizer = Tokenizer.load(folder)
    largest = max(tokenizer.vocab_size - 1, *tokenizer.eos_ids)
    if largest >= architecture.vocab_size:
        raise UserError(
            f"{folder}: config.json: token {largest} of the tokenizer is beyond vocab_size={architecture.vocab_size}"
        )
    return Checkpoint(folder, architecture, stored, tokenizer)


def save_checkpoint(
    folder: Path,
    architecture: Architecture,
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a folder that `find_checkpoint`, transformers and vLLM read; equal input gives equal bytes.
    Raises UserError: the folder is in the way or cannot be written."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == parameter_shapes(architecture), "tensors do not fit the architecture"
    with whole_folder(folder) as partial:
        _write(partial, architecture, tensors, tokenizer, dtype)
        for path in partial.iterdir():
            sync_path(path)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder beside the target that takes its name when the body ends well, and is removed when it does not.
    Raises UserError: the target is in the way or cannot be written."""
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
    except (OSError, SafetensorError) as error:
        raise UserError(f"{target}: the checkpoint cannot be written: {write_problem(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(
    folder: Path, arch: Architecture, tensors: Mapping[str, Tensor], tokenizer: Tokenizer, dtype: torch.dtype
) -> None:
    tokens: dict[str, Any] = {"bos_id": tokenizer.bos_id, "eos_ids": tokenizer.eos_ids, "pad_id": tokenizer.pad_id}
    _write_json(folder / "config.json", architecture_to_hf(arch, **tokens, dtype=str(dtype).removeprefix("torch.")))
    # Sampling defaults too: else an evaluation would sample another way from the export than from its base.
    generation = {
        **tokenizer.sampling,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": one_or_list(tokenizer.eos_ids),
        "pad_token_id": tokenizer.pad_id,
    }
    _write_json(folder / "generation_config.json", generation)
    tokenizer.save(folder)
    cast = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    save_file(cast, folder / WEIGHTS, metadata={"format": "pt"})
    # safetensors creates its file for the owner alone; it is to be as readable as the others.
    shutil.copymode(folder / "config.json", folder / WEIGHTS)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _check(stored: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]], tied: bool, where: Path) -> None:
    known_shapes = {**shapes, _HEAD: shapes[_EMBEDDING]} if tied else shapes
    missing = [name for name in shapes if name not in stored]
    problems = [f"{where}: tensor {name}: expected shape {list(shapes[name])}, found nothing" for name in missing]
    for name, tensor in stored.items():
        place = f"{tensor.file}: tensor {name}"
        shape = tensor.spec.shape
        dtype = tensor.spec.dtype
        if name not in known_shapes:
            problems.append(f"{place}: expected nothing of this name, found shape {list(shape)}")
        elif shape != known_shapes[name]:
            problems.append(f"{place}: expected shape {list(known_shapes[name])}, found {list(shape)}")
        elif dtype not in _DTYPES:
            problems.append(f"{place}: expected dtype {', '.join(_DTYPES)}, found {dtype}")
    if problems:
        others = f" (and {len(problems) - 1} more tensors differ)" if len(problems) > 1 else ""
        raise UserError(problems[0] + others)


def architecture_from_config(config: ArchitectureConfig, vocab_size: int) -> Architecture:
    """A decoder of the configured family and size.
    Raises UserError: there is no such family, or its layers have another shape."""
    _check_family(config)
    experts = None
    if config.num_experts:
        experts = Experts(
            count=config.num_experts,
            per_token=config.experts_per_token,
            intermediate_size=config.expert_intermediate_size,
            normalise_top_k=config.normalise_top_k,
            sparse_step=config.decoder_sparse_step,
            dense_layers=tuple(config.mlp_only_layers),
        )
    sizes = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    others = ("family", "rope_theta", "max_positions", "tie_embeddings")
    fields: dict[str, Any] = {name: getattr(config, name) for name in (*sizes, *others)}
    return Architecture(**fields, vocab_size=vocab_size, rms_norm_eps=1e-6, rope_scaling=None, experts=experts)


def _check_family(config: ArchitectureConfig) -> None:
    if (family := FAMILIES.get(config.family)) is None:
        raise UserError(f"architecture.family={config.family}: no such family; {suggestion(config.family, FAMILIES)}")
    if bool(config.num_experts) != (family.experts is not None):
        others = [name for name, each in FAMILIES.items() if (each.experts is None) != (family.experts is None)]
        raise UserError(
            f"architecture.num_experts={config.num_experts} with architecture.family={family.name}; set family to "
            f"{' or '.join(others)}"
        )
    if family.heads_fill_hidden and config.num_heads * config.head_dim != config.hidden_size:
        raise UserError(
            f"architecture.head_dim={config.head_dim} with architecture.family={family.name}: num_heads * head_dim "
            f"must be hidden_size={config.hidden_size}"
        )


class InitialWeights(TensorSource):
    """FP32 weights of a decoder from scratch: norms 1, biases 0, embedding N(0, 1), linears N(0, 1 / in).

    Outputs of a block are scaled by 1 / sqrt(2 layers) (GPT-2, Radford et al., 2019, section 2.3). An embedding that is
    also the head is drawn as a head, so that a fresh policy is nearly uniform. Processors with other vector units draw
    other values. The first tensor that is read draws all of them, which stay in memory."""

    def __init__(self, arch: Architecture, seed: int) -> None:
        self._arch = arch
        self._seed = seed

    def __reduce__(self) -> tuple[Any, ...]:
        return InitialWeights, (self._arch, self._seed)

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self._seed)
        return {name: self._initial(name, shape, generator) for name, shape in parameter_shapes(self._arch).items()}

    def _initial(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
        embeds_only = name.startswith("model.embed_tokens") and not self._arch.tie_embeddings
        spread = 1.0 if embeds_only else shape[1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            spread *= (2 * self._arch.num_layers) ** -0.5
        return torch.randn(shape, generator=generator) * spread

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def initial_weights(arch: Architecture, seed: int) -> dict[str, Tensor]:
    return dict(InitialWeights(arch, seed))


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
