"""The processes that train one policy together, as a trainer sees them."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from fp8core.numerics.e4m3 import GroupNotFinite

Part = TypeVar("Part")
Result = TypeVar("Result")


class Ranks(Protocol):
    """Every process makes the same calls in the same order.

    Attributes:
        rank: of this process.
        count: of all processes.
    """

    rank: int
    count: int

    def own(self, parts: int) -> range:
        """The indices of the parts of a batch that this process computes."""
        ...

    def joined(self, own: Sequence[object]) -> list[object]:
        """The values of all processes, in the order of the parts."""
        ...

    def combine_counts(self, combine: Callable[..., None]) -> None:
        """Complete statistics (`KvStatistics.combine`) over all processes."""
        ...

    def summed(self, own: Sequence[Sequence[Tensor | None]], like: Sequence[Tensor]) -> list[Tensor | None]:
        """The sums of the gradients of all parts, each addition in the order of the parts, in every process."""
        ...

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Sums over all processes, in place, in an order that their number decides."""
        ...

    def maximum(self, tensor: Tensor) -> None:
        """The largest values over all processes, in place."""
        ...


class Alone:
    """One process: it computes every part."""

    rank, count = 0, 1

    def own(self, parts: int) -> range:
        return range(parts)

    def joined(self, own: Sequence[object]) -> list[object]:
        return list(own)

    def combine_counts(self, combine: Callable[..., None]) -> None:
        """Nothing is missing."""

    def summed(self, own: Sequence[Sequence[Tensor | None]], like: Sequence[Tensor]) -> list[Tensor | None]:
        (sums,) = own
        return list(sums)

    def add(self, tensors: Sequence[Tensor]) -> None:
        """They are whole."""

    def maximum(self, tensor: Tensor) -> None:
        """It is whole."""


ALONE: Ranks = Alone()


def shared_out(ranks: Ranks, parts: Sequence[Part], compute: Callable[[Part], Result]) -> list[Result]:
    """`compute` of every part, in order, each by one process; an error of one part is raised by all processes.

    Raises:
        ValueError, GroupNotFinite: of the first part whose computation raised it.
    """
    own: list[Result | ValueError | GroupNotFinite] = []
    for index in ranks.own(len(parts)):
        try:
            own.append(compute(parts[index]))
        except (ValueError, GroupNotFinite) as error:
            # The other processes wait for a result of ours.
            own.append(error)
            break
    found = list[Result]()
    for result in ranks.joined(own):
        if isinstance(result, Exception):
            raise result
        found.append(result)  # type: ignore[arg-type]
    return found
