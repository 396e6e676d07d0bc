"""The connection of this process to a Ray cluster, and what is asked of it before anything is placed."""

import logging
import os
import signal
import socket
import threading
from dataclasses import replace
from functools import lru_cache
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fp8core.config.capability import Node, this_node
from fp8core.config.cluster import ClusterConfig
from fp8core.errors import UserError, first_line

_CONNECT_SECONDS = 5.0

# Ray has one connection a process: the address that the last one was made to.
_address: str | None = None


def connect(settings: ClusterConfig, tensor_parallel: int) -> None:
    """Connect to the cluster, or start one here; a connection that `ask_node` left serves again."""
    global _address
    # Its own lines would stand between ours; what ends a member is in our error.
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    own = settings.address is None
    setting = f"cluster.address={settings.address}"
    if settings.address not in (None, "auto"):
        _check_server(settings.address, setting)
    if ray.is_initialized():
        if not own and settings.address == _address:
            return
        ray.shutdown()
    # A cluster of our own has as many places as the settings ask for: members compute one after another.
    members = sum(settings.bundles(tensor_parallel))
    places: dict[str, Any] = {"num_cpus": max(members, os.cpu_count() or 1)} if own else {}
    # Ray replaces the answer to SIGTERM, and would end the process with code 1.
    sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=settings.address or "local",
            include_dashboard=False if own else None,
            log_to_driver=False,
            configure_logging=False,
            **places,
        )
    except Exception as error:
        # Ray raises what its parts do: RPC errors, assertions, RuntimeError.
        raise UserError(f"{setting}: {' '.join(str(error).split())[:300]}") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, sigterm)
    _address = settings.address


def _check_server(address: str, setting: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"{setting}: nothing answers there ({first_line(error)})") from error


def ask_node(settings: ClusterConfig, tensor_parallel: int, wants_gpus: bool, packages: tuple[str, ...] = ()) -> Node:
    """The machine of members of a cluster, as one of its nodes describes itself. Raises UserError: it does not."""
    connect(settings, tensor_parallel)
    try:
        unit, total = checked_size(settings, tensor_parallel, wants_gpus)
        context = ray.get_runtime_context()
        node = _find_node(context.gcs_address, context.get_job_id(), unit, settings.start_seconds, packages)
    except BaseException:
        ray.shutdown()
        raise
    return replace(node, gpus=total) if node.gpus else node


# A connection has its own job.
@lru_cache(maxsize=1)
def _find_node(cluster: str, job: str, unit: str, seconds: float, packages: tuple[str, ...]) -> Node:
    able = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get(unit, 0) >= 1]
    node = min(able, key=lambda node: (node["NodeManagerAddress"], node["NodeID"]))
    # It takes no place, so that others may compute meanwhile, and sees every GPU. Its process is no member later,
    # whose libraries must find another environment. Ray would start one that it ended for want of memory forever.
    ask: Any = ray.remote(max_calls=1, max_retries=0, num_cpus=0)(this_node).options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    )
    try:
        machine: Node = ray.get(ask.remote(packages), timeout=seconds)
    except RayError as error:
        why = last_line(str(error)) if isinstance(error, RayTaskError) else first_line(error)
        raise UserError(f"cluster: {node['NodeManagerAddress']} cannot run this program: {why}") from error
    return machine


def checked_size(settings: ClusterConfig, tensor_parallel: int, wants_gpus: bool) -> tuple[str, int]:
    """The resource that members take, `GPU` or `CPU`, and its amount in the cluster."""
    resources = ray.cluster_resources()
    unit = "GPU" if wants_gpus and "GPU" in resources else "CPU"
    total = int(resources.get(unit, 0))
    if total < sum(settings.bundles(tensor_parallel)):
        raise UserError(settings.too_small(tensor_parallel, unit, f"the cluster has {total}"))
    return unit, total


def last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]
