"""Check the vLLM engine on one Hopper GPU, and time its sync; rollouts are timed by rollout_hopper.py.

    python benchmarks/vllm_hopper.py --out FOLDER                       everything, what is timed last
    python benchmarks/vllm_hopper.py --out FOLDER exactness step_costs  some of it

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
from benchmarks.calibration_hopper import calibration_rows, provenance
from flows.environment import set_variables
from fp8core.config.precision import PrecisionContract
from fp8core.config.vllm import VllmConfig
from fp8core.rollout.vllm_settings import required_environment, suggested_environment
from fp8core.store.versions import git_state, hardware, library_versions

ROOT = Path(__file__).parents[1]
Rows = list[dict[str, Any]]
# Of the seconds and the memory of a whole GPU.
ALONE = ("nap", "step_costs")


def main() -> None:
    options = _options()
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.inside:
        _measure(options)
        return
    deadline = time.monotonic() + options.seconds
    names = options.names or list(MEASUREMENTS)
    _finish([_start(name, options) for name in names if name not in ALONE], deadline)
    for name in ALONE:
        if name in names and time.monotonic() < deadline:
            _finish([_start(name, options)], deadline)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the vLLM engine on one Hopper GPU.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MEASUREMENTS))
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=470.0, help="budget; what runs longer is ended")
    parser.add_argument("--layers", type=int, default=36, help="of Qwen3-8B's 36")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _start(name: str, options: argparse.Namespace) -> tuple[str, Path, subprocess.Popen[bytes]]:
    # A measurement that is ended leaves no result, and an earlier one must not be taken for it.
    (options.out / f"{name}.json").unlink(missing_ok=True)
    flags = [f"--{key}={getattr(options, key)}" for key in ("out", "layers")]
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
            row["properties"] = {found.get("name"): found.get("value") for found in case.iter("property")}
            rows.append(row | ({} if problem is None else {"problem": (problem.text or "")[-1500:]}))


def exactness(options: argparse.Namespace, rows: Rows) -> None:
    """Which surroundings leave a request's tokens and log-probs as they are, by default."""
    _exactness(rows, cases.contract("fp8_linear_kv"), cases.options(kv_cache_gib=8.0))


def exactness_invariant(options: argparse.Namespace, rows: Rows) -> None:
    """The same with VLLM_BATCH_INVARIANT."""
    _exactness(rows, cases.contract("fp8_linear_kv"), cases.options(batch_invariant=True, kv_cache_gib=8.0))


def exactness_aligned(options: argparse.Namespace, rows: Rows) -> None:
    """The same with layers that are the trainer's."""
    _exactness(rows, cases.aligned(cases.contract("fp8_linear_kv")), cases.options(model="aligned", kv_cache_gib=8.0))


def _exactness(rows: Rows, contract: PrecisionContract, settings: VllmConfig) -> None:
    batch_invariant = settings.batch_invariant
    prepare(contract, settings)
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
        prepare(contract, settings)
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
    prepare(contract, settings)
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


def step_costs(options: argparse.Namespace, rows: Rows) -> None:
    """Beside a rollout of Qwen3-8B's shape: an update from another process's GPU memory, and calibration."""
    arch, contract = cases.qwen3_8b(options.layers), cases.contract("fp8_linear_kv")
    settings = cases.options(gpu_memory_utilization=0.7, max_model_len=2048)
    prepare(contract, settings)
    engine = cases.start(arch, contract, settings, 256, rows)
    try:
        about = {"kind": "sync", "model": "qwen3-8b", "precision": "fp8_linear_kv", **provenance()}
        for one_buffer in (False, True):
            policy = cases.random_policy(arch, contract, own_layers=arch.num_layers)
            if one_buffer:
                policy = cases.in_one_buffer(policy)
            for _ in range(4):
                quantised = {"one_buffer": one_buffer, "quantise_seconds": cases.quantise_seconds(policy)}
                rows.append(about | quantised | cases.synchronise(engine, policy))
            del policy
            torch.cuda.empty_cache()
        cases.timed_rollout(engine, 256, 512, 32, seed=0)
        rows += calibration_rows(engine, arch, "qwen3-8b", 256, 512, 1024)
    finally:
        engine.close()


def prepare(contract: PrecisionContract, settings: VllmConfig) -> None:
    """Environment of the engine; DeepGEMM compiles what is used, and every shape is used once before it is timed."""
    build = cases.build()
    suggested = suggested_environment(1, build)
    set_variables(required_environment(contract, settings, build), suggested)


def nap(options: argparse.Namespace, rows: Rows) -> None:
    """At Qwen3-8B's shape, with `large_ledger`'s cache: falling asleep, an update that wakes, one that need not."""
    arch, contract = cases.qwen3_8b(options.layers), cases.contract("fp8_linear_kv")
    settings = cases.options(sleep=True, kv_cache_gib=14.5, max_model_len=2048)
    prepare(contract, settings)
    engine = cases.start(arch, contract, settings, 192, rows)
    try:
        policy = cases.in_one_buffer(cases.random_policy(arch, contract, own_layers=arch.num_layers))
        about = {"kind": "sleep", "model": "qwen3-8b", "precision": "fp8_linear_kv", "layers": options.layers}
        for cycle in range(4):
            slept = cases.sleep_cycle(engine, policy)
            awake, began = cases.synchronise(engine, policy), time.perf_counter()
            engine.describe()
            described = {"describe_seconds": round(time.perf_counter() - began, 4)}
            rows.append(about | {"cycle": cycle, **slept, "update_seconds": awake["seconds"], **described})
    finally:
        engine.close()


MEASUREMENTS: dict[str, Callable[[argparse.Namespace, Rows], None]] = {
    f.__name__: f
    for f in (adapter, exactness, exactness_invariant, exactness_aligned, logprobs, memory, nap, step_costs)
}

if __name__ == "__main__":
    main()
