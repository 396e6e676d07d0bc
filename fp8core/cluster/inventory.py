"""Nodes and GPUs of a Ray cluster, by its own account; nothing is placed there."""

from typing import NamedTuple

import ray

from fp8core.cluster.connection import connect
from fp8core.config.section import ClusterConfig

# Ray names the kind of a node's accelerators by a resource of its own.
_KIND = "accelerator_type:"


class ClusterNode(NamedTuple):
    """A node that is alive; `kind` is Ray's name of its GPUs, empty where it has none."""

    address: str
    cpus: int
    gpus: int
    kind: str


class Inventory(NamedTuple):
    """Nodes in the order of their addresses, and what no process has taken."""

    ray: str
    nodes: list[ClusterNode]
    free_cpus: int
    free_gpus: int


def take_inventory(address: str) -> Inventory:
    """The inventory of the cluster at `auto` or HOST:PORT, which `doctor --address` names.

    Raises:
        UserError: nothing answers there, or another version of Ray or Python.
    """
    connect(ClusterConfig(address=address), 1, "--address")
    try:
        nodes = sorted(_node(each["NodeManagerAddress"], each["Resources"]) for each in ray.nodes() if each["Alive"])
        free = ray.available_resources()
    finally:
        ray.shutdown()
    # Ray connects to its own version alone.
    return Inventory(ray.__version__, nodes, int(free.get("CPU", 0)), int(free.get("GPU", 0)))


def _node(address: str, held: dict[str, float]) -> ClusterNode:
    kinds = sorted(name.removeprefix(_KIND) for name in held if name.startswith(_KIND))
    return ClusterNode(address, int(held.get("CPU", 0)), int(held.get("GPU", 0)), ", ".join(kinds))
