"""Process groups of a run, and the path of weights from ranks to engines: no file, no object store."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

# The caller ends the members that wait for one that is gone.
_TIMEOUT = timedelta(hours=2)
_BUFFER_BYTES = 256 << 20


class Layout(NamedTuple):
    """dtype (without `torch.`) and shape of a tensor that travels."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Layout":
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def bytes(self) -> int:
        form: torch.dtype = getattr(torch, self.dtype)
        return prod(self.shape) * form.itemsize


class Meeting:
    """The place where processes find each other: a store in the process of rank 0."""

    def __init__(self, host: str) -> None:
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)

    def port(self) -> int:
        """The port that the others connect to."""
        return int(self._store.port)

    def close(self) -> None:
        """The store ends with the process."""


class Link:
    """One end of the path of weights: process 0 sends, all others receive."""

    def __init__(self, host: str, port: int, process: int, count: int) -> None:
        store = PrefixStore("weights", TCPStore(host, port, is_master=False, timeout=_TIMEOUT))
        self._group: Any = ProcessGroupGloo(store, process, count, _TIMEOUT)

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Send tensors in few large buffers."""
        layouts = {name: Layout.of(tensor) for name, tensor in tensors.items()}
        for names in _buffers(layouts):
            flat = [tensors[name].detach().contiguous().view(-1).view(torch.uint8) for name in names]
            self._group.broadcast([torch.cat(flat).cpu()]).wait()

    def receive(self, layouts: Mapping[str, Layout]) -> dict[str, Tensor]:
        """The tensors that are sent, by name; they must have these layouts."""
        found: dict[str, Tensor] = {}
        for names in _buffers(layouts):
            sizes = [layouts[name].bytes for name in names]
            buffer = torch.empty(sum(sizes), dtype=torch.uint8)
            self._group.broadcast([buffer]).wait()
            for name, part in zip(names, buffer.split(sizes), strict=True):
                # A view of bytes at any offset is none of a wider type.
                found[name] = part.clone().view(getattr(torch, layouts[name].dtype)).view(layouts[name].shape)
        return found


def _buffers(layouts: Mapping[str, Layout]) -> Iterator[list[str]]:
    """Names in order, as many in a buffer as it has room for, one at least."""
    names, held = list[str](), 0
    for name, layout in layouts.items():
        if names and held + layout.bytes > _BUFFER_BYTES:
            yield names
            names, held = [], 0
        names.append(name)
        held += layout.bytes
    yield names


class GroupRanks:
    """`training.ranks.Ranks` of several processes: contiguous parts of a batch for each, sums in the order of one."""

    def __init__(self, host: str, port: int, rank: int, count: int) -> None:
        store = PrefixStore("ranks", TCPStore(host, port, is_master=False, timeout=_TIMEOUT))
        # Megatron computes in this group too.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        distributed.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=_TIMEOUT)
        self.rank, self.count = rank, count

    def own(self, parts: int) -> range:
        """The indices of this process's parts."""
        return range(parts * self.rank // self.count, parts * (self.rank + 1) // self.count)

    def joined(self, own: Sequence[object]) -> list[object]:
        """The values of all processes, in the order of their ranks."""
        found: list[Sequence[object]] = [()] * self.count
        distributed.all_gather_object(found, list(own))
        return list(chain.from_iterable(found))

    def combine_counts(self, combine: Callable[..., None]) -> None:
        """Maxima and sums of int64 tensors over all processes (`KvStatistics.combine`)."""

        combine(self.maximum, distributed.all_reduce)

    def summed(self, own: Sequence[Sequence[Tensor | None]], like: Sequence[Tensor]) -> list[Tensor | None]:
        """The sums over all parts of all processes, by tensor, each addition in the order of the parts.

        One process that adds part after part gets the same bytes. None is a tensor that no part has.

        Args:
            own: of each part of this process, a gradient or None for each tensor of `like`.
            like: tensors of the shapes and the dtype of the sums.
        """
        sums: list[Tensor | None] = [None] * len(like)
        if self.rank > 0:
            sums = self._received(like, self.rank - 1)
        for part in own:
            sums = [_plus(total, gradient) for total, gradient in zip(sums, part, strict=True)]
        if self.rank + 1 < self.count:
            self._send(sums, like, self.rank + 1)
        return self._from_last(sums, like)

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Sums over all processes, in place; on GPUs in the order of NCCL's ring, the same at every repetition."""
        for tensor in tensors:
            distributed.all_reduce(tensor)

    def maximum(self, tensor: Tensor) -> None:
        """The largest values over all processes, in place."""
        distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX)

    def _send(self, sums: Sequence[Tensor | None], like: Sequence[Tensor], to: int) -> None:
        present, flat = _flat(sums, like)
        distributed.send(present, to)
        distributed.send(flat, to)

    def _received(self, like: Sequence[Tensor], source: int) -> list[Tensor | None]:
        present, flat = _flat([None] * len(like), like)
        distributed.recv(present, source)
        distributed.recv(flat, source)
        return _parts(present, flat, like)

    def _from_last(self, sums: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor | None]:
        present, flat = _flat(sums, like)
        for tensor in (present, flat):
            distributed.broadcast(tensor, src=self.count - 1)
        return _parts(present, flat, like)

    def close(self) -> None:
        """Leave the group; the end of the process does it where others are gone."""


def _plus(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    if total is None or part is None:
        return part if total is None else total
    return total + part


def _flat(values: Sequence[Tensor | None], like: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """A mark for each value that exists, uint8 [tensors], and all values behind one another, else zeros."""
    present = torch.tensor([value is not None for value in values], dtype=torch.uint8)
    filled = (
        torch.zeros_like(shape, requires_grad=False) if value is None else value
        for value, shape in zip(values, like, strict=True)
    )
    return present, torch.cat([value.detach().reshape(-1) for value in filled])


def _parts(present: Tensor, flat: Tensor, like: Sequence[Tensor]) -> list[Tensor | None]:
    split = flat.split([shape.numel() for shape in like])
    views = (part.view(shape.shape).clone() for part, shape in zip(split, like, strict=True))
    return [view if there else None for view, there in zip(views, present.tolist(), strict=True)]
