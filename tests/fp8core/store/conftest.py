"""Failures that can be had without privileges: a disk that refuses more bytes, and a process that is killed."""

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

Acknowledge = Callable[[str], None]


@contextmanager
def _file_size_limit(limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def file_size_limit() -> Callable[[int], AbstractContextManager[None]]:
    """A block in which no file grows past a number of bytes: a write stops half way, as on a full disk."""
    return _file_size_limit


def _acknowledged_before_kill(work: Callable[[Acknowledge], None], seconds: float) -> list[str]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        # A child of pytest must never return into it.
        try:
            work(lambda line: os.write(writer, f"{line}\n".encode()) and None)
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        first = pipe.readline()
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        rest = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "the child ended by itself before it was killed"
    return (first + rest).decode().splitlines()


@pytest.fixture
def acknowledged_before_kill() -> Callable[[Callable[[Acknowledge], None], float], list[str]]:
    """Runs `work(acknowledge)` in a child, kills it so many seconds after its first word, returns all its words."""
    return _acknowledged_before_kill
