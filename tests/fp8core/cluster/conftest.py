"""A Ray cluster of this machine."""

from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Cluster]:
    """A head without places for members, and two nodes with one each."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(wait=False, num_cpus=1)
    # On a busy machine a node may start for longer than the 30 seconds that Ray waits for each.
    cluster.wait_for_nodes(timeout=180)
    yield cluster
    # A question to the cluster leaves its connection, and Ray removes no node that this process is connected to.
    ray.shutdown()
    cluster.shutdown()
