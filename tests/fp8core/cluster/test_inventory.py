"""Processes of a Ray cluster that do not fit a run are refused, and signals of a run stay with the command."""

import subprocess
import sys

import pytest

from fp8core.cluster.member import HostProcess
from fp8core.cluster.worker_group import Handle, check_places
from fp8core.errors import UserError
from fp8core.store.manifest import current_code


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
