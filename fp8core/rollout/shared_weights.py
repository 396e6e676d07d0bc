"""Weights of one process in the memory of others on its machine: by CUDA IPC, on a CPU through a file."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

RECEIVED_BYTES = 1 << 30
"""What an engine on GPUs of its own receives of a policy at a time, unless a single tensor is larger."""
SharedWeights = dict[str, Any]
"""What `share_weights` makes, as it travels to another process."""
# Fields of torch's rebuild function that cannot travel as they are, and others by their place.
_TENSOR_CLASS = 0
_STORAGE_CLASS = 4
_DTYPE = 5
_DEVICE = 6
_COUNTER = slice(-4, -2)
_WAITS_FOR_EVENT = -1


class TensorSpec(NamedTuple):
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        return _spec_of(tensor.dtype, tensor.shape)

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1]) if len(self.shape) > 2 else self.shape[0]

    @property
    def row(self) -> tuple[int, ...]:
        return self.shape[-1:] if len(self.shape) > 2 else self.shape[1:]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * _item_bytes(self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


Places = np.ndarray[Any, np.dtype[np.int64]]
"""Of each tensor its storage, its first byte there and how many it has, int64 [tensors, 3]."""


class SharedBytes(NamedTuple):
    """Opened weights: tensors by name in storages, uint8 [bytes]."""

    names: list[str]
    places: Places
    storages: list[Tensor]


@cache
def _spec_of(dtype: torch.dtype, shape: torch.Size) -> TensorSpec:
    return TensorSpec(str(dtype).removeprefix("torch."), tuple(shape))


@cache
def _item_bytes(name: str) -> int:
    form: torch.dtype = getattr(torch, name)
    return form.itemsize


def specs_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}


@contextmanager
def share_weights(tensors: Mapping[str, Tensor]) -> Iterator[SharedWeights]:
    """In a form that `open_weights` opens in any number of other processes, while the block lasts."""
    if all(tensor.is_cuda for tensor in tensors.values()):
        handles, counters = _shared_storages(tensors)
        # The tensors are complete, so that no reader waits for an event of a GPU that it may not see.
        for device in {tensor.device for tensor in tensors.values()}:
            torch.cuda.synchronize(device)
        try:
            yield handles
        finally:
            for counter in counters:
                torch.UntypedStorage._release_ipc_counter(*counter)
            torch.cuda.ipc_collect()
        return
    with tempfile.TemporaryDirectory(prefix="fp8-grpo-") as folder:
        path = Path(folder) / "policy.safetensors"
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
        yield {"file": str(path), "names": list(tensors)}


def open_weights(handles: SharedWeights, device: torch.device) -> SharedBytes:
    """To be used within the sender's block; the tensors of a file lie on the CPU."""
    names: list[str] = handles["names"]
    if "file" in handles:
        tensors = load_file(handles["file"])
        flat = [tensors[name].view(-1).view(torch.uint8) for name in names]
        return SharedBytes(names, np.array([(i, 0, len(part)) for i, part in enumerate(flat)]), flat)
    places = np.frombuffer(handles["places"], np.int64).reshape(-1, 3)
    return SharedBytes(names, places, [_open_storage(fields, device) for fields in handles["storages"]])


def _shared_storages(tensors: Mapping[str, Tensor]) -> tuple[SharedWeights, list[tuple[Any, ...]]]:
    assert all(tensor.is_contiguous() for tensor in tensors.values()), "a tensor is not contiguous"
    each = list(tensors.values())
    storages = np.array([tensor.untyped_storage().data_ptr() for tensor in each])
    firsts = np.array([tensor.data_ptr() for tensor in each]) - storages
    _, examples, numbers = np.unique(storages, return_index=True, return_inverse=True)
    places = np.stack([numbers, firsts, [tensor.nbytes for tensor in each]], axis=1)
    fields, counters = zip(*(_handle(each[i]) for i in examples), strict=True)
    # As bytes they take no time on their way to another process.
    return {"storages": list(fields), "names": list(tensors), "places": places.tobytes()}, list(counters)


def _handle(tensor: Tensor) -> tuple[list[Any], tuple[Any, ...]]:
    """IPC fields of the whole storage of a tensor, and its counter.

    torch expects one reader to release the counter: two would take an unsigned number below 0, and one that is killed
    leaves it. So readers get the counter of nothing, and the sender releases this one.
    """
    storage = tensor.detach().untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
    _, fields = reduce_tensor(whole)
    handles = list(fields)
    handles[_COUNTER] = _counter_of_nothing()[1]
    for place in (_TENSOR_CLASS, _STORAGE_CLASS, _DTYPE):
        handles[place] = None
    handles[_WAITS_FOR_EVENT] = False
    return [list(field) if isinstance(field, tuple) else field for field in handles], fields[_COUNTER]


@cache
def _counter_of_nothing() -> tuple[Tensor, tuple[Any, ...]]:
    nothing = torch.empty(1, dtype=torch.uint8, device="cuda")
    return nothing, reduce_tensor(nothing)[1][_COUNTER]


def _open_storage(fields: list[Any], device: torch.device) -> Tensor:
    """uint8 [bytes], the sender's memory."""
    call = [tuple(field) if isinstance(field, list) else field for field in fields]
    call[_TENSOR_CLASS], call[_STORAGE_CLASS], call[_DTYPE] = (Tensor, torch.storage.TypedStorage, torch.uint8)
    # The same GPU may have another number in the process that trains; of another GPU the memory is mapped into ours.
    call[_DEVICE] = device.index
    whole: Tensor = rebuild_cuda_tensor(*call)
    return whole
