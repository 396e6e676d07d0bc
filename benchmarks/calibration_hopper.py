"""What the calibration of Q, K and V costs on one Hopper GPU, beside an engine that is already loaded.

    python benchmarks/vllm_hopper.py --out FOLDER step_costs
    python -m benchmarks.calibration_hopper benchmarks/results/step_costs_hopper.json     # prints it as a table

or `calibration_rows` with an engine at hand. A source costs up to three things, each measured where it runs:

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
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import vllm_hopper_cases as cases
from fp8core.models.architecture import Architecture
from fp8core.numerics.kv_scales import (
    AmaxStatistics,
    KvStatistics,
    LayerScales,
    average_amax,
    covered_amax,
    scales_from_statistics,
)
from fp8core.store.versions import git_state, library_versions

ROOT = Path(__file__).parents[1]
MICRO_BATCH_TOKENS = 16_384
# Three of 200 MB each: no layer finds its input in the L2 cache.
INPUTS = 3
STATISTICS: dict[str, tuple[type[KvStatistics], float]] = {
    "amax": (AmaxStatistics, 100.0),
    "percentile": (KvStatistics, 99.99),
}
Row = dict[str, Any]
Heads = tuple[Tensor, Tensor, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description="Print what calibration costs, from a stored result.")
    parser.add_argument("result", type=Path)
    print(calibration_table(json.loads(parser.parse_args().result.read_text())))


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
    about = {"kind": "calibration", "model": model, "layers": arch.num_layers, **sizes, **provenance()}
    for statistic in STATISTICS:
        found = measured(engine, arch, held, statistic, 0.0, requests * length, step)
        yield about | found | {"source": "logprob_pass"}
    for i, sequences in enumerate(sorted({2, 8, requests})):
        forward = min(cases.timed_rollout(engine, sequences, length, 1, seed)["seconds"] for seed in (22 + i, 32 + i))
        found = measured(engine, arch, held, "amax", forward, sequences * length, step)
        yield about | found | {"source": "fresh_pass", "sequences": sequences}


def measured(
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
    """What `tasks.calibrate` does with the defaults of `calibration`."""
    current = covered_amax(statistics.histograms(), percentile)
    return scales_from_statistics(average_amax(current, current, 0.5), 2.0, "pow2")


def written(engine: Any, scales: list[LayerScales]) -> None:
    """Write scales into vLLM's buffers as an update does at its end, and read them back."""
    engine._call("policy_set_scales", [[layer.q, layer.k, layer.v] for layer in scales])
    found = engine._call("policy_read_back", {})["scales"]
    assert [LayerScales(*layer) for layer in found] == scales, "vLLM holds other scales than were written"


def check_kernels(arch: Architecture) -> None:
    """The kernels and the reference see the same in the same tensors."""
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


def provenance() -> Row:
    """Commit, versions and command, as every row holds them."""
    versions = library_versions() | {"vllm": cases.build().version}
    command = " ".join(["python benchmarks/vllm_hopper.py", *sys.argv[1:]])
    return {"commit": git_state(ROOT).get("commit"), "versions": versions, "command": command}


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


def calibration_table(rows: Sequence[Row]) -> str:
    """The rows of kind `calibration` as Markdown."""
    columns = ("forward", "collect", "scales")
    lines = ["| source, statistic | tokens read | forward, ms | collect, ms | scales, ms | share of the rollout |"]
    lines.append("| --- " * 6 + "|")
    for row in rows:
        if row["kind"] == "calibration":
            read = f", {row['sequences']} rollouts" if "sequences" in row else ""
            parts = " | ".join(f"{row[f'{name}_seconds'] * 1000:,.0f}" for name in columns)
            share = f"{row['share_of_step']:.2%}"
            lines.append(f"| {row['source']}, {row['statistic']}{read} | {row['tokens']:,} | {parts} | {share} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
