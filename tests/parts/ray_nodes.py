"""Nodes of a simulated Ray cluster: a busy machine starts one for longer than the 30 seconds that Ray waits."""

from typing import Any

from ray.cluster_utils import Cluster

_PATIENCE_SECONDS = 180


def start_cluster(head: dict[str, Any], *nodes: dict[str, Any]) -> Cluster:
    """A head, which has no dashboard, and nodes."""
    cluster = Cluster(initialize_head=True, head_node_args={"wait": False, "include_dashboard": False, **head})
    add_nodes(cluster, *nodes)
    return cluster


def add_nodes(cluster: Cluster, *nodes: dict[str, Any]) -> list[Any]:
    """Add nodes and wait until the cluster lists them."""
    added = [cluster.add_node(wait=False, **node) for node in nodes]
    cluster.wait_for_nodes(timeout=_PATIENCE_SECONDS)
    return added
