"""Failures that can be had without privileges (a full disk, a process that is killed), and small runs."""

import io
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from fp8core.config.load import load_config
from fp8core.report.console import Console
from fp8core.run import loop
from fp8core.run.open import open_directory, open_run
from fp8core.run.refusals import graph_of
from fp8core.store.tables import ROLLOUTS


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


# Smaller still, with a checkpoint a step of which the first is pruned.
_SETTINGS: dict[str, Any] = {
    "steps": 3,
    "checkpoint": {"every": 1, "keep": 1},
    "architecture": {"hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16},
}


@pytest.fixture(scope="session")
def trained(small: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """trained(name, **settings): the folder of a small run that was trained in this process, without Prefect."""
    runs = tmp_path_factory.mktemp("trained")

    def train_run(name: str, **settings: Any) -> Path:
        config = load_config("tiny", {**small, **_SETTINGS, "run": name, "runs": runs, **settings})
        console = Console(io.StringIO(), config.steps)
        with open_directory(config, name) as folder, open_run(config, graph_of(config), folder, console) as run:
            loop.train(run)
        return runs / name

    return train_run


@pytest.fixture(scope="session")
def small_run(trained: Callable[..., Path]) -> Path:
    """The folder of one such run, which nobody may change."""
    return trained("small")


@pytest.fixture(scope="session")
def rollouts() -> Callable[[int, int], pa.Table]:
    """(group, samples) to a table of rollouts: that many completions of one prompt."""

    def rows(group: int, samples: int) -> pa.Table:
        row = {"group": group, "prompt_id": "p", "seed": 1, "prompt_tokens": [group], "finish": "stop", "text": ""}
        tokens = {"tokens": [1, 2], "logprobs": [-0.5, -0.25], "written": [True, True]}
        return pa.Table.from_pylist([{**row, **tokens, "sample": i} for i in range(samples)], schema=ROLLOUTS)

    return rows
