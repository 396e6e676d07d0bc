"""The processes that share the parts of a batch out: one alone, or several that make the same calls."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from fp8core.errors import UserError
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

    def joined(self, own: Sequence[Result]) -> list[Result]:
        """The values of all processes, in the order of the parts."""
        ...

    def combine_counts(self, combine: Callable[..., None]) -> None:
        """Complete statistics (`KvStatistics.combine`) over all processes."""
        ...

    def summed(self, own: Sequence[Sequence[Tensor | None]], like: Sequence[Tensor]) -> list[Tensor | None]:
        """The sums of the gradients of all parts, each addition in the order of the parts, in every process."""
        ...

    def gathered(self, own: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """The bytes of all processes, one tensor each.

        Args:
            own: uint8 [own size].
            sizes: of all processes.
        """
        ...

    def exchanged(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of all processes for this one; `parts` has a flat tensor for each of them."""
        ...

    def maximum(self, tensor: Tensor) -> None:
        """The largest values over all processes, in place."""
        ...


class Alone:
    """One process: it computes every part."""

    rank, count = 0, 1

    def own(self, parts: int) -> range:
        return range(parts)

    def joined(self, own: Sequence[Result]) -> list[Result]:
        return list(own)

    def combine_counts(self, combine: Callable[..., None]) -> None:
        """Nothing is missing."""

    def summed(self, own: Sequence[Sequence[Tensor | None]], like: Sequence[Tensor]) -> list[Tensor | None]:
        (sums,) = own
        return list(sums)

    def gathered(self, own: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        return [own]

    def exchanged(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return list(parts)

    def maximum(self, tensor: Tensor) -> None:
        """It is whole."""


ALONE: Ranks = Alone()


def shared_out(
    ranks: Ranks,
    parts: Sequence[Part],
    compute: Callable[[Part], Result],
    end: Callable[[int], None] = lambda parts: None,
) -> list[Result]:
    """`compute` of every part, in order, each by one process; an error of one part is raised by all processes.

    Args:
        ranks: the processes.
        parts: the same in all of them.
        compute: of one part.
        end: called with the number of all parts when the own ones are computed, or one of them has failed.

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
    end(len(parts))
    found = list[Result]()
    for result in ranks.joined(own):
        if isinstance(result, Exception):
            raise result
        found.append(result)
    return found


def together(ranks: Ranks, act: Callable[[], Result]) -> list[Result]:
    """The results of all processes; an error of one of them is raised by all.

    Raises:
        OSError, UserError: of reading or writing files.
    """
    own: Result | OSError | UserError
    try:
        own = act()
    except (OSError, UserError) as error:
        # The other processes wait for this one.
        own = error
    found = list[Result]()
    for result in ranks.joined([own]):
        if isinstance(result, (OSError, UserError)):
            raise result
        found.append(result)
    return found
