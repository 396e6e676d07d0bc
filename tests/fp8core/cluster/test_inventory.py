"""What `doctor --address` says of a Ray cluster."""

from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster

from flows import cli


@pytest.fixture(scope="module")
def gpus() -> Iterator[Cluster]:
    """A head without places, and a node that says it has two GPUs."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    cluster.add_node(num_cpus=3, num_gpus=2, resources={"accelerator_type:H100": 1})
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


def test_doctor_says_what_a_cluster_has(gpus, capsys):
    assert cli.main(["doctor", "--address", gpus.address]) == 0
    lines = capsys.readouterr().out.splitlines()
    (found,) = (line.split(maxsplit=1)[1] for line in lines if line.startswith("cluster "))
    held = "nodes: 2, 2 GPUs (2 free), 3 CPUs (3 free)"
    assert found == f"Ray {ray.__version__} at {gpus.address}, {held}"
    nodes = [line.split(maxsplit=2)[2] for line in lines if line.startswith("node ")]
    assert sorted(nodes) == ["0 GPUs, 0 CPUs", "2 GPUs (H100), 3 CPUs"]
    assert not ray.is_initialized()
