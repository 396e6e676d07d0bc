from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8core.environments.pool import EnvironmentPool
from fp8core.environments.protocol import Outcome, Turn
from fp8core.processes.pool import Limits

# A question and an action are what the environment does, in Python.
HOSTILE = """
import ctypes, os, random, sys, time

from fp8core.environments.protocol import Outcome, Said, Tool, Turn


class Hostile:
    at_close = "None"

    def start(self, task):
        self.task = task
        return eval(task.question) if task.question else said("hello")

    def step(self, action):
        self.action = action
        return eval(action.text)

    def close(self):
        eval(self.at_close)

    def closing(self, text, then):
        self.at_close = text
        return then


def said(text):
    return Turn((Said("user", text),))


def fail(text):
    raise ValueError(f"no good: {text}\\nand a hint")


def spin():
    while True:
        pass


def child():
    if os.fork() == 0:
        time.sleep(1000)
"""

LIMITS = Limits(timeout_seconds=8.0, memory_mb=128)


@pytest.fixture(scope="session")
def hostile_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("environment") / "hostile.py"
    path.write_text(HOSTILE)
    return path


@pytest.fixture(scope="session")
def start_pool() -> Iterator[Callable[..., EnvironmentPool]]:
    """Start a pool; all of them end with the session."""
    pools: list[EnvironmentPool] = []

    def start(name: str, max_concurrent_episodes: int = 4, limits: Limits = LIMITS, **options: Any) -> EnvironmentPool:
        pools.append(EnvironmentPool(name, options, limits, max_concurrent_episodes))
        return pools[-1]

    yield start
    for pool in pools:
        pool.close()


def collect(pool: EnvironmentPool, count: int) -> dict[tuple[int, int], Turn | Outcome]:
    """The next replies, in the order in which they come."""
    found: dict[tuple[int, int], Turn | Outcome] = {}
    while len(found) < count:
        found |= {key: reply for key, reply, _ in pool.replies(wait=True)}
    return found
