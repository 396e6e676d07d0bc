"""Where the milliseconds of a training step go: every kernel of one step, by part."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

# The first that matches names the part.
PARTS = (
    ("codes around attention", ("_head_codes_kernel", "_head_gradients_kernel")),
    ("attention", ("decode_attention", "flash", "fmha")),
    # DeepGEMM's own, and cuBLASLt's of two E4M3 operands with FP32 scales.
    ("block-FP8 GEMM", ("sm90_fp8", "_qqsss_", "e4m3", "block_scaled")),
    (
        "quantise, with the norm or SwiGLU before it",
        ("_rows_kernel", "_tiles_kernel", "_and_columns", "_codes_kernel", "quant"),
    ),
    ("norm, rotary, SwiGLU", ("norm", "_forward_kernel", "_backward_kernel", "_column_sums_kernel")),
    ("optimiser", ("_adamw_kernel", "lpnorm", "NormTwo")),
    ("fingerprint", ("_fingerprint",)),
    ("BF16 GEMM", ("nvjet", "gemm", "cutlass", "cublas")),
    ("softmax", ("softmax", "SoftMax")),
    ("copies", ("Memcpy", "Memset", "memcpy", "copy")),
)


def part_of(name: str) -> str:
    """The part of a step that a kernel belongs to."""
    return next((part for part, words in PARTS if any(word in name for word in words)), "other")


def traced(step: Callable[[], float], device: torch.device) -> dict[str, Any]:
    """Milliseconds of one step by part and by kernel (the 40 that take most), and its wall-clock time while traced."""
    kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiler:
        seconds = step()
    parts: dict[str, float] = defaultdict(float)
    kernels: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        milliseconds = (event.device_time_total if device.type == "cuda" else event.self_cpu_time_total) / 1000
        parts[part_of(event.key)] += milliseconds
        kernels[event.key[:120]] += milliseconds
    largest = dict(sorted(kernels.items(), key=lambda item: -item[1])[:40])
    return {"traced_seconds": seconds, "parts_ms": dict(parts), "kernels_ms": largest}
