from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8core.config.reward import RewardConfig
from fp8core.rewards.pool import VerifierPool
from fp8core.rewards.verifier import build_verifier

# A completion names what the function does with it.
HOSTILE = """
import os, time

from fp8core.rewards.scorer import Verdict


def score(prompt, completion, reference, finish):
    what, _, argument = completion.partition(" ")
    return globals()["do_" + what](argument, reference)


def do_say(argument, reference):
    return argument == reference


def do_give(argument, reference):
    return eval(argument)


def do_raise(argument, reference):
    raise ValueError(f"no good: {argument}\\nand a hint")


def do_sleep(argument, reference):
    time.sleep(1000)


def do_power(argument, reference):
    return len(str(9 ** 9 ** 9)) > 0


def do_exit(argument, reference):
    os._exit(3)


def do_daemon(argument, reference):
    # Start a daemon in a session of its own, then end as the second word says.
    path, _, ending = argument.partition(" ")
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(path + ".new", "w") as file:
                file.write(str(os.getpid()))
            os.rename(path + ".new", path)
            time.sleep(1000)
        os._exit(0)
    while not os.path.exists(path):
        time.sleep(0.01)
    return ending == "return" or globals()["do_" + ending]("", reference)


def do_note(argument, reference):
    with open(argument, "a") as file:
        file.write("x")
    return True
"""


@pytest.fixture(scope="session")
def hostile_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verifier") / "hostile.py"
    path.write_text(HOSTILE)
    return path


@pytest.fixture(scope="session")
def start_pool() -> Iterator[Callable[..., VerifierPool]]:
    """Start a pool; all of them end with the session."""
    pools: list[VerifierPool] = []

    def start(verifier: str, **settings: Any) -> VerifierPool:
        pool = build_verifier(RewardConfig(verifier=verifier, **settings))
        assert isinstance(pool, VerifierPool)
        pools.append(pool)
        return pool

    yield start
    for pool in pools:
        pool.close()
