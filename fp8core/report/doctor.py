"""The parts that this machine can run, how to install what is missing, and what a Ray cluster has."""

import os
import platform
from collections.abc import Callable, Iterator
from importlib.util import find_spec

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

Finding = tuple[str, str, str]
"""Subject, state, and the cure, which is empty when there is nothing to do."""


def examine(address: str | None = None) -> str:
    """The findings as aligned text, with those of the Ray cluster at `address` (`auto` or HOST:PORT).

    Raises UserError: the cluster does not answer, or has another version of Ray or Python; or Ray is not installed.
    """
    # First, since it may be refused.
    cluster = [] if address is None else [*_cluster(address)]
    findings = [*_machine(), *_packages(), *_capabilities(), *cluster]
    width = max(len(subject) for subject, _, _ in findings)
    lines = []
    for subject, state, cure in findings:
        lines.append(f"{subject:<{width}}  {state}".rstrip())
        if cure:
            lines.append(f"{'':<{width}}  -> {cure}")
    return "\n".join(lines)


def _machine() -> Iterator[Finding]:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    yield "python", platform.python_version(), ""
    yield "cpu", f"{os.cpu_count()} cores, {platform.machine()}, {memory:.0f} GiB", ""
    # Imported here, so that a missing or broken torch is a finding too.
    try:
        import torch
    except (ImportError, OSError) as error:
        yield "gpu", f"unknown: torch cannot be imported: {error}", "pip install --force-reinstall torch"
        return
    if not torch.cuda.is_available():
        yield "gpu", "none that torch can use", ""
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        yield f"gpu {i}", f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB", ""


def _cluster(address: str) -> Iterator[Finding]:
    """The cluster and its nodes that are alive, in the order of their addresses."""
    if find_spec("ray") is None:
        raise UserError("--address: Ray is not installed (pip install 'fp8-grpo[ray]')")
    # Ray is optional.
    from fp8core.cluster.connection import connect  # isort: skip

    import ray

    connect(ClusterConfig(address=address), 1, "--address")
    try:
        nodes = [(node["NodeManagerAddress"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
        whole, free = ray.cluster_resources(), ray.available_resources()
    finally:
        ray.shutdown()
    gpus, cpus = (f"{whole.get(name, 0):.0f} {name}s ({free.get(name, 0):.0f} free)" for name in ("GPU", "CPU"))
    yield "cluster", f"Ray {ray.__version__} at {address}, nodes: {len(nodes)}, {gpus}, {cpus}", ""
    for place, resources in sorted(nodes, key=lambda node: (node[0], len(node[1]))):
        kinds = ", ".join(name.removeprefix(_KIND) for name in sorted(resources) if name.startswith(_KIND))
        kind = f" ({kinds})" if kinds else ""
        yield f"node {place}", f"{resources.get('GPU', 0):.0f} GPUs{kind}, {resources.get('CPU', 0):.0f} CPUs", ""


def _packages() -> Iterator[Finding]:
    for name in _BASE:
        version = installed_version(name)
        yield name, version or "missing", "" if version else "pip install fp8-grpo"
    for name, (extra, purpose) in _EXTRAS.items():
        version = installed_version(name)
        cure = "" if version else f"pip install 'fp8-grpo[{extra}]' for {purpose}"
        yield name, version or "not installed (optional)", cure


def _capabilities() -> Iterator[Finding]:
    """The state of each engine and trainer; the errors of these begin with the setting that names them."""
    entries: list[tuple[str, str, str, Callable[[str], EngineEntry | TrainerEntry]]] = [
        *((f"rollout: {name}", f"rollout.engine={name}: ", name, find_entry) for name in ENGINES),
        *((f"training: {name}", f"training.trainer={name}: ", name, find_trainer) for name in TRAINERS),
    ]
    for subject, place, name, find in entries:
        try:
            yield subject, f"ready: {find(name).requirements()}", ""
        except (UserError, ImportError, OSError) as error:
            state, _, cure = str(error).removeprefix(place).partition("; ")
            yield subject, f"not ready: {state}", cure
    yield "first command", "fp8-grpo run tiny", ""
