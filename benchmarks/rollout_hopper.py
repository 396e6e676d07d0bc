"""Time rollouts of real model shapes with vLLM on one Hopper GPU, BF16 beside FP8 under the same settings.

    python benchmarks/rollout_hopper.py --out FOLDER [--seconds 500] ENGINE [ENGINE ...]
    python benchmarks/rollout_hopper.py --out FOLDER qwen3-8b/bf16/256 qwen3-8b/fp8_linear_kv
    python benchmarks/rollout_hopper.py --out FOLDER qwen3-8b/fp8_linear_kv/short qwen3-8b/fp8_linear_kv/aligned

An engine is a model, a precision and its cells (ENGINES below); it is a process of its own and writes
FOLDER/ENGINE.json after every cell, so that what was measured stays. Weights are random, prompts are all
different, every request generates its full length. Loading, compiling and a short rollout come before the clock.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import vllm_hopper_cases as cases
from benchmarks.decode_trace import WORKER, decode_trace
from benchmarks.rollout_rows import ROOT, Row, engine_row, repeated, source_row
from benchmarks.vllm_hopper import prepare
from fp8core.config.vllm import VllmConfig
from fp8core.models.architecture import Architecture
from fp8core.workers.heap import freeze_heap, thaw_heap

SCRIPT = "python benchmarks/rollout_hopper.py"
# With random weights the next token is one of these with a probability of about 1 / 800: lengths are geometric.
TAIL = frozenset(range(4, 194))
HEADLINE = ((256, 512, 3072), (512, 512, 2048))


@dataclass(frozen=True)
class Cell:
    """One batch of requests; with a tail, `generated` is the longest and most end well before."""

    requests: int
    prompt: int
    generated: int
    repeats: int = 1
    tail: bool = False


@dataclass(frozen=True)
class Engine:
    """What is started, what is timed on it, and the requests and context of the decode step that is traced."""

    model: str
    precision: str
    cells: tuple[Cell, ...]
    batch_invariant: bool = False
    decode_kernel: str = "fp8_decode"
    forward: str = "stock"
    block_size: int | None = None
    traced: tuple[int, int] | None = None


def _headline(repeats: int) -> tuple[Cell, ...]:
    return tuple(Cell(*shape, repeats) for shape in HEADLINE)


_SHORT = Cell(256, 512, 1024)
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
    # Whether speed varies because small pages lie anywhere in a cache of 100 GB.
    "qwen3-8b/fp8_linear_kv/512/pages": Engine("qwen3-8b", "fp8_linear_kv", _headline(3)[1:], block_size=128),
    "qwen3-8b/fp8_linear_kv/long": Engine("qwen3-8b", "fp8_linear_kv", (_LONG,)),
    "qwen3-8b/fp8_linear_kv/flash": Engine("qwen3-8b", "fp8_linear_kv", (_SHORT,), decode_kernel="flash_attention"),
    "qwen3-8b/fp8_linear_kv/invariant": Engine("qwen3-8b", "fp8_linear_kv", (_SHORT,), batch_invariant=True),
    "qwen3-8b/fp8_linear_kv/short": Engine("qwen3-8b", "fp8_linear_kv", (_SHORT,)),
    "qwen3-8b/fp8_linear_kv/aligned": Engine("qwen3-8b", "fp8_linear_kv", (_SHORT,), forward="aligned"),
    "qwen3-8b/fp8_linear_kv/aligned/headline": Engine(
        "qwen3-8b", "fp8_linear_kv", _headline(1), forward="aligned", traced=(256, 2048)
    ),
    "llama-3.1-8b/bf16": Engine("llama-3.1-8b", "bf16", (_SHORT,)),
    "llama-3.1-8b/fp8_linear_kv": Engine("llama-3.1-8b", "fp8_linear_kv", (_SHORT,)),
    "llama-3.1-8b/fp8_linear_kv/aligned": Engine("llama-3.1-8b", "fp8_linear_kv", (_SHORT,), forward="aligned"),
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
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the engine's processes
            print(f"{name}: out of time", flush=True)


def _result(out: Path, name: str) -> Path:
    return out / f"{name.replace('/', '-')}.json"


def architecture(model: str) -> Architecture:
    """The full-depth shape of a model."""
    return {"qwen3-8b": lambda: cases.qwen3_8b(36), "llama-3.1-8b": cases.llama_8b}[model]()


def measure(engine_of: Engine, out: Path) -> None:
    """Start an engine and time its cells."""
    arch, contract = architecture(engine_of.model), cases.contract(engine_of.precision)
    if engine_of.forward == "aligned":
        contract = cases.aligned(contract)
    settings = _settings(engine_of)
    prepare(contract, settings)
    rows: list[Row] = []
    largest = max(cell.requests for cell in engine_of.cells)
    assert engine_of.traced is None or engine_of.traced[0] <= largest, "a trace of more requests than run at once"
    engine = cases.start(arch, contract, settings, largest, rows, worker=WORKER)
    try:
        cases.synchronise(engine, cases.random_policy(arch, contract, own_layers=1))
        torch.cuda.empty_cache()
        freeze_heap()  # as a training does
        about = {"model": engine_of.model, "precision": engine_of.precision, "layers": arch.num_layers}
        about |= engine_row(cases.summary(engine.describe()), settings) | source_row(SCRIPT)
        for cell in engine_of.cells:
            before = len(rows)
            for row in _timed(engine, cell):
                # After every run: what was measured stays, whatever ends this process.
                rows[before:] = [{"kind": "rollout", **about, "long_tailed": cell.tail, **row}]
                _write(out, rows)
                print(engine_of.model, engine_of.precision, row["all_tokens_per_s"], row["runs"][-1], flush=True)
        if engine_of.traced:
            rows.append({"kind": "decode_trace", **about, **decode_trace(engine, *engine_of.traced)})
            _write(out, rows)
    finally:
        thaw_heap()
        engine.close()


def _settings(engine_of: Engine) -> VllmConfig:
    return cases.options(
        batch_invariant=engine_of.batch_invariant,
        decode_kernel=engine_of.decode_kernel,
        model=engine_of.forward,
        block_size=engine_of.block_size,
        gpu_memory_utilization=0.92,
        max_model_len=max(cell.prompt + cell.generated for cell in engine_of.cells),
    )


def _timed(engine: Any, cell: Cell) -> Iterator[Row]:
    """The row of a cell after each of its runs."""
    shape = (cell.requests, cell.prompt)
    stops = TAIL if cell.tail else frozenset[int]()
    cases.timed_rollout(engine, *shape, 16, seed=0)
    yield from repeated(lambda seed: cases.timed_rollout(engine, *shape, cell.generated, seed, stops), cell.repeats)


def _write(out: Path, rows: Sequence[Row]) -> None:
    out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
