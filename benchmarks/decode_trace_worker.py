"""vLLM's worker with a profiler: what runs on the GPU while it decodes."""

from typing import Any

from torch.profiler import ProfilerActivity, profile

from fp8core.rollout.vllm.internals import VllmPolicy
from fp8core.rollout.vllm.worker import PolicyWorker


class TracePolicy(VllmPolicy):
    """A policy that can record its kernels."""

    _profiler: profile | None = None

    def trace_begin(self) -> None:
        """Record every kernel from here on."""
        self._profiler = profile(activities=[ProfilerActivity.CUDA])
        self._profiler.start()

    def trace_end(self) -> dict[str, Any]:
        """Names of the kernels, and of every launch its name's index, start and length in nanoseconds, by start."""
        assert self._profiler is not None, "trace_begin() comes first"
        self._profiler.stop()
        found = self._profiler.profiler.kineto_results.events()
        launches = sorted((e.start_ns(), e.duration_ns(), e.name()) for e in found if "CUDA" in str(e.device_type()))
        self._profiler = None
        indices: dict[str, int] = {}
        first = launches[0][0] if launches else 0
        rows = [[indices.setdefault(name, len(indices)), start - first, length] for start, length, name in launches]
        return {"names": list(indices), "launches": rows}


class TraceWorker(PolicyWorker):
    policy_class = TracePolicy
