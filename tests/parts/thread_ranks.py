"""Ranks that are threads of one process, for what needs no processes of their own. They take turns: one computes until
it waits for the others, so kernels with one workspace a process serve all."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from fp8core.training.ranks import Ranks


class ThreadRanks(Ranks):
    """One of several threads that make the same calls. `shared`: what each handed over last, by rank. `turn`: held by
    the one that computes."""

    def __init__(
        self, rank: int, count: int, shared: dict[int, Any], barrier: threading.Barrier, turn: threading.Lock
    ) -> None:
        self.rank, self.count, self._shared, self._barrier, self._turn = rank, count, shared, barrier, turn

    def gathered(self, own: Tensor, sizes: Any) -> list[Tensor]:
        found = self._handed(own)
        assert [len(each) for each in found] == list(sizes)
        return found

    def exchange(self, parts: Any) -> Callable[[], list[Tensor]]:
        received = [of_rank[self.rank] for of_rank in self._handed(list(parts))]
        return lambda: received

    def _handed(self, own: Any) -> list[Any]:
        self._shared[self.rank] = own
        self._turn.release()
        try:
            self._barrier.wait(60)
            found = [self._shared[rank] for rank in range(self.count)]
            self._barrier.wait(60)
        finally:
            self._turn.acquire()
        return found


def on_threads(count: int, act: Callable[[Ranks], Any]) -> list[Any]:
    """Results of so many ranks, in their order."""
    shared, barrier, turn = dict[int, Any](), threading.Barrier(count), threading.Lock()

    def take_part(rank: int) -> Any:
        with turn:
            return act(ThreadRanks(rank, count, shared, barrier, turn))

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(take_part, range(count)))
