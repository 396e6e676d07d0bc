"""Print the tables of docs/performance.md that were measured on a Hopper GPU, from the stored results.

    python benchmarks/hopper_tables.py

Reads benchmarks/results/kernels_hopper.json (of kernels_hopper.py) and benchmarks/results/vllm_hopper/*.json (of
vllm_hopper.py); each file holds its commit, versions and machine.
"""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
SHAPE = [16384, 4096]
PRECISIONS = {
    "bf16": "BF16",
    "fp8_linear": "FP8 linears",
    "fp8_linear_kv": "FP8 linears, cache and attention",
    "fp8_linear_kv_invariant": "the same, batch-invariant",
}

Row = dict[str, Any]


def main() -> None:
    kernels = json.loads((RESULTS / "kernels_hopper.json").read_text())
    print(quantiser_table(kernels), fingerprint_table(kernels), sep="\n\n", end="\n\n")
    print(rollout_table(), exactness_table(), logprob_table(), sep="\n\n")


def quantiser_table(kernels: Row) -> str:
    """Quantisers of a BF16 [16384, 4096] tensor: ours beside others."""
    lines = ["| quantiser, BF16 16384 x 4096 | rule | microseconds | GB/s | codes that differ |", "| --- " * 5 + "|"]
    rows = [*kernels["quantise"], *kernels["peers"], *kernels["compile"]]  # Some are of whole models.
    for row in rows:
        if row.get("shape") == SHAPE and row["dtype"] == "torch.bfloat16" and row["kernel"] != "copy":
            differ = row.get("codes_that_differ", 0)
            numbers = f"{row['microseconds']:.0f} | {row['gb_per_s']:,.0f} | {differ:,}"
            lines.append(f"| {row['kernel']} | {row['rule']} | {numbers} |")
    return "\n".join(lines)


def fingerprint_table(kernels: Row) -> str:
    """Fingerprints of 8.2 GB in 325 tensors."""
    lines = ["| fingerprint of 8.2 GB in 325 tensors | milliseconds | GB/s |", "| --- " * 3 + "|"]
    timed = [row for row in kernels["fingerprint"] if "microseconds" in row]
    lines += [f"| {row['kernel']} | {row['microseconds'] / 1000:.1f} | {row['gb_per_s']:,.0f} |" for row in timed]
    return "\n".join(lines)


def rollout_table() -> str:
    """Tokens per second of Qwen3-8B's shape, and what a sync costs."""
    sizes = "256 x (512 + 1024)"
    lines = [f"| Qwen3-8B's shape, {sizes} | tokens/s | to BF16 | update and read-back, s | read-back, s |"]
    lines.append("| --- " * 5 + "|")
    found = {name: _rows(name) for name in PRECISIONS}
    base = next(row for row in found["bf16"] if row["kind"] == "rollout")["tokens_per_s"]
    for name, words in PRECISIONS.items():
        rollout = next(row for row in found[name] if row["kind"] == "rollout")
        sync = next(row for row in found[name] if row["kind"] == "sync")
        speed = rollout["tokens_per_s"]
        seconds = f"{sync['seconds']:.2f} | {sync['readback_seconds']:.3f}"
        lines.append(f"| {words} | {speed:,.0f} | {speed / base:.2f}x | {seconds} |")
    return "\n".join(lines)


def exactness_table() -> str:
    """How many of a probe's 64 tokens and log-probs are equal to those of the probe alone."""
    lines = ["| the probe | default: tokens, log-probs | batch-invariant: tokens, log-probs |", "| --- " * 3 + "|"]
    default, invariant = ([row for row in _rows(name) if row["kind"] == "exactness"] for name in _EXACTNESS)
    for ours, theirs in zip(default, invariant, strict=True):
        cells = [f"{row['equal_tokens']}, {row['equal_logprobs']}" for row in (ours, theirs)]
        lines.append(f"| {ours['surroundings']} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def logprob_table() -> str:
    """vLLM against the exact reference, on random weights."""
    lines = [
        "| nats | vLLM to reference, mean | largest | reference to its BF16, mean |",
        "| --- " * 4 + "|",
    ]
    for row in _rows("logprobs"):
        if row["kind"] == "logprob_error":
            numbers = f"{row['mean']:.3f} | {row['max']:.2f} | {row['reference_to_bf16_mean']:.3f}"
            lines.append(f"| {PRECISIONS[row['precision']]} | {numbers} |")
    return "\n".join(lines)


_EXACTNESS = ("exactness", "exactness_invariant")


def _rows(name: str) -> list[Row]:
    rows: list[Row] = json.loads((RESULTS / "vllm_hopper" / f"{name}.json").read_text())["rows"]
    return rows


if __name__ == "__main__":
    main()
