"""One SGLang for all tests here, on Hopper in an environment of its own (`make env-sglang`).

Cases that tests/vllm and tests/gpu have of vLLM, and that are none of SGLang here:

- models with experts (test_vllm_moe.py): they are refused;
- layers that processes share (test_vllm_tensor_parallel.py): an engine has one GPU;
- engines of a cluster (test_vllm_replicas.py, in both folders): no environment of SGLang has Ray;
- rounding points, operation by operation: SGLang's model has its own, and the aligned one equals training bit by bit;
- aligned models on a CPU, and trainings of the tiny model: of vLLM they run on a CPU alone, where SGLang does not;
- a turn that draws other numbers than a first request: SGLang draws by the place of a token, which a case here holds.
"""

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
    from sglang_cases import start_engine

    engine = start_engine(sglang_build, worker="faulty_sglang_worker.answer")
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def policies() -> Any:
    from sglang_cases import two_policies

    return two_policies()


@pytest.fixture
def engine(started: Any, policies: Any) -> Any:
    started.update(policies[0].tensors, policies[0].scales, 0)
    return started
