"""Chains of processes whose last one follows another, as vLLM's do; that vLLM's do is in tests/vllm."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from waiting import wait_for

# Every process starts the next one, and says that it is there.
_PROGRAM = """
import multiprocessing, os, signal, sys
from fp8core.processes.end_with_parent import follow, follow_parent

def live(method, length, pid):
    if length == 1:
        follow(pid) if pid else follow_parent()
    print(os.getpid(), flush=True)
    if length > 1:
        multiprocessing.get_context(method).Process(target=live, args=(method, length - 1, pid)).start()
    signal.pause()

if __name__ == "__main__":
    method, length, pid = sys.argv[1:]
    live(method, int(length), os.getpid() if pid == "first" else int(pid))
"""
Chain = list[psutil.Process]
StartChain = Callable[[str, int, str], Chain]


@pytest.fixture
def start_chain(tmp_path: Path) -> Iterator[StartChain]:
    """Starts so many processes with a method of multiprocessing, of which the last follows a pid; "0" for its parent,
    "first" for the first of them."""
    program, started, chain = tmp_path / "program.py", list[subprocess.Popen[str]](), Chain()
    program.write_text(_PROGRAM)

    def start(method: str, length: int, pid: str) -> Chain:
        command = [sys.executable, str(program), method, str(length), pid]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        lines = started[-1].stdout
        assert lines is not None
        chain.extend(psutil.Process(int(lines.readline())) for _ in range(length))
        return chain

    yield start
    for process in chain:
        if process.is_running():
            process.kill()
    for first in started:
        first.communicate()


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_process_ends_with_its_parent(start_chain: StartChain, method: str) -> None:
    parent, last = start_chain(method, 2, "0")
    parent.kill()
    wait_for(lambda: not is_there(last))


def test_only_the_parent_matters_to_who_follows_it(start_chain: StartChain) -> None:
    first, between, last = start_chain("spawn", 3, "0")
    first.kill()
    first.wait()
    time.sleep(0.5)
    assert is_there(between)
    assert is_there(last)
    between.kill()
    wait_for(lambda: not is_there(last))


def test_what_stands_between_ends_too(start_chain: StartChain) -> None:
    first, between, last = start_chain("spawn", 3, "first")
    first.kill()
    wait_for(lambda: not is_there(between) and not is_there(last))


def is_there(process: psutil.Process) -> bool:
    """Nobody asks for the exit code of one that ended."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
