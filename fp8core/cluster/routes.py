"""The way that each engine gets its weights by, from the places of engines and ranks."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from fp8core.cluster.gang import Gang
from fp8core.cluster.member import Place
from fp8core.cluster.transport import Broadcast, Link

Path = Literal["memory"] | Broadcast


class Route(NamedTuple):
    """Of one engine.

    Attributes:
        engine: its index.
        rank: the one that its weights come from.
        path: `memory` of that rank's GPU, or a broadcast.
    """

    engine: int
    rank: int
    path: Path


def find_routes(
    ranks: Sequence[Place], engines: Sequence[Place], holders: Sequence[int], colocated: bool
) -> list[Route]:
    """A route for each engine.

    Args:
        ranks: where they are.
        engines: likewise.
        holders: ranks that have the whole policy on their GPU; none where it lies in main memory, or where engines
            take tensors alone.
        colocated: whether engines share GPUs with ranks. They then read the memory of any GPU of their host, because a
            buffer of their own would have no room.
    """

    def route(index: int, engine: Place) -> Route:
        if not holders or engine.gpu is None:
            return Route(index, 0, "gloo")
        for rank in holders:
            if (ranks[rank].address, ranks[rank].gpu) == (engine.address, engine.gpu):
                return Route(index, rank, "memory")
        on_host = colocated and engine.address == ranks[0].address
        return Route(index, 0, "memory" if on_host else "nccl")

    return [route(index, engine) for index, engine in enumerate(engines)]


class Links:
    """Groups of rank 0 and the engines that it broadcasts to, each made when it is first needed."""

    def __init__(self, gang: Gang, host: str, port: int) -> None:
        """The store at this address is where their processes meet."""
        self._gang, self._address = gang, (host, port)
        self._made = set[str]()

    def key(self, path: Broadcast, engines: Sequence[int]) -> str:
        """The name of their `Link` in each of the processes."""
        key = f"{path} {' '.join(map(str, engines))}"
        if key not in self._made:
            members = [self._gang.ranks[0], *(self._gang.engines[index] for index in engines)]
            ends = [(*self._address, key, path, process, len(members)) for process in range(len(members))]
            calls = [member.send("build", key, Link, (), *end) for member, end in zip(members, ends, strict=True)]
            self._gang.gather(calls)
            self._made.add(key)
        return key
