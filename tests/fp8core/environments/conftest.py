from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8core.environments.pool import EnvironmentPool
from fp8core.environments.protocol import Outcome, Turn
from fp8core.processes.host import Limits

# An action names what the environment does with it.
HOSTILE = r"""
import ctypes, os, sys, threading, time

from fp8core.environments.protocol import Outcome, Said, Tool, Turn


class Hostile:
    def __init__(self, *, greeting="hello"):
        self.greeting = greeting
        self.at_close = ""

    def start(self, task):
        self.task = task
        return self.do(task.question) if task.question else Turn((Said("user", self.greeting),))

    def step(self, action):
        self.action = action
        return self.do(action.text)

    def close(self):
        if self.at_close:
            self.do(self.at_close)

    def do(self, text):
        what, _, argument = text.partition(" ")
        return getattr(self, "do_" + what)(argument)

    def do_say(self, text):
        return Turn((Said("user", text),))

    def do_give(self, text):
        return eval(text)

    def do_at_close(self, text):
        self.at_close, _, then = text.partition("|")
        return self.do(then or "say ok")

    def do_raise(self, text):
        raise ValueError(f"no good: {text}\nand a hint")

    def do_sleep(self, text):
        time.sleep(1000)

    def do_spin(self, text):
        while True:
            pass

    def do_power(self, text):
        return 9 ** 9 ** 9

    def do_allocate(self, text):
        bytearray(2**40)

    def do_recurse(self, text):
        return self.do_recurse(text)

    def do_exit(self, text):
        os._exit(3)

    def do_quit(self, text):
        sys.exit(4)

    def do_segfault(self, text):
        ctypes.string_at(0)

    def do_print(self, text):
        sys.stdout.write("noise" * 1_000_000)
        os.write(1, b"more" * 1_000_000)
        os.write(2, b"more" * 1_000_000)
        return self.do_say("printed")

    def do_copy(self, text):
        # The copy answers first, or raises.
        copy = os.fork() == 0
        if copy and text == "raises":
            raise ValueError("of the copy")
        time.sleep(0 if copy else 0.05)
        return self.do_say("copied " + text)

    def do_daemon(self, text):
        path, _, then = text.partition("|")
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                with open(path + ".new", "w") as file:
                    file.write(str(os.getpid()))
                os.rename(path + ".new", path)
                time.sleep(1000)
            os._exit(0)
        while not os.path.exists(path):
            time.sleep(0.005)
        return self.do(then)

    def do_later(self, text):
        # Between two turns, when nothing is asked.
        threading.Thread(target=lambda: (time.sleep(0.5), self.do(text))).start()
        return self.do_say("later")

    def do_draw(self, text):
        import random
        return self.do_say(str(random.random()))


def said(text):
    return Turn((Said("user", text),))
"""

LIMITS = Limits(timeout_seconds=8.0, cpu_seconds=1.0, memory_mb=128)


@pytest.fixture(scope="session")
def hostile_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("environment") / "hostile.py"
    path.write_text(HOSTILE)
    return path


@pytest.fixture(scope="session")
def start_pool() -> Iterator[Callable[..., EnvironmentPool]]:
    """Start a pool; all of them end with the session."""
    pools: list[EnvironmentPool] = []

    def start(name: str, at_once: int = 4, limits: Limits = LIMITS, **options: Any) -> EnvironmentPool:
        pools.append(EnvironmentPool(name, options, limits, at_once, 1 << 16))
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
