"""The body of a Ray actor: a process that holds parts of a run, each under a key, and calls their methods by name.

Nothing heavy is imported here. A member sets its environment first; torch reads it in `Member.place`, vLLM and
Transformer Engine when a part is built.
"""

import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fp8core.processes.variables import set_variables

# Distributions that trainers compute with; a process has some of them. Engines describe themselves at every sync.
_LIBRARIES = ("torch", "triton", "transformer-engine", "megatron-core")
# Ray names the kind of a node's accelerators by a resource of its own.
_KIND = "accelerator_type:"


@dataclass(frozen=True)
class HostProcess:
    """Where a member runs.

    Attributes:
        gpu: id of its GPU on the node; None on a CPU.
        code: digest of the sources that it computes with.
        processor: `numerics.elementwise.processor_digest`.
        kind: Ray's name of its node's GPUs; None on a CPU, and where Ray has none.
        versions: of the libraries that compute, as far as they are installed.
    """

    address: str
    gpu: str | None
    pid: int
    python: str
    code: str
    processor: str
    kind: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


class Member:
    """Holds parts, and answers calls one after another, in its main thread."""

    def __init__(
        self, required: Mapping[str, str], suggested: Mapping[str, str], threads: int, folders: Sequence[str]
    ) -> None:
        set_variables(required, suggested)
        # Modules of the user's own are found where the caller finds them.
        sys.path += [folder for folder in folders if folder not in sys.path]
        self._parts: dict[str, Any] = {}
        self._threads = threads
        self._items: Iterator[Any] = iter(())

    def place(self) -> HostProcess:
        import ray

        from fp8core.numerics.elementwise import processor_digest
        from fp8core.store.manifest import current_code, installed_version

        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        # torch would begin CUDA here to name a GPU, and an engine forks its own processes without it.
        held = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == context.get_node_id())
        kinds = ", ".join(sorted(name.removeprefix(_KIND) for name in held if name.startswith(_KIND)))
        versions = {name: installed_version(name) for name in _LIBRARIES}
        return HostProcess(
            address=ray.util.get_node_ip_address(),
            gpu=gpus[0] if gpus else None,
            pid=os.getpid(),
            python=platform.python_version(),
            code=current_code(),
            processor=processor_digest(),
            kind=kinds if gpus and kinds else None,
            versions={name: version for name, version in versions.items() if version is not None},
        )

    def sees(self, path: str) -> bool:
        """True if a file exists for this process."""
        return os.path.exists(path)

    def build(self, key: str, build: Callable[..., Any], uses: Sequence[str], *arguments: Any) -> None:
        """Make a part by a function or class of a module, from other parts and further arguments."""
        import torch

        from fp8core.freed_memory import keep_freed_memory

        torch.set_num_threads(self._threads)
        if not torch.cuda.is_available():
            keep_freed_memory()
        self._parts[key] = build(*(self._parts[part] for part in uses), *arguments)

    def call(self, key: str, method: str, *arguments: Any) -> Any:
        return getattr(self._parts[key], method)(*arguments)

    def hand(self, key: str, method: str, part: str, *arguments: Any) -> Any:
        """A method of a part, called with another part and further arguments."""
        return getattr(self._parts[key], method)(self._parts[part], *arguments)

    def begin(self, key: str, method: str, *arguments: Any) -> None:
        """Start a generator of a part, which `advance` takes from; the one before it ends."""
        self._items = getattr(self._parts[key], method)(*arguments)

    def advance(self) -> Any:
        """The next item of the generator that is not empty; None: it has ended."""
        return next(filter(None, self._items), None)

    def end(self) -> None:
        self._items = iter(())

    def drop(self, key: str) -> None:
        """Close a part and forget it; unknown keys are ignored."""
        part = self._parts.pop(key, None)
        if part is not None:
            part.close()
