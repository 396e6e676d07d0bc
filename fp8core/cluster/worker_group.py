"""The processes of a run on a Ray cluster: placed together, called together, ended together.

Nothing restarts by itself. A process, GPU or node that is gone is one error, and the caller replaces the whole group.
"""

import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import ray
import torch
from ray.exceptions import ActorHandleNotFoundError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed import DistBackendError, DistNetworkError

from fp8core.cluster.connection import checked_size, connect, last_line
from fp8core.cluster.member import HostProcess, Member
from fp8core.config.capability import Environment
from fp8core.config.cluster import ClusterConfig
from fp8core.errors import EngineLost, MemberLost, UserError, first_line
from fp8core.store.manifest import current_code

# A member that failed leaves others in a collective, which they would not leave by themselves.
_PATIENCE_SECONDS = 10.0


class MemberError(RuntimeError):
    """The code of a process raised; the message names the process and holds its traceback."""


class Call(NamedTuple):
    member: "Handle"
    ref: Any


class Handle:
    def __init__(self, actor: Any, place: HostProcess) -> None:
        self.actor = actor
        self.place = place
        self.name = ""

    def send(self, method: str, *arguments: Any) -> Call:
        return Call(self, getattr(self.actor, method).remote(*arguments))


class WorkerGroup:
    """Engines and trainer ranks of one run, each a member, in the order of their GPUs.

    Colocated, rank i is on the GPU of engine i. `unit`: the resource that they take, `GPU` or `CPU`.
    """

    def __init__(
        self,
        settings: ClusterConfig,
        tensor_parallel: int,
        wants_gpus: bool,
        environment: Environment,
        threads: int,
        unit: str | None = None,
    ) -> None:
        """Connect to the cluster, or start one here, and place the members, engines with so many GPUs each.

        `unit`: that of a group that was lost, whose nodes may come back while the members wait for their places.

        Raises UserError: nothing answers, too few GPUs are free in time, a node has other code, or a process ended.
        """
        self._group: Any = None
        self._all: list[Handle] = []
        self._answer_seconds = settings.answer_seconds
        self._ended_by: Exception | None = None
        self._order = threading.Lock()
        connect(settings, tensor_parallel)
        arguments = dict(environment.required), dict(environment.suggested), threads, sys.path
        try:
            self.unit: str = unit or checked_size(settings, tensor_parallel, wants_gpus)[0]
            self._place(settings, tensor_parallel, arguments)
        except BaseException:
            self.close()
            raise

    def places(self) -> dict[str, dict[str, str | int | None]]:
        fields = ("address", "gpu", "pid")
        return {member.name: {key: vars(member.place)[key] for key in fields} for member in self._all}

    def call_all(self, members: Sequence[Handle], method: str, *arguments: Any) -> list[Any]:
        """The answers of some members to one call. All ranks get calls in one order, as their collectives pair."""
        with self._order:
            calls = [member.send(method, *arguments) for member in members]
        return self.gather(calls)

    def gather(self, calls: Sequence[Call]) -> list[Any]:
        """The values of the calls, in their order. After an error no member can be used any more.

        Raises MemberLost: a process ended, or gave no answer in time; MemberFailed: its code raised; or an error for
        people, as the member raised it.
        """
        results = dict[Any, Any]()
        failures = list[Exception]()
        pending = {call.ref: call.member for call in calls}
        while pending:
            if not failures:
                ref = self.next_result(pending)
            elif ready := ray.wait(list(pending), num_returns=1, timeout=_PATIENCE_SECONDS)[0]:
                (ref,) = ready
            else:
                break
            try:
                results[ref] = self.value(pending.pop(ref), ref)
            except Exception as error:
                if isinstance(error, MemberLost):
                    # Earlier errors of others are consequences of it.
                    self._end_members(error)
                    raise
                failures.append(error)
        if failures:
            self._end_members(failures[0])
            raise failures[0]
        return [results[call.ref] for call in calls]

    def next_result(self, pending: Mapping[Any, Handle]) -> Any:
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=self._answer_seconds)
        if ready:
            return ready[0]
        silent = dict.fromkeys(f"{member.name}: {_where(member)}" for member in pending.values())
        loss = MemberLost(f"{', '.join(silent)} gave no answer within cluster.answer_seconds={self._answer_seconds:g}")
        self._end_members(loss)
        raise loss

    def value(self, member: Handle, ref: Any) -> Any:
        try:
            return ray.get(ref)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, EngineLost | torch.AcceleratorError | DistBackendError | DistNetworkError):
                raise MemberLost(f"{member.name}: {_where(member)}: {first_line(cause)}") from None
            # Errors of ours, and those of files, are for people or for callers; others of libraries are not expected.
            files = isinstance(cause, OSError) and not isinstance(cause, ConnectionError)
            if type(cause).__module__.startswith("fp8core.") or isinstance(cause, ValueError) or files:
                raise cause from None
            text = str(error).strip()
            raise MemberError(f"{member.name} failed: {last_line(text)}\n{text}") from None
        except RayActorError as error:
            if self._ended_by is not None:
                raise self._ended_by from None
            raise MemberLost(f"{member.name} ended: {_where(member)}: {_reason(error)}") from None
        except RayError as error:
            raise MemberLost(f"{member.name}: {_where(member)}: {first_line(error)}") from None

    def check_shared_folder(self, folder: Path) -> None:
        """Raises UserError: a member does not see what this process writes into the folder of a run."""
        # A file that a killed process leaves goes with its other temporary files (`durable.sweep`).
        probe = folder / f".shared.{uuid4().hex}.tmp"
        probe.touch()
        try:
            sightings = self.call_all(self._all, "sees", str(probe))
        finally:
            probe.unlink()
        for member, sees_folder in zip(self._all, sightings, strict=True):
            if not sees_folder:
                raise UserError(f"cluster: {_where(member)} does not see {folder}; all nodes must share `runs`")

    @property
    def alive(self) -> bool:
        return bool(self._all)

    def close(self) -> None:
        if ray.is_initialized():
            self._end_members()
            if self._group is not None:
                remove_placement_group(self._group)
        self._all = []
        self._group = None
        ray.shutdown()

    def _place(self, settings: ClusterConfig, tensor_parallel: int, arguments: tuple[Any, ...]) -> None:
        unit = self.unit
        bundles = settings.bundles(tensor_parallel)
        requests = [{"CPU": float(size), **({"GPU": float(size)} if unit == "GPU" else {})} for size in bundles]
        self._group = placement_group(requests, strategy="PACK")
        if not self._group.wait(settings.start_seconds):
            total = int(ray.cluster_resources().get(unit, 0))
            free = int(ray.available_resources().get(unit, 0))
            host = f", {tensor_parallel} of them on one host" if tensor_parallel > 1 else ""
            raise UserError(
                f"cluster: {sum(bundles)} {unit}s{host} were not free within cluster.start_seconds="
                f"{settings.start_seconds:g}: the cluster has {total}, of which {free} are free"
            )
        # Two have room in a bundle where engines and ranks are colocated.
        share = 0.5 if settings.placement == "colocated" else 1.0
        sizes = {i: size * share for i, size in enumerate(bundles)}
        first = self._start(sizes, unit, arguments)
        # Bundles of one size stand for each other.
        order = sorted(sizes, key=lambda bundle: (sizes[bundle], _rank_of(first[bundle].place)))
        members = [first[bundle] for bundle in order]
        if settings.placement == "separate":
            self.ranks = members[: settings.ranks]
            self.engines = members[settings.ranks :]
        else:
            shared_bundles = order[: min(settings.engines, settings.ranks)]
            others = self._start({bundle: sizes[bundle] for bundle in shared_bundles}, unit, arguments)
            fewer = [others[bundle] for bundle in shared_bundles]
            self.ranks, self.engines = (members, fewer) if settings.ranks >= settings.engines else (fewer, members)
        for role, handles in (("rank", self.ranks), ("engine", self.engines)):
            for i, member in enumerate(handles):
                member.name = f"{role} {i}"
        check_places(self._all)

    def _start(self, sizes: Mapping[int, float], unit: str, arguments: tuple[Any, ...]) -> dict[int, Handle]:
        remote: Any = ray.remote(Member)
        actors = {
            bundle: remote.options(
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, bundle),
                num_cpus=size,
                num_gpus=size if unit == "GPU" else None,
            ).remote(*arguments)
            for bundle, size in sizes.items()
        }
        try:
            places = ray.get([actor.place.remote() for actor in actors.values()], timeout=self._answer_seconds)
        except RayTaskError as error:
            raise UserError(f"cluster: a node cannot run this program: {last_line(str(error.cause))}") from error
        except RayError as error:
            raise UserError(f"cluster: a process did not start: {_reason(error)}") from error
        handles = {bundle: Handle(actors[bundle], place) for bundle, place in zip(actors, places, strict=True)}
        self._all += handles.values()
        return handles

    def _end_members(self, reason: Exception | None = None) -> None:
        # Other threads may wait for them, and see no more than their end.
        self._ended_by = self._ended_by or reason
        for member in self._all:
            # Members end with their session, which another group may have closed; Ray would begin a new one here.
            if ray.is_initialized():
                with suppress(ActorHandleNotFoundError):
                    ray.kill(member.actor)
        self._all = []


def check_places(members: Sequence[Handle]) -> None:
    """Raises UserError: a member has other code or another library than this process or a member."""
    holders = {"code": ("this process", current_code()[:12])}
    for member in members:
        for what, has in {"code": member.place.code[:12], **member.place.versions}.items():
            other, theirs = holders.setdefault(what, (_where(member), has))
            if has != theirs:
                raise UserError(f"cluster: {_where(member)} has {what} {has}, {other} has {theirs}")


def _rank_of(place: HostProcess) -> tuple[str, int, str, int]:
    """Sorts members by address and number (or UUID) of their GPU, so that ranks do not move between starts."""
    gpu = place.gpu or ""
    return place.address, len(gpu), gpu, place.pid


def _where(member: Handle) -> str:
    gpu = "" if member.place.gpu is None else f", GPU {member.place.gpu}"
    return f"process {member.place.pid} on {member.place.address}{gpu}"


def _reason(error: Exception) -> str:
    """The line of Ray's message with the reason of an actor's end."""
    lines = [line.strip() for line in str(error).splitlines()]
    detail = next((line for line in lines if "exit detail" in line or "dead because" in line), lines[0])
    return detail.partition("Some common causes")[0].strip()
