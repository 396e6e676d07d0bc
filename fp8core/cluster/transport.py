"""Process groups of a run, and the path of weights from ranks to engines: no file, no object store."""

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any, Final, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed import (  # type: ignore[attr-defined]
    DistNetworkError,
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)

from fp8core.errors import UserError
from fp8core.rollout.shared_weights import RECEIVED_BYTES, TensorSpec, specs_of
from fp8core.training.ranks import ALONE, Ranks, align

# The caller ends the members that wait for one that is gone.
_TIMEOUT = timedelta(hours=2)
# The store answers before anybody connects to it. torch takes this time twice where a port is closed.
_CONNECT = timedelta(seconds=30)
_PIECE_BYTES = 256 << 20

Value = TypeVar("Value")
Broadcast = Literal["gloo", "nccl"]
BROADCASTS: Final[Mapping[Broadcast, str]] = {"gloo": "cpu", "nccl": "cuda:0"}
"""Where the tensors of each are received."""


class Rendezvous:
    def __init__(self, host: str) -> None:
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)

    def port(self) -> int:
        return int(self._store.port)


def _connect(host: str, port: int) -> TCPStore:
    try:
        store = TCPStore(host, port, is_master=False, timeout=_CONNECT)
    except DistNetworkError as error:
        route = f"{socket.gethostname()} cannot reach {host}:{port}"
        raise UserError(f"cluster: {route}; nodes need all TCP ports of each other") from error
    store.set_timeout(_TIMEOUT)
    return store


class Link:
    """One end of a broadcast of weights: process 0 sends, all others receive."""

    def __init__(self, host: str, port: int, name: str, path: Broadcast, process: int, count: int) -> None:
        store = PrefixStore(name, _connect(host, port))
        self._device = torch.device(BROADCASTS[path])
        self._group: Any
        if path == "nccl":
            torch.cuda.set_device(self._device)
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = _TIMEOUT
            self._group = distributed.ProcessGroupNCCL(store, process, count, options)
        else:
            self._group = ProcessGroupGloo(store, process, count, _TIMEOUT)

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        for piece in _pieces(specs_of(tensors)):
            buffer = torch.empty(piece.bytes, dtype=torch.uint8, device=self._device)
            for name, start in piece.starts.items():
                flat = tensors[name].detach().contiguous().view(-1).view(torch.uint8)
                buffer[start : start + len(flat)].copy_(flat)
            self._group.broadcast([buffer]).wait()

    def receive(self, layouts: Mapping[str, TensorSpec]) -> Iterator[dict[str, Tensor]]:
        waiting = list[Piece]()
        for piece in _pieces(layouts):
            if waiting and sum(each.bytes for each in waiting) + piece.bytes > RECEIVED_BYTES:
                yield self._receive_tensors(waiting, layouts)
                waiting = []
            waiting.append(piece)
        yield self._receive_tensors(waiting, layouts)

    def _receive_tensors(self, pieces: Sequence["Piece"], layouts: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
        sizes = [piece.bytes for piece in pieces]
        whole = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        tensors_by_name: dict[str, Tensor] = {}
        for piece, buffer in zip(pieces, whole.split(sizes), strict=True):
            self._group.broadcast([buffer]).wait()
            for name, start in piece.starts.items():
                layout = layouts[name]
                part = buffer[start : start + layout.bytes]
                tensors_by_name[name] = part.view(getattr(torch, layout.dtype)).view(layout.shape)
        return tensors_by_name


class Piece(NamedTuple):
    """Tensors that travel together: the byte at which each begins, and how many bytes there are."""

    starts: dict[str, int]
    bytes: int


def _pieces(layouts: Mapping[str, TensorSpec]) -> Iterator[Piece]:
    starts = dict[str, int]()
    bytes_in_part = 0
    for name, layout in layouts.items():
        size = align(layout.bytes)
        if starts and bytes_in_part + size > _PIECE_BYTES:
            yield Piece(starts, bytes_in_part)
            starts = {}
            bytes_in_part = 0
        starts[name] = bytes_in_part
        bytes_in_part += size
    yield Piece(starts, bytes_in_part)


class GroupRanks(Ranks):
    """Several processes: contiguous parts of a batch for each, sums in the order of one."""

    def __init__(self, host: str, port: int, rank: int, count: int) -> None:
        store = PrefixStore("ranks", _connect(host, port))
        # Megatron computes in this group too.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        distributed.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=_TIMEOUT)
        self._group: Any = None
        self.rank = rank
        self.count = count

    def neighbours(self, width: int) -> Ranks:
        if width == 1:
            return ALONE
        if width == self.count:
            return self
        part = copy(self)
        part._group, _ = distributed.new_subgroups(width, timeout=_TIMEOUT)
        part.rank = self.rank % width
        part.count = width
        return part

    def joined(self, own: Sequence[Value]) -> list[Value]:
        by_rank: list[Sequence[Value]] = [()] * self.count
        distributed.all_gather_object(by_rank, list(own), self._group)
        return list(chain.from_iterable(by_rank))

    def combine_counts(self, combine: Callable[..., None]) -> None:
        combine(self.maximum, partial(distributed.all_reduce, group=self._group))

    def summed(self, own: Sequence[Sequence[Tensor | None]], like: Sequence[Tensor]) -> list[Tensor | None]:
        """The sums over all parts of all processes, by tensor, added in the order of the parts: the bytes of one.

        `own`: of each part of this process, a gradient or None for each tensor of `like`.
        """
        assert self._group is None, "a chain of all processes"
        sums: list[list[Tensor | None]] = [[None] * len(like)]
        if self.rank > 0:
            distributed.recv_object_list(sums, self.rank - 1)
        for part in own:
            sums = [[_plus(total, gradient) for total, gradient in zip(sums[0], part, strict=True)]]
        if self.rank + 1 < self.count:
            distributed.send_object_list(sums, self.rank + 1)
        distributed.broadcast_object_list(sums, self.count - 1)
        return sums[0]

    def gathered(self, own: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        most = max(sizes)
        padded = own if len(own) == most else torch.cat([own, own.new_zeros(most - len(own))])
        # Into a list, NCCL would need all of it a second time.
        whole = own.new_empty(most * self.count)
        distributed.all_gather_into_tensor(whole, padded, group=self._group)
        return [whole[rank * most :][:size] for rank, size in enumerate(sizes)]

    def exchange(self, parts: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        size = len(parts[self.rank])
        outgoing = torch.cat(list(parts))
        received = outgoing.new_empty(size * self.count)
        sizes = [len(part) for part in parts]
        each = [size] * self.count
        work = distributed.all_to_all_single(received, outgoing, each, sizes, group=self._group, async_op=True)

        def finished() -> list[Tensor]:
            work.wait()
            return list(received.split(size) if size else [received] * self.count)

        return finished

    def maximum(self, tensor: Tensor) -> None:
        distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX, group=self._group)


def _plus(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    if total is None or part is None:
        return part if total is None else total
    return total + part
