"""Python's garbage collector, beside what a run keeps for as long as it lasts.

A full collection looks at every container that is alive, and with torch, Prefect and MLflow imported that is half a
million: 0.4 seconds, in which nobody reads what the engine has generated. The engine goes on meanwhile, so on an idle
host nothing is lost; on a busy one the reader falls behind, and a rollout with it (docs/performance.md, Generation).
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def freeze_heap() -> None:
    """Take all that is alive now out of the collector's sight, once what lives long has been built.

    Whatever is dropped later is freed as before, unless it is part of a cycle: that waits for `thaw_heap`. So does what
    was dropped before, but beside a GPU, whose memory must not wait; elsewhere looking for it would only delay a start.
    """
    if torch.cuda.is_available():
        gc.collect()
    gc.freeze()


def thaw_heap() -> None:
    """Show the collector everything again; does nothing where nothing is frozen."""
    gc.unfreeze()


@contextmanager
def thawed_heap() -> Iterator[None]:
    """Something that lives long is replaced inside: what it was is freed before the block begins, cycles included."""
    thaw_heap()
    gc.collect()
    yield
    freeze_heap()
