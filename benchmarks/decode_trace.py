"""Trace the decode steps of a vLLM rollout on one Hopper GPU: where the milliseconds of a step go.

    python benchmarks/decode_trace.py --out FILE.json [--requests 256 --context 2048] [PRECISION ...]

Every precision runs in a process of its own. Prompts are generated for once before, so that the traced run finds them
in the prefix cache and decodes from its second step on. A row is the median step of one precision, by part.
"""

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks import vllm_hopper_cases as cases
from benchmarks.vllm_hopper import prepare
from fp8core.rollout.engine import Sampling
from fp8core.store.versions import git_state, hardware, library_versions

ROOT = Path(__file__).parents[1]
WORKER = "benchmarks.decode_trace_worker.TraceWorker"
STEPS = 24
PRECISIONS = ("fp8_linear_kv", "bf16")
# The first that matches names the part; the sampler's own kernel ends a step.
PARTS = (
    ("attention", ("decode_attention", "flash", "FlashAttn", "fmha", "prepare_varlen")),
    ("cache write", ("reshape_and_cache",)),
    ("quantise", ("per_token_group_quant", "scaled_fp8_quant", "static_scaled", "quant")),
    ("sampler", ("gumbel", "topk_log_softmax", "ranks_kernel", "temperature", "argmax", "reduce_kernel")),
    ("linear", ("deep_gemm", "sm90_fp8", "nvjet", "cutlass", "gemm", "Gemm", "cublas")),
    ("compiled (norm, rotary, activation)", ("triton_",)),
    ("copies", ("Memcpy", "Memset", "memcpy", "memset")),
)
STEP_ENDS = "gumbel_sample"


def main() -> None:
    parser = argparse.ArgumentParser(description="Trace the decode steps of a vLLM rollout.")
    parser.add_argument("precisions", nargs="*", default=PRECISIONS)
    parser.add_argument("--out", type=Path, required=True, help="file of the rows; launches are stored beside it")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--context", type=int, default=2048, help="tokens of each prompt, decoded from there")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--utilization", type=float, default=0.9, help="share of the GPU's memory")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out.absolute()
    if options.inside:
        _inside(options)
        return
    rows: list[dict[str, Any]] = []
    for precision in options.precisions:
        part = options.out.with_name(f"{options.out.stem}-{precision}.json")
        flags = [f"--{key}={getattr(options, key)}" for key in ("requests", "context", "layers", "utilization")]
        command = [sys.executable, "-m", "benchmarks.decode_trace", precision, "--inside", f"--out={part}", *flags]
        subprocess.run(command, cwd=ROOT, check=True)
        rows += json.loads(part.read_text())
        part.unlink()
    options.out.write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        print(json.dumps(row, indent=1))


def _inside(options: argparse.Namespace) -> None:
    from fp8core.rollout.vllm import VllmEngine

    (precision,) = options.precisions
    agreed = cases.contract(precision)
    settings = cases.options(gpu_memory_utilization=options.utilization, max_model_len=options.context + 1024)
    prepare(agreed, settings)
    arch = cases.qwen3_8b(options.layers)
    engine = VllmEngine(arch, agreed, settings, options.requests, cases.build(), worker=WORKER)
    try:
        cases.synchronise(engine, cases.random_policy(arch, agreed, own_layers=1))
        torch.cuda.empty_cache()
        groups = cases._groups(options.requests, 1, options.context, seed=1)
        cases._collect(engine, groups, Sampling(1.0, 2, frozenset()))
        began = time.perf_counter()
        cases._collect(engine, groups, Sampling(1.0, STEPS, frozenset()))
        untraced = time.perf_counter() - began
        engine._call("policy_trace_begin")
        cases._collect(engine, groups, Sampling(1.0, STEPS, frozenset()))
        trace = engine._call("policy_trace_end")
    finally:
        engine.close()
    raw = options.out.with_suffix(".launches.json.gz")
    with gzip.open(raw, "wt") as file:
        json.dump(trace, file)
    about = {"kind": "decode_trace", "model": "qwen3-8b", "precision": precision, "layers": options.layers}
    about |= {"requests": options.requests, "context": options.context, "untraced_seconds": round(untraced, 3)}
    measured = step_parts(trace["names"], trace["launches"])
    source = {"command": " ".join(["python benchmarks/decode_trace.py", *sys.argv[1:]]), "commit": git_state(ROOT)}
    versions = {"versions": library_versions(), "hardware": hardware()}
    options.out.write_text(json.dumps([about | measured | source | versions]))


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


if __name__ == "__main__":
    main()
