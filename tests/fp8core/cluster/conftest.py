"""A Ray cluster of this machine."""

from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster
from ray_nodes import start_cluster


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Cluster]:
    """A head without places for members, and two nodes with one each."""
    cluster = start_cluster({"num_cpus": 0}, {"num_cpus": 1}, {"num_cpus": 1})
    yield cluster
    # A question to the cluster leaves its connection, and Ray removes no node that this process is connected to.
    ray.shutdown()
    cluster.shutdown()
