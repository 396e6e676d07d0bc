"""Time rollouts of real model shapes with vLLM on one Hopper GPU, BF16 beside FP8 under the same settings.

    python -m benchmarks.rollout_hopper --out FOLDER [--seconds 500] ENGINE [ENGINE ...]
    python -m benchmarks.rollout_hopper --out FOLDER qwen3-8b/bf16/256 qwen3-8b/fp8_linear_kv
    python -m benchmarks.rollout_hopper --out FOLDER qwen3-8b/fp8_linear_kv/short qwen3-8b/fp8_linear_kv/aligned
    python -m benchmarks.rollout_hopper --out FOLDER qwen3-8b/bf16/prompts qwen3-8b/fp8_linear_kv/aligned/prompts
    python -m benchmarks.rollout_hopper --out FOLDER qwen3-30b-a3b/fp8_linear_kv/aligned qwen3-30b-a3b/bf16
    python -m benchmarks.rollout_hopper --out FOLDER qwen3-8b/fp8_linear_kv/aligned/again{,/drafts}

An engine is a model, a precision and its cells (ENGINES below). It is a process of its own and writes
FOLDER/ENGINE.json after every cell, so that measurements are kept. Weights are random, prompts are all
different, every request generates its full length. Loading, compiling and a short rollout are not timed.

Predicted for prompts alone, before the first measurement on an H200: 38,000 tokens a second in BF16 where they have 512
tokens and 33,000 where they have 4,096; in FP8 52,000 and 45,000 with vLLM's model, 50,000 and 42,000 aligned, where a
quantiser is a kernel of its own and attention takes 1.3 times as long.

Predicted for Qwen3-30B-A3B before its first measurement aligned (`predicted`): a step of 256 tokens in BF16 reads 61 GB
of weights and 16 GB of keys and values, in 24 ms. FP8 reads half, and its grouped products have 128 rows for 16: 18 ms.
"""

import argparse
import gc
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks import engine_cases as cases
from benchmarks.harness import PRECISIONS, Row, RowFile, ended, part_of, start, table
from fp8core.config.engines import VllmConfig
from fp8core.models.architecture import Architecture
from fp8core.numerics.recipe import RecipeName
from fp8core.rollout.engine import Sampling
from fp8core.run.context import gc_freeze

# With random weights the next token is one of these with a probability of about 1 / 800: lengths are geometric.
TAIL = frozenset(range(4, 194))
WORKER = "benchmarks.decode_trace_worker.TraceWorker"
STEPS = 24
# The first that matches names the part; the sampler's own kernel ends a step.
PARTS = (
    ("attention", ("decode_attention", "flash", "FlashAttn", "fmha", "prepare_varlen")),
    ("cache write", ("reshape_and_cache",)),
    ("products of experts, vLLM's", ("fused_moe_kernel",)),
    (
        "routes of experts",
        ("_choose_kernel", "_count_kernel", "_place_kernel", "_gather_", "_mix_kernel", "moe_", "topkGating"),
    ),
    ("quantise", ("per_token_group_quant", "scaled_fp8_quant", "static_scaled", "quant", "_rows_kernel")),
    ("sampler", ("gumbel", "topk_log_softmax", "ranks_kernel", "temperature", "argmax", "reduce_kernel", "SoftMax")),
    ("linear", ("deep_gemm", "sm90_fp8", "nvjet", "cutlass", "gemm", "Gemm", "cublas")),
    ("fused by hand (norm, rotary, activation)", ("_add_norm", "_row_codes_kernel", "_forward_kernel")),
    ("compiled (norm, rotary, activation)", ("triton_",)),
    ("copies", ("Memcpy", "Memset", "memcpy", "memset")),
)
STEP_ENDS = "gumbel_sample"
# Tokens of the rollout before those that are timed.
_SHORTEST = 16
HEADLINE = ((256, 512, 3072), (512, 512, 2048))


@dataclass(frozen=True)
class Cell:
    """One batch of requests; with a tail, `generated` is the longest and most end well before. `again`: every repeat
    has the same requests, so that drafts know all of it but the first time."""

    requests: int
    prompt: int
    generated: int
    repeats: int = 1
    tail: bool = False
    again: bool = False


@dataclass(frozen=True)
class Engine:
    """An engine's settings, the cells timed on it, and the requests and context of the decode step that is traced.

    `predicted`: tokens a second."""

    model: str
    precision: str
    cells: tuple[Cell, ...]
    batch_invariant: bool = False
    forward: str = "stock"
    traced: tuple[int, int] | None = None
    rule: RecipeName = "fp32_activations"
    batched_tokens: int = 8192
    predicted: float | None = None
    draft_tokens: int = 0


def _headline(repeats: int) -> tuple[Cell, ...]:
    return tuple(Cell(*shape, repeats) for shape in HEADLINE)


_SHORT = Cell(256, 512, 1024)
# The cell of benchmarks/sglang_hopper.py.
_EVEN = Cell(256, 512, 512, 3)
_PROMPTS = (Cell(256, 512, 1, 3), Cell(32, 4096, 1, 3))
# Fewer tokens a step are fewer kernels to compile; prompts take a fiftieth of the time.
_SPARSE: dict[str, Any] = {"cells": (Cell(256, 128, 1024),), "batched_tokens": 2048}
_AGAIN = (Cell(256, 512, 1024, 2, again=True), Cell(32, 512, 1024, 2, again=True), Cell(256, 512, 3072, 2, True, True))
_TAILED, _LONG = Cell(256, 512, 3072, tail=True), Cell(64, 1024, 8192)
ENGINES = {
    "qwen3-8b/bf16/256": Engine("qwen3-8b", "bf16", _headline(3)[:1], traced=(256, 2048)),
    "qwen3-8b/bf16/512": Engine("qwen3-8b", "bf16", (*_headline(3)[1:], _SHORT, _TAILED)),
    "qwen3-8b/bf16/long": Engine("qwen3-8b", "bf16", (_LONG,)),
    "qwen3-8b/fp8_linear_kv": Engine("qwen3-8b", "fp8_linear_kv", _headline(3), traced=(256, 2048)),
    "qwen3-8b/fp8_linear": Engine("qwen3-8b", "fp8_linear", _headline(1)),
    "qwen3-8b/fp8_linear/512": Engine("qwen3-8b", "fp8_linear", _headline(1)[1:]),
    "qwen3-8b/fp8_linear_kv/512": Engine(
        "qwen3-8b", "fp8_linear_kv", (*_headline(3)[1:], _SHORT, _TAILED), traced=(512, 1536)
    ),
    "qwen3-8b/fp8_linear_kv/long": Engine("qwen3-8b", "fp8_linear_kv", (_LONG,)),
    "qwen3-8b/fp8_linear_kv/invariant": Engine("qwen3-8b", "fp8_linear_kv", (_SHORT,), batch_invariant=True),
    "qwen3-8b/bf16/even": Engine("qwen3-8b", "bf16", (_EVEN,)),
    "qwen3-8b/fp8_linear_kv/even": Engine("qwen3-8b", "fp8_linear_kv", (_EVEN,)),
    "qwen3-8b/fp8_linear_kv/aligned/even": Engine("qwen3-8b", "fp8_linear_kv", (_EVEN,), forward="aligned"),
    "qwen3-8b/fp8_linear_kv/short": Engine("qwen3-8b", "fp8_linear_kv", (_SHORT,)),
    "qwen3-8b/fp8_linear_kv/aligned": Engine("qwen3-8b", "fp8_linear_kv", (_SHORT,), forward="aligned"),
    "qwen3-8b/fp8_linear_kv/aligned/headline": Engine(
        "qwen3-8b", "fp8_linear_kv", _headline(1), forward="aligned", traced=(256, 2048)
    ),
    **{
        f"qwen3-8b/fp8_linear_kv/aligned/again{name}": Engine(
            "qwen3-8b", "fp8_linear_kv", _AGAIN, forward="aligned", draft_tokens=draft_tokens
        )
        for name, draft_tokens in (("", 0), ("/drafts", 8))
    },
    # The default recipe beside powers of two for all, of the aligned model.
    **{
        f"qwen3-8b/fp8_linear_kv/aligned/{rule}": Engine(
            "qwen3-8b", "fp8_linear_kv", _headline(1)[:1], forward="aligned", traced=(256, 2048), rule=rule
        )
        for rule in ("fp32_activations", "pow2")
    },
    "qwen3-8b/bf16/prompts": Engine("qwen3-8b", "bf16", _PROMPTS),
    "qwen3-8b/fp8_linear_kv/prompts": Engine("qwen3-8b", "fp8_linear_kv", _PROMPTS),
    "qwen3-8b/fp8_linear_kv/aligned/prompts": Engine("qwen3-8b", "fp8_linear_kv", _PROMPTS, forward="aligned"),
    "llama-3.1-8b/bf16": Engine("llama-3.1-8b", "bf16", (_SHORT,)),
    "llama-3.1-8b/fp8_linear_kv": Engine("llama-3.1-8b", "fp8_linear_kv", (_SHORT,)),
    "llama-3.1-8b/fp8_linear_kv/aligned": Engine("llama-3.1-8b", "fp8_linear_kv", (_SHORT,), forward="aligned"),
    "qwen3-30b-a3b/bf16": Engine("qwen3-30b-a3b", "bf16", **_SPARSE, predicted=10_600),
    "qwen3-30b-a3b/fp8_linear_kv/aligned": Engine(
        "qwen3-30b-a3b", "fp8_linear_kv", **_SPARSE, forward="aligned", traced=(256, 640), predicted=13_800
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time rollouts of real model shapes with vLLM on one Hopper GPU.")
    parser.add_argument("engines", nargs="+", choices=list(ENGINES), metavar="ENGINE", help=", ".join(ENGINES))
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=560.0, help="budget; what runs longer is ended")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.inside:
        measure(ENGINES[options.engines[0]], _result(options.out, options.engines[0]))
        return
    deadline = time.monotonic() + options.seconds
    for name in options.engines:
        if time.monotonic() >= deadline:
            print(f"{name}: not started, the time is used up", flush=True)
            continue
        _result(options.out, name).unlink(missing_ok=True)
        command = [sys.executable, "-m", "benchmarks.rollout_hopper", name, "--inside", f"--out={options.out}"]
        if ended(start(command), deadline) == -signal.SIGKILL:
            print(f"{name}: out of time", flush=True)


def _result(out: Path, name: str) -> Path:
    return out / f"{name.replace('/', '-')}.json"


def architecture(model: str) -> Architecture:
    """The full-depth shape of a model."""
    shapes = {"qwen3-8b": lambda: cases.qwen3_8b(36), "llama-3.1-8b": cases.llama_8b}
    return {**shapes, "qwen3-30b-a3b": cases.qwen3_30b_a3b}[model]()


def measure(engine_of: Engine, out: Path) -> None:
    """Start an engine and time its cells."""
    arch, contract = architecture(engine_of.model), cases.contract(engine_of.precision)
    if engine_of.forward == "aligned":
        contract = cases.aligned(contract, engine_of.rule)
    settings = _settings(engine_of)
    cases.prepare(contract, settings)
    rows = RowFile(out)
    largest = max(cell.requests for cell in engine_of.cells)
    cases.compile_products(arch, contract, max(settings.batched_tokens, largest))
    assert engine_of.traced is None or engine_of.traced[0] <= largest, "a trace of more requests than run at once"
    engine = cases.start(arch, contract, settings, largest, rows, WORKER, engine_of.draft_tokens)
    try:
        policy = cases.random_policy(arch, contract, own_layers=1)
        # The first finds the places of all tensors.
        syncs = [cases.synchronise(engine, policy) for _ in range(2)]
        del policy
        torch.cuda.empty_cache()
        gc_freeze()  # as a training does
        about = {"model": engine_of.model, "precision": engine_of.precision, "layers": arch.num_layers}
        about |= {"scale_rule": contract.scale_rule}
        about |= cases.engine_row(cases.summary(engine.describe()), settings)
        for number, sync in enumerate(syncs, 1):
            rows.append({"kind": "sync", **about, "number": number, **sync})
        for cell in engine_of.cells:
            first = {"kind": "prompts" if cell.generated == 1 else "rollout", "predicted": engine_of.predicted}
            rows.append_growing({**first, **about, "long_tailed": cell.tail, **row} for row in _timed(engine, cell))
            print(engine_of.model, engine_of.precision, rows.rows[-1]["all_tokens_per_s"], flush=True)
        if engine_of.traced:
            rows.append({"kind": "decode_trace", **about, **decode_trace(engine, *engine_of.traced)})
    finally:
        gc.unfreeze()
        engine.close()


def _settings(engine_of: Engine) -> VllmConfig:
    return cases.options(
        batch_invariant=engine_of.batch_invariant,
        model=engine_of.forward,
        batched_tokens=engine_of.batched_tokens,
        gpu_memory_utilization=0.92,
        max_model_len=max(cell.prompt + max(cell.generated, _SHORTEST) for cell in engine_of.cells),
    )


def _timed(engine: Any, cell: Cell) -> Iterator[Row]:
    """The row of a cell after each of its runs."""
    shape = (cell.requests, cell.prompt)
    stops = TAIL if cell.tail else frozenset[int]()
    cases.timed_rollout(engine, *shape, _SHORTEST, seed=0)

    def run(seed: int) -> Row:
        before = engine.draft_counts()
        row = cases.timed_rollout(engine, *shape, cell.generated, 0 if cell.again else seed, stops)
        return {**row, "drafts": dict(engine.draft_counts() - before)}

    yield from cases.repeated(run, cell.repeats)


def decode_trace(engine: Any, requests: int, context: int) -> dict[str, Any]:
    """The median decode step of `requests` requests after `context` tokens.

    Args:
        engine: started with `WORKER`; holds a policy.
    """
    groups = cases.prompt_groups(requests, 1, context, seed=1)
    cases.collect(engine, groups, Sampling(1.0, 2, frozenset()))
    engine.ask_policy("trace_begin")
    cases.collect(engine, groups, Sampling(1.0, STEPS, frozenset()))
    trace = engine.ask_policy("trace_end")
    return {"requests": requests, "context": context, **step_parts(trace["names"], trace["launches"])}


def step_parts(names: Sequence[str], launches: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Milliseconds of the median decode step: in all, by part, by kernel, and with nothing running.

    The first two are left out (the rest of the prompts) and the last (requests end).
    """
    return median_step(traced_steps(names, launches)[2:-1])


def traced_steps(names: Sequence[str], launches: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Every step between two ends of sampler kernels, in nanoseconds: `all`, `idle`, `parts` and `kernels`."""
    ends = [i for i, (name, _, _) in enumerate(launches) if STEP_ENDS in names[name]]
    return [_step(names, launches[a + 1 : b + 1], launches[a]) for a, b in pairwise(ends)]


def median_step(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of these steps in ms, each part and kernel by itself."""
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
    for name, begin, length in launches:
        idle += max(0, begin - busy_until)
        busy_until = max(busy_until, begin + length)
        short = names[name][:120]
        parts[part_of(names[name], PARTS)] += length
        kernels[short] += length
        counts[short] += 1
    span = launches[-1][1] + launches[-1][2] - before[1] - before[2]
    return {"all": span, "idle": idle, "parts": parts, "kernels": kernels, "counts": counts, "launches": len(launches)}


def prompt_table(rows: Sequence[Row]) -> str:
    """Prompt tokens per second by shape, a column a precision; each row has one generated token a request."""
    speeds, names = dict[str, dict[str, str]](), list[str]()
    for row in rows:
        names.append(PRECISIONS[row["precision"]] + (", aligned" if row["forward"] == "aligned" else ""))
        found = speeds.setdefault(f"{row['requests']} of {row['prompt']:,}", {})
        found[names[-1]] = f"{row['prompt'] * row['tokens_per_s']:,.0f}"
    columns = sorted(set(names))
    lines = [[prompts, *(found.get(name, "") for name in columns)] for prompts, found in speeds.items()]
    return table(["prompts, tokens/s", *columns], lines)


def _median(nanoseconds: Sequence[int]) -> float:
    return round(statistics.median(nanoseconds) / 1e6, 4)


if __name__ == "__main__":
    main()
