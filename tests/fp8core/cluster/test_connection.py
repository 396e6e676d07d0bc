"""What is said of an address where something else than a Ray cluster listens; a cluster that is busy is not refused."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from ray_nodes import start_cluster

from flows import cli
from fp8core.cluster import connection
from fp8core.config.load import load_config
from fp8core.run.machine import members_node


@pytest.fixture
def silent() -> Iterator[str]:
    """The kernel accepts connections, and nobody answers."""
    with socket.create_server(("", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = start_cluster({"num_cpus": 1})
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(autouse=True)
def not_known_yet(monkeypatch):
    """Where a cluster was found before, it is not looked for again."""
    monkeypatch.setattr(connection, "_joined", None)


def test_a_server_that_stays_silent_is_refused_before_a_run_has_a_folder(silent, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "_STATUS_SECONDS", 1.0)
    settings = (f"cluster.address={silent}", f"runs={tmp_path / 'runs'}")
    assert cli.main(["run", "tiny", *(flag for setting in settings for flag in ("--set", setting))]) == 2
    why = "no Ray head answers there within 1 s"
    assert capsys.readouterr() == ("", f"fp8-grpo: cluster.address={silent}: {why} (--set)\n")
    assert not list(tmp_path.iterdir())


def test_a_cluster_of_our_own_leaves_sigterm_to_the_command():
    """In a process of its own: Ray sets variables for a cluster that it starts, which would reach later tests."""
    program = (
        "import os, signal\n"
        "from fp8core.cluster.connection import connect\n"
        "from fp8core.config.load import load_config\n"
        "signal.signal(signal.SIGTERM, lambda number, frame: os.write(1, b'answered'))\n"
        "connect(load_config('tiny', {'cluster.ranks': 2}).cluster, 1)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (found.stdout, found.returncode) == ("answered", 0), found.stderr


def without_head(*arguments: str) -> float:
    """Seconds until a process was told so, which Ray would end."""
    script, began = Path(__file__).with_name("without_head.py"), time.monotonic()
    found = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=300)
    assert found.stdout.startswith("HeadLost cluster.address="), (found.stdout, found.stderr, time.monotonic() - began)
    assert found.returncode == 0
    return float(found.stdout.split()[-1])


@pytest.mark.slow
def test_a_run_whose_calls_end_soon_is_told_of_its_lost_head():
    assert without_head("0.1", "1") < 60


@pytest.mark.slow
def test_a_node_tells_the_versions_of_further_packages(cluster):
    config = load_config("tiny", {"cluster.address": cluster.address})
    found = connection.ask_node(config.cluster, 1, False, ("pytest",))
    assert found.version("pytest") == pytest.__version__
    assert "pytest" not in members_node(config).packages
    ray.shutdown()
