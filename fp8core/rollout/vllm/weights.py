"""Where vLLM keeps the tensors that a trainer ships, and how they travel to its process on the same machine.

A trainer ships weights by their Hugging Face names (`models.weights.stored_weights`). vLLM's names differ by the fused
ones alone: q, k and v, gate and up, and experts are rows of one parameter. The experts of a layer are two parameters
[experts, rows, columns], w13 with gate above up, and w2 with down. Their rows are counted through all experts. Tensors
of scales are laid out as their codes are, one row a tile.

Tensors on a GPU are shared: a CUDA IPC handle for each storage, and every tensor as a view of one. So nothing is copied
before the engine writes it into its own parameters; engines on other GPUs read it from there. Tensors on a CPU go
through a safetensors file, which is read tensor by tensor: the engine's device never holds the whole policy twice. The
call itself carries numbers, strings and bytes, which vLLM sends without pickle.
"""

import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

# vLLM pads the vocabulary to a multiple of this; the rows beyond it are never read.
_VOCABULARY_PADDING = 64
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_FUSED_WITH = {part: fused for fused, parts in _FUSED.items() for part in parts}
_EXPERT = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<index>\d+)\.(?P<part>gate|up|down)_proj\.(?P<kind>weight.*)")
# Part of an expert -> the parameter, how many parts an expert has in it, and which of them this is.
_EXPERT_PARTS = {"gate": ("w13", 2, 0), "up": ("w13", 2, 1), "down": ("w2", 1, 0)}


class UpdateError(RuntimeError):
    """Tensors that do not fit the parameters of the engine."""


@dataclass(frozen=True)
class TensorSpec:
    """dtype (without `torch.`) and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def rows(self) -> int:
        """Rows, through all experts where there are any."""
        return prod(self.shape[:-1]) if len(self.shape) > 2 else self.shape[0]

    @property
    def row(self) -> tuple[int, ...]:
        """Shape of one row."""
        return self.shape[-1:] if len(self.shape) > 2 else self.shape[1:]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def specs_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    """The specs of the sent tensors, by name."""
    return {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}


@dataclass(frozen=True)
class Slot:
    """Rows `start` to `stop` of a parameter (`rows_of`)."""

    parameter: str
    start: int
    stop: int


def rows_of(parameter: Tensor) -> Tensor:
    """A parameter as rows that slots count: experts below one another, everything else as it is."""
    return parameter.view(-1, parameter.shape[-1]) if parameter.dim() > 2 else parameter


def find_slots(shipped: Mapping[str, TensorSpec]) -> dict[str, Slot]:
    """The place of every shipped tensor, by name.

    Raises:
        UpdateError: a part of a fused parameter is missing.
    """
    slots = {}
    for name, spec in shipped.items():
        if (expert := _EXPERT.fullmatch(name)) is not None:
            slots[name] = _expert_slot(expert, spec.rows)
            continue
        before, after = _split(name)
        start = 0
        for part in before:
            if part not in shipped:
                raise UpdateError(f"{part} is missing, {name} was sent")
            start += shipped[part].shape[0]
        slots[name] = Slot(after, start, start + spec.shape[0])
    return slots


def _expert_slot(name: re.Match[str], rows: int) -> Slot:
    parameter, parts, part = _EXPERT_PARTS[name["part"]]
    start = (int(name["index"]) * parts + part) * rows
    return Slot(f"{name['experts']}.routed_experts.{parameter}_{name['kind']}", start, start + rows)


def _split(name: str) -> tuple[list[str], str]:
    """Names of the tensors above this one in its parameter, and that of the parameter."""
    prefix, _, rest = name.rpartition(".")
    stem, _, module = prefix.rpartition(".")
    fused = _FUSED_WITH.get(module)
    if fused is None:
        return [], name
    parts = _FUSED[fused]
    above = [f"{stem}.{part}.{rest}" for part in parts[: parts.index(module)]]
    return above, f"{stem}.{fused}.{rest}"


def check_fit(
    shipped: Mapping[str, TensorSpec], slots: Mapping[str, Slot], parameters: Mapping[str, TensorSpec]
) -> None:
    """Every tensor must fit its slot, and together they must fill every parameter.

    Raises:
        UpdateError: naming the first tensor or parameter that does not.
    """
    filled: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for name, slot in slots.items():
        sent, held = shipped[name], parameters.get(slot.parameter)
        if held is None:
            raise UpdateError(f"{name}: the engine has no parameter {slot.parameter}")
        if sent.dtype != held.dtype or sent.row != held.row or slot.stop > held.rows:
            raise UpdateError(f"{name}: {sent} was sent for rows from {slot.start} of {slot.parameter}, {held}")
        filled[slot.parameter].append((slot.start, slot.stop))
    for parameter, spec in parameters.items():
        rows = _rows_without_gap(parameter, filled[parameter])
        padding = -rows % _VOCABULARY_PADDING if parameter in _VOCABULARY and rows else 0
        if rows + padding != spec.rows:
            raise UpdateError(f"{parameter}: {rows} of its {spec.rows} rows were sent")


def _rows_without_gap(parameter: str, slots: list[tuple[int, int]]) -> int:
    """The number of rows that were sent, each once, from the first on."""
    end = 0
    for start, stop in sorted(slots):
        if start != end:
            fault = "missing" if start > end else "sent twice"
            raise UpdateError(f"{parameter}: rows from {min(start, end)} to {max(start, end)} are {fault}")
        end = stop
    return end


SharedWeights = dict[str, Any]
# Fields of torch's rebuild function that cannot travel as they are, and the place of the device among them.
_TENSOR_CLASS, _STORAGE_CLASS, _DTYPE, _DEVICE = 0, 4, 5, 6
_WAITS_FOR_EVENT = -1


@contextmanager
def share_weights(tensors: Mapping[str, Tensor]) -> Iterator[SharedWeights]:
    """Tensors in a form that `open_shared` opens in any number of other processes, while the block lasts."""
    if all(tensor.is_cuda for tensor in tensors.values()):
        shared = _shared_storages(tensors)
        # The tensors are complete, so that no reader waits for an event of a GPU that it may not see.
        for device in {tensor.device for tensor in tensors.values()}:
            torch.cuda.synchronize(device)
        yield shared
        torch.cuda.ipc_collect()
        return
    with tempfile.TemporaryDirectory(prefix="fp8-grpo-") as folder:
        path = Path(folder) / "policy.safetensors"
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
        yield {"file": str(path)}


class _FileTensors(Mapping[str, Tensor]):
    """Tensors of a safetensors file on a device, each read when it is asked for."""

    def __init__(self, file: str, device: torch.device) -> None:
        opened: Any = safe_open
        self._opened = opened(file, framework="pt", device=str(device))

    def __getitem__(self, name: str) -> Tensor:
        found: Tensor = self._opened.get_tensor(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._opened.keys())

    def __len__(self) -> int:
        return len(self._opened.keys())


def open_shared(received: SharedWeights, device: torch.device) -> Mapping[str, Tensor]:
    """The shared tensors by name, to be used within the sender's block."""
    if "file" in received:
        return _FileTensors(received["file"], device)
    storages = [_open_storage(fields, device) for fields in received["storages"]]
    return {name: _view(storages[place[0]], *place[1:]) for name, place in received["tensors"].items()}


def _shared_storages(tensors: Mapping[str, Tensor]) -> SharedWeights:
    index: dict[int, int] = {}
    storages: list[list[Any]] = []
    places: dict[str, list[Any]] = {}
    for name, tensor in tensors.items():
        assert tensor.is_contiguous(), f"{name} is not contiguous"
        storage = tensor.detach().untyped_storage()
        if storage.data_ptr() not in index:
            index[storage.data_ptr()] = len(storages)
            storages.append(_handle(tensor))
        spec = TensorSpec.of(tensor)
        offset = tensor.storage_offset() * tensor.element_size()
        places[name] = [index[storage.data_ptr()], spec.dtype, list(spec.shape), offset]
    return {"storages": storages, "tensors": places}


def _handle(tensor: Tensor) -> list[Any]:
    """IPC fields of the whole storage of a tensor, as bytes."""
    storage = tensor.detach().untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
    _, fields = reduce_tensor(whole)
    sent = list(fields)
    for place in (_TENSOR_CLASS, _STORAGE_CLASS, _DTYPE):
        sent[place] = None
    sent[_WAITS_FOR_EVENT] = False
    return [list(field) if isinstance(field, tuple) else field for field in sent]


def _open_storage(fields: list[Any], device: torch.device) -> Tensor:
    """uint8 [bytes], the sender's memory."""
    opened = [tuple(field) if isinstance(field, list) else field for field in fields]
    opened[_TENSOR_CLASS], opened[_STORAGE_CLASS], opened[_DTYPE] = Tensor, torch.storage.TypedStorage, torch.uint8
    # The same GPU may have another number in the process that trains; of another GPU the memory is mapped into ours.
    opened[_DEVICE] = device.index
    whole: Tensor = rebuild_cuda_tensor(*opened)
    return whole


def _view(storage: Tensor, dtype: str, shape: list[int], offset: int) -> Tensor:
    form: torch.dtype = getattr(torch, dtype)
    size = prod(shape) * form.itemsize
    return storage[offset : offset + size].view(form).view(shape)
