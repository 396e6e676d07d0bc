"""The connection of this process to a Ray cluster, and what is asked of it before anything is placed."""

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayError, TaskUnschedulableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fp8core.config.capability import Node, this_node
from fp8core.config.cluster import ClusterConfig
from fp8core.errors import HeadLost, UserError, first_line
from fp8core.processes.variables import set_variables, variables

_CONNECT_SECONDS = 5.0
# For the head of a busy cluster. Ray itself would try for minutes to reach what is none.
_STATUS_SECONDS = 10.0
_POLL_SECONDS = 0.5
# The import of Ray takes long on a busy machine, whatever the head does.
_IMPORT_SECONDS = 60.0
# `ray status`, with the address of its request on a line before. Neither module is documented (Ray 2.60), but
# no public command shows when its request begins, nor the address behind `auto`.
_STATUS = """\
import sys
from ray._private.services import canonicalize_bootstrap_address as found
from ray.scripts.scripts import main
print(found(sys.argv[-1]), flush=True)
main()
"""
# The beginning of its last line for an answer of another server, or for none.
_NO_HEAD = "ray.exceptions.RpcError"

# Ray ends this process so long after its head has gone, and by default after a minute. Our error comes earlier, at
# the next call of a member, which a slow verifier may hold back.
_RAY_PATIENCE = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
_HEAD_SECONDS = 5.0
_HEAD_CONNECT_SECONDS = 2.0
_HEAD_FAILURES = 5

# Ray has one connection a process: the address that the last one was made to.
_joined: str | None = None


class HeadWatch:
    """Looks whether the head of a cluster still takes connections."""

    def __init__(self, address: str | None, head: str) -> None:
        """The cluster's address in the configuration, and HOST:PORT of its head."""
        host, _, port = head.rpartition(":")
        self._named, self._place = address, (host.strip("[]"), int(port))
        self._failures, self._lost = 0, False
        self._error: OSError | None = None
        self._ended = threading.Event()

    def begin(self) -> None:
        """Look every few seconds beside the caller, who may make no call for minutes."""
        threading.Thread(target=self._watch, daemon=True, name="head watch").start()

    def end(self) -> None:
        """Look no more; a second call does nothing."""
        self._ended.set()

    def look(self) -> None:
        """Try a connection. The head is lost after several failures in turn."""
        self._error = self.silence()
        self._failures = 0 if self._error is None else self._failures + 1
        self._lost = self._failures >= _HEAD_FAILURES

    def check(self) -> None:
        """Raises HeadLost: the head was found lost."""
        if self._lost:
            assert self._error is not None, "the last look has failed"
            place = f"cluster.address={self._named}: its head at {':'.join(map(str, self._place))}"
            why = f"does not answer ({first_line(self._error)}); `fp8-grpo resume` continues the run"
            raise HeadLost(f"{place} {why}") from self._error

    def _watch(self) -> None:
        while not self._lost and not self._ended.wait(_HEAD_SECONDS):
            self.look()

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
    command = [sys.executable, "-P", "-c", _STATUS, "status", "--address", address]
    asked_at = ""
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said) as asked,
    ):
        assert asked.stdout is not None
        try:
            if not select.select([asked.stdout], [], [], _IMPORT_SECONDS)[0]:
                raise UserError(f"{named}: `ray status` has not begun within {_IMPORT_SECONDS:g} s; is Ray whole?")
            asked_at = asked.stdout.readline().decode(errors="replace").strip()
            asked.communicate(timeout=_STATUS_SECONDS)
        except subprocess.TimeoutExpired:
            why = f"it did not answer as a Ray head within {_STATUS_SECONDS:g} s"
        else:
            said.seek(0)
            # Other servers of Ray know no such request.
            if asked.returncode == 0 or not last_line(said.read().decode(errors="replace")).startswith(_NO_HEAD):
                return
            why = "it did not answer `ray status` as a Ray head"
        finally:
            asked.kill()
    if address == "auto":
        # Perhaps of a head that has crashed, and is still the last one that was started here.
        origin = " (RAY_ADDRESS)" if variables().get("RAY_ADDRESS") else ""
        why = f"no running cluster answers; {asked_at}{origin} was tried"
    raise UserError(f"{named}: {why}")


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
    gone = None
    for node in sorted(able, key=lambda node: (node["NodeManagerAddress"], node["NodeID"])):
        # It takes no place, so that others may compute meanwhile, and sees every GPU. Its process is no member later,
        # whose libraries must find another environment. Ray would start one that it ended for want of memory forever.
        ask: Any = ray.remote(max_calls=1, max_retries=0, num_cpus=0)(this_node).options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        )
        where = f"cluster: {node['NodeManagerAddress']}"
        try:
            found: Node = ray.get(ask.remote(packages), timeout=seconds)
        except (TaskUnschedulableError, NodeDiedError) as error:
            # It has ended: Ray lists it until some heartbeats are missing.
            gone = UserError(f"{where} is gone: {first_line(error)}")
            continue
        except OutOfMemoryError as error:
            gone = UserError(f"{where} has no memory left: {first_line(error)}")
            continue
        except RayError as error:
            raise UserError(f"{where} cannot run this program: {last_line(str(error))}") from error
        return found
    assert gone is not None, "the size was checked: there was a node"
    raise gone


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
