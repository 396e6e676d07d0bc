"""Check the vLLM engine on one Hopper GPU, and time its sync; rollouts are timed by rollout_hopper.py.

    python -m benchmarks.vllm_hopper --out FOLDER                       everything, what is timed last
    python -m benchmarks.vllm_hopper --out FOLDER exactness step_costs  some of it

Every measurement is a process of its own and writes FOLDER/NAME.json: its rows, or the error that ended it. None is
started after --seconds. Weights are random; load and compile times are rows of their own.

`step_costs` measures what the calibration of Q, K and V costs beside an engine that is loaded already.
A source costs up to three things, each measured where it runs:

    forward   of `fresh_pass` alone: the engine's own prefill of as many sequences of the step as are read, and one
              token; the faster of two runs. `logprob_pass` uses a forward that is there anyway.
    collect   amax (and the histogram, for percentiles) of Q, K and V of all layers and tokens that are read, on tensors
              of the model's shape that are larger than the L2 cache: GPU seconds from a CUDA graph, and apart from them
              the seconds in which Python queues the same launches, which a real pass hides behind its own kernels.
    scales    from the tallies on the GPU to scales that were written into vLLM's buffers and read back.

The step is its rollout alone: an update, log-probs and training come on top, so every share is an upper bound.

Predictions, written before the first measurement, for Qwen3-8B's shape and 256 x (512 + 1024), a rollout of 17.5 s:

    logprob_pass, amax         0.05 s, 0.3 %: 174 GB are read once, at 3.9 TB/s
    logprob_pass, percentile   0.40 s, 2.3 %: a histogram takes 3.5 instructions an element, ten times as long as memory
    fresh_pass, all            7 s, 40 %: 256 x 512 tokens alone are prefilled in 1.95 s
    fresh_pass, 8              0.25 s, 1.4 %
    fresh_pass, 2              0.08 s, 0.5 %
    scales                     0.02 s: a copy of 2 MB, 108 histograms, two calls of vLLM's worker
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from torch import Tensor

from benchmarks import vllm_hopper_cases as cases
from benchmarks.harness import ROOT, Row, RowFile, ended, provenance, start, write_rows
from fp8core.config.engines import VllmConfig
from fp8core.config.precision import PrecisionContract
from fp8core.models.architecture import Architecture
from fp8core.models.weights import in_one_buffer
from fp8core.numerics.kv_scales import (
    AmaxStatistics,
    KvStatistics,
    LayerScales,
    average_amax,
    covered_amax,
    scales_from_statistics,
)
from fp8core.processes.variables import set_variables
from fp8core.rollout.vllm.settings import required_environment, suggested_environment

# Of the seconds and the memory of a whole GPU.
ALONE = ("sleep_wake", "step_costs")


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
        return name, options.out, start(command, log)


def _finish(started: Sequence[tuple[str, Path, "subprocess.Popen[bytes]"]], deadline: float) -> None:
    for name, out, process in started:
        code = ended(process, deadline)
        result, log = out / f"{name}.json", out / f"{name}.log"
        rows: list[Row] = json.loads(result.read_text()) if result.exists() else []
        if code != 0:
            rows.append({"kind": "error", "measurement": name, "error": f"ended with {code}", **provenance()})
        for row in rows:
            if row["kind"] == "error":
                # Errors inside vLLM are in its processes' output alone.
                row["log"] = log.read_text(errors="replace")[-12_000:]
        write_rows(result, rows)
        log.unlink()
        print(result.read_text(), flush=True)


def _measure(options: argparse.Namespace) -> None:
    """One measurement in this process; an error is its result."""
    (name,) = options.names
    began, rows = time.monotonic(), RowFile(options.out / f"{name}.json", measurement=name)
    try:
        MEASUREMENTS[name](options, rows)
    except Exception as error:  # noqa: BLE001 - one failure must not hide the measurements beside it
        rows.fail(error)
    rows.append({"kind": "measurement", "seconds": round(time.monotonic() - began, 1)})


def adapter(options: argparse.Namespace, rows: RowFile) -> None:
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


def exactness(options: argparse.Namespace, rows: RowFile) -> None:
    """Test which surroundings leave a request's tokens and log-probs as they are, by default."""
    _exactness(rows, cases.contract("fp8_linear_kv"), cases.options(kv_cache_gib=8.0))


def exactness_invariant(options: argparse.Namespace, rows: RowFile) -> None:
    """The same with VLLM_BATCH_INVARIANT."""
    _exactness(rows, cases.contract("fp8_linear_kv"), cases.options(batch_invariant=True, kv_cache_gib=8.0))


def exactness_aligned(options: argparse.Namespace, rows: RowFile) -> None:
    """The same with layers that are the trainer's."""
    _exactness(rows, cases.aligned(cases.contract("fp8_linear_kv")), cases.options(model="aligned", kv_cache_gib=8.0))


def _exactness(rows: RowFile, contract: PrecisionContract, settings: VllmConfig) -> None:
    batch_invariant = settings.batch_invariant
    prepare(contract, settings)
    policy = cases.small_policy(contract, version=0)
    rows.append({"kind": "checkpoint", "bytes_equal_shipped": cases.checkpoint_equals(policy)})

    def started(most: int) -> Any:
        return cases.start(policy.arch, contract, settings, most, rows)

    def described(engine: Any) -> Iterator[dict[str, Any]]:
        yield {"kind": "described", "batch_invariant": batch_invariant, **cases.summary(engine.describe())}
        yield {"kind": "logprob_error", "batch_invariant": batch_invariant, **cases.logprob_error(engine, policy)}

    for row in cases.exactness_rows(started, policy, batch_invariant, described):
        rows.append(row)


def logprobs(options: argparse.Namespace, rows: RowFile) -> None:
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


def memory(options: argparse.Namespace, rows: RowFile) -> None:
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


def step_costs(options: argparse.Namespace, rows: RowFile) -> None:
    """Beside a rollout of Qwen3-8B's shape: an update from another process's GPU memory, and calibration."""
    arch, contract = cases.qwen3_8b(options.layers), cases.contract("fp8_linear_kv")
    settings = cases.options(gpu_memory_utilization=0.7, max_model_len=2048)
    prepare(contract, settings)
    engine = cases.start(arch, contract, settings, 256, rows)
    try:
        about = {
            "kind": "sync",
            "model": "qwen3-8b",
            "precision": "fp8_linear_kv",
            **provenance(vllm=cases.build().version),
        }
        for one_buffer in (False, True):
            policy = cases.random_policy(arch, contract, own_layers=arch.num_layers)
            if one_buffer:
                policy = replace(policy, tensors=in_one_buffer(policy.tensors))
            for _ in range(4):
                quantised = {"one_buffer": one_buffer, "quantise_seconds": cases.quantise_seconds(policy)}
                rows.append(about | quantised | cases.synchronise(engine, policy))
            del policy
            torch.cuda.empty_cache()
        cases.timed_rollout(engine, 256, 512, 32, seed=0)
        for row in calibration_rows(engine, arch, "qwen3-8b", 256, 512, 1024):
            rows.append(row)
    finally:
        engine.close()


def prepare(contract: PrecisionContract, settings: VllmConfig) -> None:
    """Environment of the engine; DeepGEMM compiles what is used, and every shape is used once before it is timed."""
    build = cases.build()
    suggested = suggested_environment(1, build)
    set_variables(required_environment(contract, settings, build), suggested)


def sleep_wake(options: argparse.Namespace, rows: RowFile) -> None:
    """At Qwen3-8B's shape, with `large_ledger`'s cache: falling asleep, an update that wakes, one that need not."""
    arch, contract = cases.qwen3_8b(options.layers), cases.contract("fp8_linear_kv")
    settings = cases.options(sleep=True, kv_cache_gib=14.5, max_model_len=2048)
    prepare(contract, settings)
    engine = cases.start(arch, contract, settings, 192, rows)
    try:
        policy = cases.random_policy(arch, contract, own_layers=arch.num_layers)
        policy = replace(policy, tensors=in_one_buffer(policy.tensors))
        about = {"kind": "sleep", "model": "qwen3-8b", "precision": "fp8_linear_kv", "layers": options.layers}
        for cycle in range(4):
            slept = cases.sleep_cycle(engine, policy)
            awake, began = cases.synchronise(engine, policy), time.perf_counter()
            engine.describe()
            described = {"describe_seconds": round(time.perf_counter() - began, 4)}
            rows.append(about | {"cycle": cycle, **slept, "update_seconds": awake["seconds"], **described})
    finally:
        engine.close()


MICRO_BATCH_TOKENS = 16_384
# Three of 200 MB each: no layer finds its input in the L2 cache.
INPUTS = 3
STATISTICS: dict[str, tuple[type[KvStatistics], float]] = {
    "amax": (AmaxStatistics, 100.0),
    "percentile": (KvStatistics, 99.99),
}
Heads = tuple[Tensor, Tensor, Tensor]


def calibration_rows(
    engine: Any, arch: Architecture, model: str, requests: int, prompt: int, generated: int
) -> Iterator[Row]:
    """Rows of kind `calibration` for both sources; the engine has an FP8 cache and holds a policy.

    Leaves the engine with the scales it had. Needs 1 GB of GPU memory in this process, and for Qwen3-8B's shape and
    256 x (512 + 1024) about 40 seconds.
    """
    check_kernels(arch)
    held = [LayerScales(**layer) for layer in engine.describe()["scales"]]
    length = prompt + generated
    step = cases.timed_rollout(engine, requests, prompt, generated, seed=21)["seconds"]
    sizes = {"requests": requests, "prompt": prompt, "generated": generated}
    about = {
        "kind": "calibration",
        "model": model,
        "layers": arch.num_layers,
        **sizes,
        **provenance(vllm=cases.build().version),
    }
    for statistic in STATISTICS:
        found = calibration_costs(engine, arch, held, statistic, 0.0, requests * length, step)
        yield about | found | {"source": "logprob_pass"}
    for i, sequences in enumerate(sorted({2, 8, requests})):
        forward = min(cases.timed_rollout(engine, sequences, length, 1, seed)["seconds"] for seed in (22 + i, 32 + i))
        found = calibration_costs(engine, arch, held, "amax", forward, sequences * length, step)
        yield about | found | {"source": "fresh_pass", "sequences": sequences}


def calibration_costs(
    engine: Any, arch: Architecture, held: list[LayerScales], statistic: str, forward: float, tokens: int, step: float
) -> Row:
    """Seconds of the parts, of all together, and their share of a step; `forward` is known already."""
    statistics, collect, queued = collected(arch, statistic, tokens, held)
    began = time.perf_counter()
    scales = scales_of(statistics, STATISTICS[statistic][1])
    written(engine, scales)
    scaling = time.perf_counter() - began
    written(engine, held)
    seconds = forward + collect + scaling
    return {
        "statistic": statistic,
        "tokens": tokens,
        "forward_seconds": round(forward, 4),
        "collect_seconds": round(collect, 4),
        "collect_queue_seconds": round(queued, 4),
        "scales_seconds": round(scaling, 4),
        "seconds": round(seconds, 4),
        "step": "its rollout alone",
        "step_seconds": step,
        "share_of_step": round(seconds / step, 6),
    }


def collected(
    arch: Architecture, statistic: str, tokens: int, scales: list[LayerScales]
) -> tuple[KvStatistics, float, float]:
    """Statistics of all layers over at least this many tokens, GPU seconds of it, and seconds to queue its launches."""
    size = min(MICRO_BATCH_TOKENS, tokens)
    inputs = [heads(arch, size, seed) for seed in range(INPUTS)]
    valid = torch.ones(1, size, dtype=torch.bool, device="cuda")
    statistics = STATISTICS[statistic][0](arch.num_layers, "cuda")

    def pass_of_all_layers() -> None:
        for layer, layer_scales in enumerate(scales):
            statistics.observe(layer, inputs[layer % INPUTS], valid, layer_scales)

    pass_of_all_layers()  # compiles
    micro_batches = -(-tokens // size)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(micro_batches):
        pass_of_all_layers()
    queued = time.perf_counter() - began
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pass_of_all_layers()
    return statistics, _gpu_seconds(graph, micro_batches), queued


def heads(arch: Architecture, tokens: int, seed: int) -> Heads:
    """Random Q, K and V in BF16 [1, heads, tokens, d], as they lie in the output of a fused projection."""
    generator = torch.Generator("cuda").manual_seed(seed)
    counts = [arch.num_heads, arch.num_kv_heads, arch.num_kv_heads]
    shape = (1, tokens, sum(counts), arch.head_dim)
    fused = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
    q, k, v = (part.transpose(1, 2) for part in fused.split(counts, dim=2))
    return q, k, v


def scales_of(statistics: KvStatistics, percentile: float) -> list[LayerScales]:
    """The computation of `tasks.calibrate` with the defaults of `calibration`."""
    current = covered_amax(statistics.histograms(), percentile)
    return scales_from_statistics(average_amax(current, current, 0.5), 2.0, "pow2")


def written(engine: Any, scales: list[LayerScales]) -> None:
    """Write scales into vLLM's buffers as an update does at its end, and read them back."""
    engine.ask_policy("set_scales", [[layer.q, layer.k, layer.v] for layer in scales])
    found = engine.ask_policy("scales")
    assert [LayerScales(*layer) for layer in found] == scales, "vLLM holds other scales than were written"


def check_kernels(arch: Architecture) -> None:
    """The kernels and the reference compute equal statistics of equal tensors."""
    on_gpu = heads(arch, 257, seed=99)
    valid = torch.arange(257, device="cuda")[None] % 3 > 0
    scales = LayerScales(2.0**-8, 2.0**-8, 2.0**-8)
    for kind, _ in STATISTICS.values():
        here, there = kind(1), kind(1, "cuda")
        q, k, v = (part.cpu() for part in on_gpu)
        here.observe(0, (q, k, v), valid.cpu(), scales)
        there.observe(0, on_gpu, valid, scales)
        assert there.amax() == here.amax()
        assert there.histograms() == here.histograms()
        assert there.saturated_share() == here.saturated_share() > 0


def _gpu_seconds(graph: torch.cuda.CUDAGraph, times: int) -> float:
    """GPU time of as many replays, from event to event, after one to warm up."""
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1000


MEASUREMENTS: dict[str, Callable[[argparse.Namespace, RowFile], None]] = {
    f.__name__: f
    for f in (adapter, exactness, exactness_invariant, exactness_aligned, logprobs, memory, sleep_wake, step_costs)
}

if __name__ == "__main__":
    main()
