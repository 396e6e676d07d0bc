"""The parts that this machine can run, how to install what is missing, and what a Ray cluster has."""

import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

from fp8core.config.cluster import ClusterConfig
from fp8core.config.shipped import ENGINES
from fp8core.errors import UserError
from fp8core.rollout.registry import EngineEntry, find_entry
from fp8core.store.manifest import installed_version
from fp8core.training.registry import TRAINERS, TrainerEntry, find_trainer

_BASE = ("torch", "prefect", "mlflow", "pyarrow", "safetensors", "pydantic", "tokenizers", "numpy")
# Engines and trainers say themselves what they need, in `requirements` of their entries.
_EXTRAS = {
    "nvidia-cudnn-frontend": ("vllm", "a faster backward of attention on Hopper"),
    "ray": ("ray", "several engines and ranks, on one machine or many"),
    "math-verify": ("math", "verifier for mathematical expressions"),
    "datasets": ("datasets", "Hugging Face datasets by name"),
    "verifiers": ("verifiers", "environments of that library"),
}


# Ray names the kind of a node's accelerators by a resource of its own.
_KIND = "accelerator_type:"


@dataclass(frozen=True)
class Finding:
    """One line of the examination; `cure` is empty when there is nothing to do."""

    subject: str
    state: str
    cure: str = ""


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


def examine(address: str | None = None) -> str:
    """The findings as aligned text, with those of the Ray cluster at `address` (`auto` or HOST:PORT).

    Raises:
        UserError: the cluster does not answer, or has another version of Ray or Python; or Ray is not installed here.
    """
    # First, since it may be refused.
    cluster = [] if address is None else [*_cluster(address)]
    findings = [*_machine(), *_packages(), *_capabilities(), *cluster]
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.subject:<{width}}  {finding.state}".rstrip())
        if finding.cure:
            lines.append(f"{'':<{width}}  -> {finding.cure}")
    return "\n".join(lines)


def _machine() -> Iterator[Finding]:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    yield Finding("python", platform.python_version())
    yield Finding("cpu", f"{os.cpu_count()} cores, {platform.machine()}, {memory:.0f} GiB")
    yield from _gpus()


def _gpus() -> Iterator[Finding]:
    # Imported here, so that a missing or broken torch is a finding too.
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("gpu", f"unknown: torch cannot be imported: {error}", "pip install --force-reinstall torch")
        return
    if not torch.cuda.is_available():
        yield Finding("gpu", "none that torch can use")
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        size = torch.cuda.get_device_properties(i).total_memory / 2**30
        yield Finding(f"gpu {i}", f"{torch.cuda.get_device_name(i)}, sm_{major}{minor}, {size:.0f} GiB")


def _cluster(address: str) -> Iterator[Finding]:
    if find_spec("ray") is None:
        raise UserError("--address: Ray is not installed (pip install 'fp8-grpo[ray]')")
    found = take_inventory(address)
    cpus, gpus = sum(node.cpus for node in found.nodes), sum(node.gpus for node in found.nodes)
    held = f"{gpus} GPUs ({found.free_gpus} free), {cpus} CPUs ({found.free_cpus} free)"
    yield Finding("cluster", f"Ray {found.ray} at {address}, nodes: {len(found.nodes)}, {held}")
    for node in found.nodes:
        kind = f" ({node.kind})" if node.kind else ""
        yield Finding(f"node {node.address}", f"{node.gpus} GPUs{kind}, {node.cpus} CPUs")


def take_inventory(address: str) -> Inventory:
    """The inventory of the cluster at `auto` or HOST:PORT, which `doctor --address` names.

    Raises UserError: nothing answers there, or another version of Ray or Python.
    """
    # Ray is optional.
    from fp8core.cluster.connection import connect  # isort: skip

    import ray

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


def _packages() -> Iterator[Finding]:
    for name in _BASE:
        version = installed_version(name)
        yield Finding(name, version or "missing", "" if version else "pip install fp8-grpo")
    for name, (extra, purpose) in _EXTRAS.items():
        version = installed_version(name)
        cure = "" if version else f"pip install 'fp8-grpo[{extra}]' for {purpose}"
        yield Finding(name, version or "not installed (optional)", cure)


def _capabilities() -> Iterator[Finding]:
    for name in ENGINES:
        yield _capability(f"rollout: {name}", f"rollout.engine={name}: ", partial(find_entry, name))
    for name in TRAINERS:
        yield _capability(f"training: {name}", f"training.trainer={name}: ", partial(find_trainer, name))
    yield Finding("first command", "fp8-grpo run tiny")


def _capability(subject: str, place: str, find: Callable[[], EngineEntry | TrainerEntry]) -> Finding:
    """The state of an engine or a trainer; its errors begin with `place`."""
    try:
        return Finding(subject, f"ready: {find().requirements()}")
    except (UserError, ImportError, OSError) as error:
        state, _, cure = str(error).removeprefix(place).partition("; ")
        return Finding(subject, f"not ready: {state}", cure)
