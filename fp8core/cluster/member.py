"""The body of a Ray actor: a process that holds parts of a run, each under a key, and calls their methods by name.

Nothing heavy is imported here. A member sets its environment first; torch reads it in `Member.place`, vLLM and
Transformer Engine when a part is built.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fp8core.processes.variables import set_variables

# Distributions that trainers compute with; a process has some of them. Engines describe themselves at every sync.
_LIBRARIES = ("torch", "triton", "transformer-engine", "megatron-core")


@dataclass(frozen=True)
class HostProcess:
    """Where a member runs: the id of its GPU (None on a CPU), digest of its sources, versions of its libraries."""

    address: str
    gpu: str | None
    pid: int
    code: str
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

    def place(self) -> HostProcess:
        import ray

        from fp8core.store.manifest import current_code, installed_version

        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        versions = {name: installed_version(name) for name in _LIBRARIES}
        return HostProcess(
            address=ray.util.get_node_ip_address(),
            gpu=gpus[0] if gpus else None,
            pid=os.getpid(),
            code=current_code(),
            versions={name: version for name, version in versions.items() if version is not None},
        )

    def sees(self, path: str) -> bool:
        return os.path.exists(path)

    def build(self, key: str, build: Callable[..., Any], uses: Sequence[str], *arguments: Any) -> None:
        import torch

        from fp8core.freed_memory import keep_freed_memory

        torch.set_num_threads(self._threads)
        if not torch.cuda.is_available():
            keep_freed_memory()
        self._parts[key] = build(*(self._parts[part] for part in uses), *arguments)

    def call(self, key: str, method: str, *arguments: Any) -> Any:
        return getattr(self._parts[key], method)(*arguments)

    def call_with_part(self, key: str, method: str, part: str, *arguments: Any) -> Any:
        return getattr(self._parts[key], method)(self._parts[part], *arguments)

    def drop(self, key: str) -> None:
        """Close a part and forget it; unknown keys are ignored."""
        import torch

        if (part := self._parts.pop(key, None)) is not None:
            part.close()
        # Engines that size themselves by the free memory of the GPU may come next.
        del part
        torch.cuda.empty_cache()
