"""What is said of a process that Ray ended, of one that was killed, and of one that hangs."""

import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import ray
from ray_nodes import start_cluster

from fp8core.cluster.worker_group import WorkerGroup
from fp8core.config.load import load_config
from fp8core.errors import MemberLost, UserError
from fp8core.run.build import open_cluster


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a cluster with places for two processes."""
    cluster = start_cluster({"num_cpus": 2})
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()


@contextmanager
def ranks(address: str, number: int) -> Iterator[WorkerGroup]:
    config = load_config("tiny", {"cluster": {"address": address, "ranks": number}})
    with closing(open_cluster(config)) as cluster:
        yield cluster.workers


def test_a_killed_process_is_not_called_out_of_memory(address):
    """Ray's own message names memory among the causes of any SIGKILL."""
    with ranks(address, 1) as workers:
        os.kill(workers.ranks[0].place.pid, signal.SIGKILL)
        with pytest.raises(MemberLost, match=r"^rank 0 ended: process \d+ on ") as lost:
            workers.gather([workers.ranks[0].send("drop", "nothing")])
    assert "\n" not in str(lost.value)
    assert "memory" not in str(lost.value)
    assert "OOM" not in str(lost.value)


@pytest.mark.slow
def test_a_folder_of_runs_that_a_process_does_not_see_is_refused_by_its_name(address, tmp_path, monkeypatch):
    """Each process sees its own working folder under one name, as nodes that share no volume do."""
    monkeypatch.chdir(tmp_path)
    with ranks(address, 1) as workers:
        workers.check_shared_folder(tmp_path)
        where = rf"process {workers.ranks[0].place.pid} on \S+"
        with pytest.raises(UserError, match=rf"^cluster: {where} does not see /proc/self/cwd; "):
            workers.check_shared_folder(Path("/proc/self/cwd"))
        assert workers.alive
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_process_that_hangs_is_lost_by_its_name_after_the_time_for_an_answer(address):
    with ranks(address, 2) as workers:
        # Processes start within the time of the configuration, which is longer than a test should wait.
        workers._answer_seconds = 2.0
        hung = workers.ranks[1].place
        os.kill(hung.pid, signal.SIGSTOP)
        with pytest.raises(MemberLost) as lost:
            workers.gather([member.send("drop", "nothing") for member in workers.ranks])
        where = f"rank 1: process {hung.pid} on {hung.address}"
        assert str(lost.value) == f"{where} gave no answer within cluster.answer_seconds=2"
        assert not workers.alive
