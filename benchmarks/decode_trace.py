"""Where the milliseconds of a decode step of vLLM go: every kernel of some steps, by part.

`rollout_hopper.py` calls this for the engines that it times. Prompts are generated for once before, so that the traced
run finds them in the prefix cache and decodes from its second step on.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from benchmarks import vllm_hopper_cases as cases
from fp8core.rollout.engine import Sampling

WORKER = "benchmarks.decode_trace_worker.TraceWorker"
STEPS = 24
# The first that matches names the part; the sampler's own kernel ends a step.
PARTS = (
    ("attention", ("decode_attention", "flash", "FlashAttn", "fmha", "prepare_varlen")),
    ("cache write", ("reshape_and_cache",)),
    ("quantise", ("per_token_group_quant", "scaled_fp8_quant", "static_scaled", "quant", "_rows_kernel")),
    ("sampler", ("gumbel", "topk_log_softmax", "ranks_kernel", "temperature", "argmax", "reduce_kernel", "SoftMax")),
    ("linear", ("deep_gemm", "sm90_fp8", "nvjet", "cutlass", "gemm", "Gemm", "cublas")),
    ("fused by hand (norm, rotary, activation)", ("_add_norm", "_row_codes_kernel", "_forward_kernel")),
    ("compiled (norm, rotary, activation)", ("triton_",)),
    ("copies", ("Memcpy", "Memset", "memcpy", "memset")),
)
STEP_ENDS = "gumbel_sample"


def decode_trace(engine: Any, requests: int, context: int) -> dict[str, Any]:
    """The median decode step of so many requests after so many tokens.

    Args:
        engine: started with `WORKER`; holds a policy.
    """
    groups = cases.prompt_groups(requests, 1, context, seed=1)
    cases.collect(engine, groups, Sampling(1.0, 2, frozenset()))
    engine._call("policy_trace_begin")
    cases.collect(engine, groups, Sampling(1.0, STEPS, frozenset()))
    trace = engine._call("policy_trace_end")
    return {"requests": requests, "context": context, **step_parts(trace["names"], trace["launches"])}


def part_of(name: str) -> str:
    """The part of a step that a kernel belongs to."""
    return next((part for part, words in PARTS if any(word in name for word in words)), "other")


def step_parts(names: Sequence[str], launches: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Milliseconds of the median decode step: in all, by part, by kernel, and with nothing running.

    A step is what lies between the ends of two sampler kernels. The first two are left out (the rest of the prompts)
    and the last (requests end).
    """
    ends = [i for i, (name, _, _) in enumerate(launches) if STEP_ENDS in names[name]]
    steps = [_step(names, launches[a + 1 : b + 1], launches[a]) for a, b in pairwise(ends[2:-1])]
    parts = sorted({part for step in steps for part in step["parts"]})
    kernels = sorted({kernel for step in steps for kernel in step["kernels"]})
    return {
        "steps": len(steps),
        "step_ms": _median([step["all"] for step in steps]),
        "idle_ms": _median([step["idle"] for step in steps]),
        "launches": statistics.median(step["launches"] for step in steps),
        "parts_ms": {part: _median([step["parts"][part] for step in steps]) for part in parts},
        "kernels_ms": {kernel: _median([step["kernels"][kernel] for step in steps]) for kernel in kernels},
        "kernel_launches": {kernel: steps[0]["counts"][kernel] for kernel in kernels},
    }


def _step(names: Sequence[str], launches: Sequence[Sequence[int]], before: Sequence[int]) -> dict[str, Any]:
    parts: dict[str, int] = defaultdict(int)
    kernels: dict[str, int] = defaultdict(int)
    counts: dict[str, int] = defaultdict(int)
    busy_until, idle = before[1] + before[2], 0
    for name, start, length in launches:
        idle += max(0, start - busy_until)
        busy_until = max(busy_until, start + length)
        short = names[name][:120]
        parts[part_of(names[name])] += length
        kernels[short] += length
        counts[short] += 1
    span = launches[-1][1] + launches[-1][2] - before[1] - before[2]
    return {"all": span, "idle": idle, "parts": parts, "kernels": kernels, "counts": counts, "launches": len(launches)}


def _median(nanoseconds: Sequence[int]) -> float:
    return round(statistics.median(nanoseconds) / 1e6, 4)
