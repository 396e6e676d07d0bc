"""The connection of this process to a Ray cluster, and what is asked of it before anything is placed."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fp8core.config.capability import Node, this_node
from fp8core.config.cluster import ClusterConfig
from fp8core.errors import HeadLost, UserError, first_line
from fp8core.processes.variables import set_variables

_CONNECT_SECONDS = 5.0
# For the import of Ray and the head of a busy cluster. Ray itself would try for minutes to reach what is none.
_STATUS_SECONDS = 30.0
_POLL_SECONDS = 0.5
# The beginning of the last line of `ray status` where another server answers, or none.
_NO_HEAD = "ray.exceptions.RpcError"

# Ray ends this process so long after its head has gone, and by default after a minute. Our error comes earlier, while
# the caller waits for a member.
_RAY_PATIENCE = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
_HEAD_SECONDS = 5.0
_HEAD_CONNECT_SECONDS = 2.0
_HEAD_FAILURES = 5

# Ray has one connection a process: the address that the last one was made to.
_joined: str | None = None


class Head:
    """The head of a cluster, which may stop to take connections."""

    def __init__(self, address: str | None, place: str) -> None:
        """The cluster's address in the configuration, and HOST:PORT of its head."""
        host, _, port = place.rpartition(":")
        self._named, self._place = address, (host.strip("[]"), int(port))
        self._failures, self._due = 0, 0.0

    def check(self) -> None:
        """Try a connection, every few seconds at most. Raises HeadLost: it failed several times in turn."""
        if time.monotonic() < self._due:
            return
        error = self.silence()
        self._due, self._failures = time.monotonic() + _HEAD_SECONDS, 0 if error is None else self._failures + 1
        if self._failures >= _HEAD_FAILURES:
            assert error is not None, "the last look has failed"
            place = f"cluster.address={self._named}: its head at {':'.join(map(str, self._place))}"
            raise HeadLost(f"{place} does not answer ({first_line(error)}); `fp8-grpo resume` continues the run")

    def silence(self) -> OSError | None:
        """The error of a connection now; None where the head answers."""
        try:
            socket.create_connection(self._place, _HEAD_CONNECT_SECONDS).close()
        except OSError as error:
            return error
        return None


def connect(settings: ClusterConfig, tensor_parallel: int, option: str | None = None) -> None:
    """Connect to the cluster, or start one here; a connection that `ask_node` left serves again.

    `option` of a command is named in errors, where the address comes from there.
    """
    global _joined
    # Its own lines would stand between ours; what ends a member is in our error.
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    own = settings.address is None
    if not own:
        set_variables({}, _RAY_PATIENCE)
    named = f"cluster.address={settings.address}" if option is None else f"{option} {settings.address}"
    if settings.address not in (None, "auto"):
        _refuse_silence(settings.address, named)
    # The address of the last connection was a cluster's: a run that has lost a process goes on sooner.
    if settings.address not in (None, _joined):
        _refuse_others(settings.address, named)
    if ray.is_initialized():
        if not own and settings.address == _joined:
            return
        ray.shutdown()
    # Of a cluster of our own: as many places as are asked for, since none of them computes while others do.
    wanted = sum(settings.bundles(tensor_parallel))
    places: dict[str, Any] = {"num_cpus": max(wanted, os.cpu_count() or 1)} if own else {}
    try:
        with _own_sigterm():
            ray.init(
                address=settings.address or "local",
                include_dashboard=False if own else None,
                log_to_driver=False,
                configure_logging=False,
                **places,
            )
    except Exception as error:
        # Ray raises what its parts do: RPC errors, assertions, RuntimeError.
        raise UserError(f"{named}: {' '.join(str(error).split())[:300]}") from error
    _joined = settings.address


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep this process's answer to SIGTERM: Ray replaces it, and would end the process with code 1.

    A signal that comes before Ray has done so is answered at the end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        for number in came[:1]:
            signal.raise_signal(number)


def _refuse_silence(address: str, named: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"{named}: nothing answers there ({first_line(error)})") from error


def _refuse_others(address: str, named: str) -> None:
    """Raises UserError: `ray status` finds no head of a cluster at an address.

    Another failure of it (versions differ, a token is wanted) is told better by `ray.init`.
    """
    command = [str(Path(sys.executable).with_name("ray")), "status", "--address", address]
    try:
        asked = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_STATUS_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{named}: no Ray head answers there within {_STATUS_SECONDS:g} s") from error
    if asked.returncode != 0 and last_line(asked.stderr).startswith(_NO_HEAD):
        raise UserError(f"{named}: no Ray head answers there")


def ask_node(settings: ClusterConfig, tensor_parallel: int, wants_gpus: bool, packages: tuple[str, ...] = ()) -> Node:
    """The machine of members of a cluster, as one of its nodes describes itself (`this_node`); nothing is placed.

    The connection stays for the next question, and for the gang that follows.

    Raises:
        UserError: as `Gang` has it for a cluster that cannot be used or is too small; or none of them answered.
    """
    connect(settings, tensor_parallel)
    try:
        unit, held = checked_size(settings, tensor_parallel, wants_gpus)
        context = ray.get_runtime_context()
        found = _told(context.gcs_address, context.get_job_id(), unit, settings.start_seconds, packages)
    except BaseException:
        ray.shutdown()
        raise
    return replace(found, gpus=held) if found.gpus else found


# A connection has its own job.
@lru_cache(maxsize=1)
def _told(cluster: str, job: str, unit: str, seconds: float, packages: tuple[str, ...]) -> Node:
    able = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get(unit, 0) >= 1]
    node = min(able, key=lambda node: (node["NodeManagerAddress"], node["NodeID"]))
    # It takes no place, so that others may compute meanwhile, and sees every GPU. Its process is no member later,
    # whose libraries must find another environment. Ray would start one that it ended for want of memory forever.
    ask: Any = ray.remote(max_calls=1, max_retries=0, num_cpus=0)(this_node).options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    )
    try:
        found: Node = ray.get(ask.remote(packages), timeout=seconds)
    except RayTaskError as error:
        why = last_line(str(error))
        raise UserError(f"cluster: {node['NodeManagerAddress']} cannot run this program: {why}") from error
    except RayError as error:
        raise UserError(f"cluster: {node['NodeManagerAddress']}: {first_line(error)}") from error
    return found


def checked_size(settings: ClusterConfig, tensor_parallel: int, wants_gpus: bool) -> tuple[str, int]:
    """The resource that members take, `GPU` or `CPU`, and its amount in the cluster."""
    resources = ray.cluster_resources()
    unit = "GPU" if wants_gpus and "GPU" in resources else "CPU"
    held = int(resources.get(unit, 0))
    if held < sum(settings.bundles(tensor_parallel)):
        raise UserError(settings.too_small(tensor_parallel, unit, f"the cluster has {held}"))
    return unit, held


def await_size(settings: ClusterConfig, tensor_parallel: int, unit: str) -> None:
    """Wait until the cluster has enough of a resource: a node that was lost may come back.

    Raises UserError: it does not suffice within `start_seconds`.
    """
    deadline = time.monotonic() + settings.start_seconds
    while (held := int(ray.cluster_resources().get(unit, 0))) < sum(settings.bundles(tensor_parallel)):
        if time.monotonic() > deadline:
            late = f"the cluster has {held} after cluster.start_seconds={settings.start_seconds:g}"
            raise UserError(settings.too_small(tensor_parallel, unit, late))
        time.sleep(_POLL_SECONDS)


def last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]
