from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8core.config.reward import RewardConfig
from fp8core.rewards.verifier import VerifierPool, build_verifier

# A completion is what the function does, in Python.
HOSTILE = """
import os, time

from fp8core.rewards.scorer import Verdict


def score(prompt, completion, answer, finish):
    return eval(completion)


def fail(text):
    raise ValueError(f"no good: {text}\\nand a hint")
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
