"""How long the calling thread has encoded, hashed, written and read stored files: what records cost a task."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class _Reading(threading.local):
    seconds = 0.0
    running = False


_reading = _Reading()


def stored_seconds() -> float:
    """Seconds so far, of this thread alone: the difference of two readings is what lies between them."""
    return _reading.seconds


@contextmanager
def storing() -> Iterator[None]:
    """The block counts, once however deep such blocks are nested; also usable as a decorator."""
    if _reading.running:
        yield
        return
    _reading.running, began = True, time.perf_counter()
    try:
        yield
    finally:
        _reading.running = False
        _reading.seconds += time.perf_counter() - began
