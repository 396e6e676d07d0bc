"""A process that is killed takes vLLM's with it: nothing keeps the memory that the next run needs."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from conftest import ON_GPU, wait_until_gone

pytestmark = pytest.mark.vllm


@contextmanager
def killed_after(kind: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds an engine of that class; killed when the block ends."""
    program = str(Path(__file__).parent / "engine_parent.py")
    with subprocess.Popen([sys.executable, program, kind], stdout=subprocess.PIPE) as parent:
        try:
            yield parent
        finally:
            parent.kill()


def test_nothing_outlives_a_process_that_is_killed(vllm_build):
    """vLLM's core, and on a CPU its worker."""
    with killed_after("VllmEngine") as parent:
        assert parent.stdout is not None
        while (line := parent.stdout.readline()) != b"running\n":
            assert line, "it ended"
        below = psutil.Process(parent.pid).children(recursive=True)
        assert len(below) >= (1 if ON_GPU else 2)
    wait_until_gone(below)


def test_nothing_outlives_a_process_that_is_killed_while_several_start(vllm_build):
    """The engine's process, a tracker of its resources, and vLLM's."""
    with killed_after("VllmReplicas") as parent:
        deadline = time.monotonic() + 120
        while len(below := psutil.Process(parent.pid).children(recursive=True)) < 3:
            assert time.monotonic() < deadline
            assert parent.poll() is None
            time.sleep(0.1)
    wait_until_gone(below)


def test_a_process_that_has_loaded_the_worker_ends_with_its_parent(vllm_build):
    """On a GPU that is vLLM's core, which ends so while it still starts."""
    program = (
        "import multiprocessing, signal; multiprocessing.get_context('fork').Process(target=lambda: "
        "[__import__('fp8core.rollout.vllm.worker'), print('loaded', flush=True), signal.pause()]).start(); "
        "signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"loaded\n"
        below = psutil.Process(parent.pid).children()
        parent.kill()
    assert len(below) == 1
    wait_until_gone(below)
