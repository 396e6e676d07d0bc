"""The processes that share the parts of a batch out: one alone, or several that make the same calls."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fp8core.errors import UserError
from fp8core.numerics.e4m3 import GroupNotFinite, round_up
from fp8core.progress import tell_progress
from fp8core.training.trainer import shares

Part = TypeVar("Part")
Result = TypeVar("Result")


class Ranks:
    """Processes make the same calls in the same order (`cluster.transport.GroupRanks`). This one is alone: it computes
    every part."""

    rank = 0
    count = 1

    def own(self, parts: int) -> range:
        """The contiguous parts that this process computes."""
        return range(parts)[shares(parts, self.count)[self.rank]]

    def neighbours(self, width: int) -> "Ranks":
        """The group of `width` successive processes that this one is in."""
        return self

    def joined(self, own: Sequence[Result]) -> list[Result]:
        """The values of all processes, in the order of the parts."""
        return list(own)

    def combine_counts(self, combine: Callable[..., None]) -> None: ...

    def summed(self, own: Sequence[Sequence[Tensor | None]], like: Sequence[Tensor]) -> list[Tensor | None]:
        """The sums of the gradients of all parts, each addition in the order of the parts, in every process."""
        (sums,) = own
        return list(sums)

    def gathered(self, own: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """The bytes of all processes, uint8 [size] each."""
        return [own]

    def exchange(self, parts: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Begin to send each process its flat tensor of `parts`; the result waits for what all have for this one. On a
        GPU, kernels that come before the result is called do not wait."""
        return lambda: list(parts)

    def maximum(self, tensor: Tensor) -> None:
        """The largest values over all processes, in place."""


ALONE = Ranks()


class Teams(Ranks):
    """Groups of processes that compute each part together, and count as one."""

    def __init__(self, processes: Ranks, width: int) -> None:
        self._processes = processes
        self._answers = processes.rank % width == 0
        self.rank = processes.rank // width
        self.count = processes.count // width

    def joined(self, own: Sequence[Result]) -> list[Result]:
        return self._processes.joined([each for each in own if self._answers or isinstance(each, Exception)])


def shared_out(
    ranks: Ranks,
    parts: Sequence[Part],
    compute: Callable[[Part], Result],
    end: Callable[[int], None] = lambda parts: None,
) -> list[Result]:
    """`compute` of every part, in order, each by one process; an error of one part is raised by all processes.

    `end`: called with the number of all parts when the own ones are computed, or one has failed."""
    own: list[Result | ValueError | GroupNotFinite | UserError] = []
    for index in ranks.own(len(parts)):
        tell_progress(index, len(parts))
        try:
            own.append(compute(parts[index]))
        except (ValueError, GroupNotFinite, UserError) as error:
            # The other processes wait for a result of ours.
            own.append(error)
            break
    end(len(parts))
    return _without_errors(ranks.joined(own))


def together(ranks: Ranks, act: Callable[[], Result]) -> list[Result]:
    """The results of all processes; an error of one of them is raised by all."""
    own: Result | OSError | UserError
    try:
        own = act()
    except (OSError, UserError) as error:
        # The other processes wait for this one.
        own = error
    return _without_errors(ranks.joined([own]))


def _without_errors(results: Iterable[Result | Exception]) -> list[Result]:
    own_results = list[Result]()
    for result in results:
        if isinstance(result, Exception):
            raise result
        own_results.append(result)
    return own_results


# torch rounds pinned memory up to a power of two.
_PIECE_BYTES = 256 << 20


def align(size: int) -> int:
    """A view of bytes begins at a multiple of its elements."""
    return round_up(size, 16)


class RankWeights:
    """Weights that the ranks keep together: each has a share of the tensors in its main memory."""

    def __init__(self, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
        self._ranks = ranks
        self._layouts = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        self._device = next(iter(tensors.values())).device
        self._places = dict[str, tuple[int, int]]()
        self._sizes = [0] * ranks.count
        for name in sorted(tensors, key=lambda name: -tensors[name].nbytes):
            least = min(range(ranks.count), key=self._sizes.__getitem__)
            self._places[name] = least, self._sizes[least]
            self._sizes[least] += align(tensors[name].nbytes)
        on_gpu = self._device.type == "cuda"
        size = self._sizes[ranks.rank]
        # A GPU copies to and from pinned memory at the speed of its bus, and torch uses it again.
        self._own = [
            torch.empty(min(_PIECE_BYTES, size - start), dtype=torch.uint8, pin_memory=on_gpu)
            for start in range(0, size, _PIECE_BYTES)
        ]
        for name, (rank, start) in self._places.items():
            if rank == ranks.rank:
                self._write(start, tensors[name].detach().contiguous().view(-1).view(torch.uint8))
        if on_gpu:
            torch.cuda.synchronize(self._device)

    def _write(self, start: int, flat: Tensor) -> None:
        while len(flat):
            piece, offset = divmod(start, _PIECE_BYTES)
            size = min(len(flat), _PIECE_BYTES - offset)
            self._own[piece][offset : offset + size].copy_(flat[:size], non_blocking=True)
            start = start + size
            flat = flat[size:]

    def whole(self) -> dict[str, Tensor]:
        """On the device that they came from."""
        own = torch.empty(self._sizes[self._ranks.rank], dtype=torch.uint8, device=self._device)
        # An empty share has no piece, and splits into one part.
        for piece, part in zip(self._own, own.split(_PIECE_BYTES), strict=False):
            part.copy_(piece, non_blocking=True)
        parts = self._ranks.gathered(own, self._sizes)
        tensors = dict[str, Tensor]()
        for name, (dtype, shape) in self._layouts.items():
            rank, start = self._places[name]
            tensors[name] = parts[rank][start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        return tensors

    def close(self) -> None:
        del self._own
