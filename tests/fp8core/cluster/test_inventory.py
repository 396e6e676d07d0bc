"""A Ray cluster that does not fit a run is refused."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from ray.cluster_utils import Cluster
from ray_nodes import start_cluster

from flows import cli
from fp8core.cluster.member import HostProcess
from fp8core.cluster.worker_group import Handle, check_places
from fp8core.errors import UserError
from fp8core.store.manifest import current_code


@pytest.fixture(scope="module")
def gpus() -> Iterator[Cluster]:
    """A head without places, and a node that says it has two GPUs."""
    cluster = start_cluster({"num_cpus": 0}, {"num_cpus": 3, "num_gpus": 2, "resources": {"accelerator_type:H100": 1}})
    yield cluster
    cluster.shutdown()


def test_a_cluster_that_is_too_small_is_refused_before_a_run_has_a_folder(gpus, capsys, tmp_path):
    settings = (f"cluster.address={gpus.address}", "cluster.engines=4", f"runs={tmp_path / 'runs'}")
    assert cli.main(["run", "tiny", *(flag for setting in settings for flag in ("--set", setting))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(": 4 CPUs are needed, the cluster has 3")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"torch": "2.9.0"}, {"torch": "2.9.1"}, "torch 2.9.1, process 7 on a has 2.9.0"),
        ({"torch": "2.9.0"}, {"torch": "2.9.0", "vllm": "0.11"}, None),
    ],
)
def test_processes_with_other_libraries_are_refused_by_their_names(first, second, said):
    code = current_code()
    members = [
        Handle(None, HostProcess(host, None, pid, code, versions))
        for host, pid, versions in (("c", 6, {}), ("a", 7, first), ("b", 8, second))
    ]
    if said is None:
        check_places(members)
        return
    with pytest.raises(UserError) as refused:
        check_places(members)
    assert str(refused.value) == f"cluster: process 8 on b has {said}"


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
