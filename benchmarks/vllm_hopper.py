"""Measure the vLLM engine on one Hopper GPU.

    python benchmarks/vllm_hopper.py --out FOLDER                       everything, correctness first
    python benchmarks/vllm_hopper.py --out FOLDER correctness           adapter, exactness, memory (side by side)
    python benchmarks/vllm_hopper.py --out FOLDER throughput [--requests 256 --prompt 512 --generated 3072]
    python benchmarks/vllm_hopper.py --out FOLDER fp8_linear_kv         one of them

Every measurement is a process of its own and writes FOLDER/NAME.json: its rows, or the error that ended it. None is
started after --seconds. Weights are random; load and compile times are rows of their own.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks import vllm_hopper_cases as cases
from benchmarks.calibration_hopper import calibration_rows
from flows.environment import set_variables
from fp8core.rollout.vllm_settings import required_environment, suggested_environment
from fp8core.store.versions import git_state, hardware, library_versions

ROOT = Path(__file__).parents[1]
Rows = list[dict[str, Any]]


def main() -> None:
    options = _options()
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.inside:
        _measure(options)
        return
    deadline = time.monotonic() + options.seconds
    names = options.names or ["correctness", "throughput"]
    if "correctness" in names:
        _finish([_start(name, options) for name in CORRECTNESS], deadline)
    for name in [*(THROUGHPUT if "throughput" in names else []), *(n for n in names if n in MEASUREMENTS)]:
        if time.monotonic() > deadline:
            _write(options.out, name, {"error": "not started: out of time"})
        else:
            _finish([_start(name, options)], deadline)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the vLLM engine on one Hopper GPU.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"correctness, throughput, {', '.join(MEASUREMENTS)}")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=470.0, help="budget; what runs longer is ended")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--generated", type=int, default=256, help="tokens of each completion")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--layers", type=int, default=36, help="of Qwen3-8B's 36")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _start(name: str, options: argparse.Namespace) -> tuple[str, Path, subprocess.Popen[bytes]]:
    flags = [
        f"--{key}={getattr(options, key)}" for key in ("out", "requests", "prompt", "generated", "repeats", "layers")
    ]
    command = [sys.executable, "-m", "benchmarks.vllm_hopper", name, "--inside", *flags]
    with (options.out / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    return name, options.out, process


def _finish(started: Sequence[tuple[str, Path, subprocess.Popen[bytes]]], deadline: float) -> None:
    for name, out, process in started:
        try:
            code = process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the engine's processes
            code = process.wait()
        result, log = out / f"{name}.json", out / f"{name}.log"
        if not result.exists():
            _write(out, name, {"error": f"ended with {code}"})
        content = json.loads(result.read_text())
        if "error" in content:
            # What went wrong inside vLLM is in its processes' output alone.
            content["log"] = log.read_text(errors="replace")[-12_000:]
            result.write_text(json.dumps(content, indent=1) + "\n")
        log.unlink()
        print(result.read_text(), flush=True)


def _measure(options: argparse.Namespace) -> None:
    """One measurement in this process; whatever goes wrong is the result."""
    (name,) = options.names
    began = time.monotonic()
    rows: Rows = []
    content: dict[str, Any] = {"rows": rows}
    try:
        MEASUREMENTS[name](options, rows)
    except Exception as error:  # noqa: BLE001 - one failure must not hide the measurements beside it
        content |= {"error": f"{type(error).__name__}: {error}"[-2000:], "traceback": traceback.format_exc()[-4000:]}
    _write(options.out, name, content | {"seconds": round(time.monotonic() - began, 1)})


def _write(out: Path, name: str, content: dict[str, Any]) -> None:
    about = {"command": " ".join(["python benchmarks/vllm_hopper.py", *sys.argv[1:]]), "git": git_state(ROOT)}
    about |= {"versions": library_versions(), "hardware": hardware()}
    (out / f"{name}.json").write_text(json.dumps({"measurement": name, **content, **about}, indent=1) + "\n")


def adapter(options: argparse.Namespace, rows: Rows) -> None:
    """The tests of the engine, in FP8 on this GPU."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "tests/vllm", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if not report.exists():
            raise RuntimeError(done.stdout[-2000:])
        for case in ElementTree.parse(report).iter("testcase"):
            problem = next((child for child in case if child.tag in ("failure", "error")), None)
            row = {"kind": "test", "name": case.get("name"), "passed": problem is None}
            rows.append(row | ({} if problem is None else {"problem": (problem.text or "")[-1500:]}))


def exactness(options: argparse.Namespace, rows: Rows) -> None:
    """Which surroundings leave a request's tokens and log-probs as they are, by default."""
    _exactness(rows, batch_invariant=False)


def exactness_invariant(options: argparse.Namespace, rows: Rows) -> None:
    """The same with VLLM_BATCH_INVARIANT."""
    _exactness(rows, batch_invariant=True)


def _exactness(rows: Rows, batch_invariant: bool) -> None:
    contract, settings = (
        cases.contract("fp8_linear_kv"),
        cases.options(batch_invariant=batch_invariant, kv_cache_gib=8.0),
    )
    _prepare(contract, settings)
    policy = cases.small_policy(contract, version=0)
    rows.append({"kind": "checkpoint", "bytes_equal_shipped": cases.checkpoint_equals(policy)})
    engine = cases.start(policy.arch, contract, settings, 256, rows)
    try:
        cases.synchronise(engine, policy)
        rows.append({"kind": "described", "batch_invariant": batch_invariant, **cases.summary(engine.describe())})
        rows.append(
            {"kind": "logprob_error", "batch_invariant": batch_invariant, **cases.logprob_error(engine, policy)}
        )
        alone = cases.probe_alone(engine)
        for found, surroundings in cases.probes(engine, policy):
            rows.append(cases.compared(alone, found, surroundings, batch_invariant))
    finally:
        engine.close()
    pair = cases.start(policy.arch, contract, settings, 2, rows)
    try:
        cases.synchronise(pair, policy)
        rows.append(cases.compared(alone, cases.probe_alone(pair), "alone, engine of two", batch_invariant))
        rows.append(cases.compared(alone, *cases.probe_joined(pair, policy), batch_invariant))
    finally:
        pair.close()


def logprobs(options: argparse.Namespace, rows: Rows) -> None:
    """vLLM against the exact reference in each precision, and how far apart the reference's own precisions are."""
    for precision in ("bf16", "fp8_linear", "fp8_linear_kv"):
        contract, settings = cases.contract(precision), cases.options(kv_cache_gib=8.0)
        _prepare(contract, settings)
        policy = cases.small_policy(contract, version=0)
        engine = cases.start(policy.arch, contract, settings, 256, rows)
        try:
            cases.synchronise(engine, policy)
            rows.append({"kind": "logprob_error", "precision": precision, **cases.logprob_error(engine, policy)})
        finally:
            engine.close()


def memory(options: argparse.Namespace, rows: Rows) -> None:
    """200 updates in place from GPU memory, then sleep and wake: time, and what grows."""
    contract, settings = cases.contract("fp8_linear_kv"), cases.options(sleep=True, kv_cache_gib=8.0)
    _prepare(contract, settings)
    policies = [cases.small_policy(contract, version) for version in (0, 1)]
    engine = cases.start(policies[0].arch, contract, settings, 64, rows)
    try:
        seconds, used = [], []
        for i in range(200):
            seconds.append(cases.synchronise(engine, policies[i % 2])["seconds"])
            if i % 20 == 19:
                cases.generate_little(engine)
                used.append({**engine.memory(), "sender": torch.cuda.memory_allocated(), "updates": i + 1})
        rows.append({"kind": "memory", "updates": 200, "median_seconds": statistics.median(seconds), "used": used})
        for cycle in range(3):
            rows.append({"kind": "sleep", "cycle": cycle, **cases.sleep_cycle(engine, policies[cycle % 2])})
    finally:
        engine.close()


def bf16(options: argparse.Namespace, rows: Rows) -> None:
    """Qwen3-8B's shape in BF16."""
    _throughput(options, rows, "bf16", batch_invariant=False)


def fp8_linear(options: argparse.Namespace, rows: Rows) -> None:
    """The same with block-FP8 linears."""
    _throughput(options, rows, "fp8_linear", batch_invariant=False)


def fp8_linear_kv(options: argparse.Namespace, rows: Rows) -> None:
    """And with an FP8 cache and attention."""
    _throughput(options, rows, "fp8_linear_kv", batch_invariant=False)


def fp8_linear_kv_invariant(options: argparse.Namespace, rows: Rows) -> None:
    """And with VLLM_BATCH_INVARIANT."""
    _throughput(options, rows, "fp8_linear_kv", batch_invariant=True)


def _throughput(options: argparse.Namespace, rows: Rows, precision: str, batch_invariant: bool) -> None:
    arch, contract = cases.qwen3_8b(options.layers), cases.contract(precision)
    settings = cases.options(batch_invariant=batch_invariant, gpu_memory_utilization=0.9, max_model_len=12_288)
    _prepare(contract, settings)
    engine = cases.start(arch, contract, settings, options.requests, rows)
    try:
        cases.synchronise(engine, cases.random_policy(arch, contract, own_layers=1))
        torch.cuda.empty_cache()
        rows.append({"kind": "described", "precision": precision, **cases.summary(engine.describe())})
        cases.timed_rollout(engine, options.requests, options.prompt, min(32, options.generated), seed=0)
        about = {"kind": "rollout", "model": "qwen3-8b", "precision": precision, "layers": options.layers}
        about |= {"batch_invariant": batch_invariant, "repeats": options.repeats}
        runs = [
            cases.timed_rollout(engine, options.requests, options.prompt, options.generated, seed)
            for seed in range(1, options.repeats + 1)
        ]
        rows.append(about | sorted(runs, key=lambda run: run["tokens_per_s"])[len(runs) // 2])
    finally:
        engine.close()


def sync(options: argparse.Namespace, rows: Rows) -> None:
    """Qwen3-8B's parameters from one process's GPU memory into vLLM's, and read back."""
    arch, contract = cases.qwen3_8b(options.layers), cases.contract("fp8_linear_kv")
    settings = cases.options(gpu_memory_utilization=0.5, kv_cache_gib=4.0, graphs=False)
    _prepare(contract, settings)
    engine = cases.start(arch, contract, settings, 16, rows)
    try:
        policy = cases.random_policy(arch, contract, own_layers=arch.num_layers)
        for _ in range(5):
            measured = cases.synchronise(engine, policy)
            rows.append({"kind": "sync", "model": "qwen3-8b", "precision": "fp8_linear_kv", **measured})
    finally:
        engine.close()


def calibration(options: argparse.Namespace, rows: Rows) -> None:
    """What both sources of the scales of Q, K and V cost beside a rollout of Qwen3-8B's shape."""
    arch, contract = cases.qwen3_8b(options.layers), cases.contract("fp8_linear_kv")
    settings = cases.options(gpu_memory_utilization=0.85, max_model_len=12_288)
    _prepare(contract, settings)
    engine = cases.start(arch, contract, settings, options.requests, rows)
    try:
        cases.synchronise(engine, cases.random_policy(arch, contract, own_layers=1))
        torch.cuda.empty_cache()
        cases.timed_rollout(engine, options.requests, options.prompt, min(32, options.generated), seed=0)
        for row in calibration_rows(engine, arch, "qwen3-8b", options.requests, options.prompt, options.generated):
            rows.append(row)
    finally:
        engine.close()


def _prepare(contract: Any, settings: Any) -> None:
    """Environment of the engine; DeepGEMM compiles what is used, and every shape is used once before it is timed."""
    build = cases.build()
    suggested = {**suggested_environment(1, build), "VLLM_DEEP_GEMM_WARMUP": "skip"}
    set_variables(required_environment(contract, settings, build), suggested)


CORRECTNESS: dict[str, Callable[[argparse.Namespace, Rows], None]] = {
    f.__name__: f for f in (adapter, exactness, exactness_invariant, logprobs, memory)
}
THROUGHPUT: dict[str, Callable[[argparse.Namespace, Rows], None]] = {
    f.__name__: f for f in (bf16, fp8_linear_kv, sync, fp8_linear, fp8_linear_kv_invariant)
}
MEASUREMENTS = {**CORRECTNESS, **THROUGHPUT, calibration.__name__: calibration}

if __name__ == "__main__":
    main()
