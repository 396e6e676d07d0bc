"""Time rollouts of Qwen3-8B's shape with SGLang on one Hopper GPU, BF16 beside FP8 under the same settings.

    python -m benchmarks.sglang_hopper --out FOLDER [--seconds 400] bf16 fp8_linear_kv aligned
    python -m benchmarks.sglang_hopper --out FOLDER --headline bf16 fp8_linear_kv aligned
    python -m benchmarks.sglang_hopper --out FOLDER --surroundings fp8_linear_kv aligned

`aligned` is the last precision with our model. The cell is 256 x (512 + 512), with --headline the two of vLLM's table.
Each case is a process of its own and writes FOLDER/qwen3-8b-CASE-sglang.json after every measurement: the seconds until
the engine was ready (`start`), with DeepGEMM's kernels compiled before, a sync that is proved, and the rollout, as
rollout_hopper.py has it for vLLM. Weights are random, prompts are all different, every request generates its full
length. With --surroundings, FOLDER/exactness-CASE-sglang.json says what of a request's tokens and log-probs depends on
what is beside it, as vllm_hopper has it for vLLM: a small model, 64 tokens.
"""

import argparse
import gc
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import engine_cases as cases
from benchmarks.harness import PRECISIONS, Row, RowFile, ended, start, table
from benchmarks.rollout_hopper import HEADLINE
from fp8core.config.capability import this_platform
from fp8core.config.engines import SglangConfig
from fp8core.config.precision import PrecisionContract
from fp8core.processes.variables import set_variables
from fp8core.rollout.engine import Sampling
from fp8core.rollout.sglang.entry import find_build
from fp8core.rollout.sglang.settings import required_environment, suggested_environment
from fp8core.run.context import gc_freeze

SHORT, REPEATS, LAYERS = (256, 512, 512), 3, 36
ALIGNED = "aligned"
CASES = {**PRECISIONS, ALIGNED: f"{PRECISIONS['fp8_linear_kv']}, aligned"}
_ALIGNED = {"model": "aligned", "page_size": 64}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time rollouts of Qwen3-8B's shape with SGLang on one Hopper GPU.")
    parser.add_argument("cases", nargs="+", choices=CASES, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=560.0, help="budget; what runs longer is ended")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the model")
    parser.add_argument("--headline", action="store_true", help="the two long cells, once each")
    parser.add_argument("--surroundings", action="store_true", help="what a request depends on, instead of times")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.inside:
        (measure_surroundings if options.surroundings else measure)(options)
        return
    deadline = time.monotonic() + options.seconds
    for name in options.cases:
        if time.monotonic() >= deadline:
            print(f"{name}: not started, the time is used up", flush=True)
            continue
        command = [sys.executable, "-m", "benchmarks.sglang_hopper", name, "--inside", f"--out={options.out}"]
        command += [f"--layers={options.layers}"]
        command += ["--surroundings"] if options.surroundings else []
        command += ["--headline"] if options.headline else []
        if ended(start(command), deadline) == -signal.SIGKILL:
            print(f"{name}: out of time", flush=True)


def measure(options: argparse.Namespace) -> None:
    """Start an engine, update it and time its rollouts."""
    (case,), arch = options.cases, cases.qwen3_8b(options.layers)
    precision, contract, settings = prepared(case)
    cells, repeats = (HEADLINE, 1) if options.headline else ([SHORT], REPEATS)
    longest = max(prompt + generated for _, prompt, generated in cells)
    settings = settings.model_copy(update={"mem_fraction_static": 0.85, "context_length": longest})
    rows = RowFile(options.out / f"qwen3-8b-{_file_end(case, options)}", engine="sglang", model="qwen3-8b")
    # It must have a CUDA context of its own to share weights, whichever process comes first.
    from fp8core.rollout.sglang.engine import SglangEngine

    most = max(requests for requests, _, _ in cells)
    cases.compile_products(arch, contract, max(settings.chunked_prefill_size, most))
    began = time.perf_counter()
    engine = SglangEngine(arch, contract, settings, most, find_build(this_platform()))
    about = {"case": case, "precision": precision, "layers": arch.num_layers, "batch_invariant": False}
    rows.append({"kind": "start", **about, "seconds": round(time.perf_counter() - began, 1)})
    print(case, "ready", rows.rows[-1]["seconds"], flush=True)
    try:
        policy = cases.random_policy(arch, contract, own_layers=1)
        for _ in range(2):
            rows.append({"kind": "sync", **about, **cases.synchronise(engine, policy)})
        del policy
        torch.cuda.empty_cache()
        about |= {name: engine.describe()[name] for name in ("version", "backend", "kernels", "head", "scale_rule")}
        gc_freeze()  # as a training does
        for cell in cells:
            timed = _timed(engine, cell, repeats)
            rows.append_growing({"kind": "rollout", **about, "long_tailed": False, **row} for row in timed)
            print(case, cell, rows.rows[-1]["all_tokens_per_s"], flush=True)
    finally:
        gc.unfreeze()
        engine.close()


def measure_surroundings(options: argparse.Namespace) -> None:
    """Test which surroundings leave a request's tokens and log-probs as they are."""
    (case,) = options.cases
    _, contract, settings = prepared(case)
    settings = settings.model_copy(update={"mem_fraction_static": 0.3, "kv_cache_gib": 16.0, "context_length": 4096})
    rows = RowFile(options.out / f"exactness-{_file_end(case, options)}", engine="sglang", case=case)
    policy = cases.small_policy(contract, version=0)
    from fp8core.rollout.sglang.engine import SglangEngine

    def started(most: int) -> SglangEngine:
        return SglangEngine(policy.arch, contract, settings, most, find_build(this_platform()))

    for row in cases.exactness_rows(started, policy, False):
        rows.append(row)


def prepared(case: str) -> tuple[str, PrecisionContract, SglangConfig]:
    """A case's precision, contract and settings, in an environment that is prepared for it."""
    set_variables(required_environment(), suggested_environment())
    settings = SglangConfig()
    if case != ALIGNED:
        return case, cases.contract(case), settings
    aligned = cases.aligned(cases.contract("fp8_linear_kv"))
    return "fp8_linear_kv", aligned, settings.model_copy(update=_ALIGNED)


def _file_end(case: str, options: argparse.Namespace) -> str:
    return f"{case}-sglang{'-headline' if options.headline else ''}.json"


def _timed(engine: Any, cell: tuple[int, int, int], repeats: int) -> Iterator[Row]:
    """The row of the cell after each of its runs."""
    timed_generation(engine, *cell[:2], 16, seed=0)
    yield from cases.repeated(lambda seed: timed_generation(engine, *cell, seed=seed), repeats)


def timed_generation(engine: Any, requests: int, prompt: int, generated: int, seed: int) -> Row:
    """One batch of requests, each with a prompt of its own, which all generate the same length."""
    groups = cases.prompt_groups(requests, 1, prompt, seed=100_000 * requests + 10 * generated + seed)
    with cases.processor_shares() as shares, cases.garbage_collections() as collected:
        began = time.perf_counter()
        found = cases.collect(engine, groups, Sampling(1.0, generated, frozenset()))
        seconds = time.perf_counter() - began
    tokens = sum(len(done.tokens) for done in found)
    assert tokens == requests * generated, "a request was cut short"
    sizes = {"requests": requests, "prompt": prompt, "generated": generated, "tokens": tokens}
    speed = {"seconds": round(seconds, 3), "tokens_per_s": round(tokens / seconds, 1)}
    # SGLang gives whole completions, no steps.
    return {**sizes, **speed, "step_ms": [], "collections": collected(), "processors": shares()[:3]}


def sglang_table(rows: Sequence[Row]) -> str:
    """Tokens per second by shape, a column a case; the newest row of each."""
    speeds = dict[str, dict[str, str]]()
    for row in (row for row in rows if row["kind"] == "rollout"):
        cell = f"Qwen3-8B, {row['requests']} x ({row['prompt']} + {row['generated']})"
        speeds.setdefault(cell, {})[row["case"]] = f"{row['tokens_per_s']:,.0f}"
    measured = [case for case in CASES if any(case in found for found in speeds.values())]
    lines = [[cell, *(found.get(case, "") for case in measured)] for cell, found in speeds.items()]
    return table(["tokens/s", *(CASES[case] for case in measured)], lines)


if __name__ == "__main__":
    main()
