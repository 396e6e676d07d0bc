"""A process that is killed takes vLLM's with it: nothing keeps the memory that the next run needs."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import CONTRACT, OPTIONS, SHAPE, wait_until_gone
from generation_cases import build_groups

from fp8core.errors import EngineLost
from fp8core.models.architecture import Architecture
from fp8core.rollout.engine import Sampling

pytestmark = pytest.mark.vllm


@contextmanager
def started_engine(build: Any) -> Iterator[tuple[Any, psutil.Process]]:
    """An engine of its own, and the process of its core."""
    from fp8core.rollout.vllm.engine import VllmEngine

    before = psutil.Process().children()
    engine = VllmEngine(Architecture(**SHAPE), CONTRACT, OPTIONS, 16, build)
    try:
        started = [process for process in psutil.Process().children() if process not in before]
        yield engine, next(process for process in started if "EngineCore" in " ".join(process.cmdline()))
    finally:
        engine.close()


@pytest.mark.parametrize("where", ["here", pytest.param("cluster", marks=pytest.mark.slow)])
def test_nothing_outlives_a_process_that_is_killed(vllm_build, where):
    """vLLM's core, its worker, and the processes of the cluster that hold such."""
    program = str(Path(__file__).parent / "engine_parent.py")
    with subprocess.Popen([sys.executable, program, where], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        while (line := parent.stdout.readline()) != b"running\n":
            assert line, "it ended"
        # Agents of Ray end some seconds later; they hold no GPU.
        found = psutil.Process(parent.pid).children(recursive=True)
        below = [process for process in found if "Agent" not in process.name()]
        parent.kill()
    assert len(below) >= 2
    wait_until_gone(below)


def test_a_worker_that_is_killed_ends_its_core_and_the_generation(vllm_build, policies):
    """In the process that generates; test_vllm_replicas.py kills such a process."""
    with started_engine(vllm_build) as (engine, core):
        (worker,) = (process for process in core.children() if "Worker" in " ".join(process.cmdline()))
        running = _generating(engine, policies)
        worker.kill()
        with pytest.raises(EngineLost, match="vLLM's engine core ended"):
            list(running)
        wait_until_gone([core, worker])


def _generating(engine: Any, policies: Any) -> Any:
    """Many completions of a policy, of which the first have come."""
    engine.update(policies[0].tensors, policies[0].scales, 0)
    running = engine.generate(build_groups(24, 4), Sampling(1.0, 60, frozenset()))
    next(running)
    return running
