"""Samples of this process's memory while trainings run, kept on disk for the verdict of a parity run."""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from io import FileIO
from pathlib import Path

import psutil

from fp8core.parity.measure import MemorySample
from fp8core.store.lines import lines_forward, whole_end

INTERVAL_SECONDS = 0.5


@contextmanager
def watch_memory(path: Path) -> Iterator[None]:
    """Append a sample to `path` every INTERVAL_SECONDS while the block lasts; its folder exists."""
    over = threading.Event()
    thread = threading.Thread(target=_follow, args=(path, over), name="memory-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def read_memory(path: Path) -> list[MemorySample]:
    """All samples, the oldest first; none without the file. A torn last line is left out."""
    if not path.is_file():
        return []
    with FileIO(path) as file:
        return [MemorySample(**json.loads(line)) for _, line in lines_forward(file, 0, whole_end(file))]


def _follow(path: Path, over: threading.Event) -> None:
    process = psutil.Process()
    with FileIO(path, "a+") as file:
        # A kill may have torn the last line.
        file.truncate(whole_end(file))
        while not over.wait(INTERVAL_SECONDS):
            sample = MemorySample(time.time(), os.getpid(), process.memory_info().rss / 2**20)
            file.write(f"{json.dumps(asdict(sample))}\n".encode())
