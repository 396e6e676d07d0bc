"""Lines of progress of a part that takes longer than five seconds: what it is, how far it is and what is left."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Self

Progress = Callable[[int, int], None]
"""Hears how many are done, of how many."""
# To the first line, and at most between two. Lines come when a part took twice as long as at the last one.
_FIRST_SECONDS = 5.0
_LONGEST_SECONDS = 60.0


class Part:
    """A part of the work while the block lasts, called as `Progress`. A part within it speaks in its place."""

    def __init__(self, name: str, say: Callable[[str], None], first: float = _FIRST_SECONDS) -> None:
        """`say` prints a line, in a thread of the part's own; `first`: seconds until the first one."""
        self._name = name
        self._say = say
        self._first = first
        self._began = time.monotonic()
        self._count = self._total = 0
        self._over = threading.Event()
        self._inner = 0
        self._thread = threading.Thread(target=copy_context().run, args=[self._follow], name="progress", daemon=True)

    def __call__(self, count: int, total: int) -> None:
        self._count = count
        self._total = total

    def __enter__(self) -> Self:
        self._outer = _open.get()
        if self._outer is not None:
            self._outer._inner += 1
        self._token = _open.set(self)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        _open.reset(self._token)
        if self._outer is not None:
            self._outer._inner -= 1

    def _follow(self) -> None:
        seconds = self._first
        while not self._over.wait(max(0.0, self._began + seconds - time.monotonic())):
            if not self._inner:
                self._say(f"{self._name}: {self._line(time.monotonic() - self._began)}")
            seconds += min(seconds, _LONGEST_SECONDS)

    def _line(self, seconds: float) -> str:
        count = self._count
        total = self._total
        if total < 2:
            return f"{clock(seconds)} so far"
        rest = f", {clock(seconds / count * (total - count))} left" if count else ""
        return f"{count:,}/{total:,} after {clock(seconds)}{rest}"


_open = ContextVar[Part | None]("part", default=None)


def tell_progress(count: int, total: int) -> None:
    """Tell the innermost part that this thread is in, if it is in one: `count` of `total` are done."""
    part = _open.get()
    if part is not None:
        done, rounds = _round.get()
        part(done * total + count, rounds * total)


_round = ContextVar[tuple[int, int]]("round", default=(0, 1))


@contextmanager
def progress_round(done: int, rounds: int) -> Iterator[None]:
    """In the block `tell_progress` counts within one of so many equal rounds."""
    token = _round.set((done, rounds))
    try:
        yield
    finally:
        _round.reset(token)


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
