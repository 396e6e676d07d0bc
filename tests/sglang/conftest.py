"""One SGLang for all tests here, on Hopper in an environment of its own (`make env-sglang`)."""

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

collect_ignore_glob = [] if find_spec("sglang") else ["test_*_gpu.py"]
# SGLang's processes import the faulty worker by its name.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def sglang_build() -> Any:
    """The SGLang that is installed, with its environment prepared."""
    from sglang_cases import prepared_build

    return prepared_build()


@pytest.fixture(scope="session")
def started(sglang_build: Any) -> Iterator[Any]:
    """An engine whose worker fails on demand."""
    from sglang_cases import start_engine

    engine = start_engine(sglang_build, worker="faulty_sglang_worker.answer")
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def policies() -> Any:
    """Two policies of one shape."""
    from sglang_cases import two_policies

    return two_policies()


@pytest.fixture
def engine(started: Any, policies: Any) -> Any:
    """The engine, holding policy 0."""
    started.update(policies[0].tensors, policies[0].scales, 0)
    return started
