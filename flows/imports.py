"""Imports of large libraries, beside which Python need not look for garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep what is made inside out of the garbage collector's sight: it lives as long as the process."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
