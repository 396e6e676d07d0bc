"""Print the tables of docs/performance.md that were measured on a Hopper GPU, from the stored results.

    python benchmarks/hopper_tables.py

Reads benchmarks/results/*_hopper.json and benchmarks/results/vllm_hopper/*.json; each file, or each of its rows, holds
its commit and versions.
"""

import itertools
import json
import statistics

from benchmarks.rollout_tables import rollout_table, run_table, trace_tables
from benchmarks.stored import PRECISIONS, RESULTS, Row, stored

SHAPE = [16384, 4096]
# The variant of `attention_hopper.VARIANTS` that the engine runs: keys of a partition, blocks a multiprocessor, stages.
OURS = "ours 4096 3 2"
_VLLM = RESULTS / "vllm_hopper"
_EXACTNESS = {"exactness": "default", "exactness_invariant": "batch-invariant", "exactness_aligned": "aligned"}


def main() -> None:
    kernels = json.loads((RESULTS / "kernels_hopper.json").read_text())
    rollouts = stored("rollout_hopper")
    tables = [quantiser_table(kernels), fingerprint_table(kernels), rollout_table(rollouts), run_table(rollouts)]
    tables += [*trace_tables([*stored("decode_trace_hopper"), *rollouts]), attention_table(), decode_table()]
    tables += [sync_table(), expert_sync_table(stored("sync_hopper"))]
    tables += [exactness_table(), logprob_table(), rounding_table()]
    print(*filter(None, tables), sep="\n\n")


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


def attention_table() -> str:
    """FlashAttention 3's decode alone: bytes of the cache a second."""
    lines = ["| FlashAttention 3, 256 requests | page | BF16, us | GB/s | FP8, us | GB/s |", "| --- " * 6 + "|"]
    rows = {(r["context"], r["page"], r["dtype"]): r for r in stored("attention_hopper") if r.get("splits") == 0}
    for context, page in sorted({key[:2] for key in rows}):
        pair = (rows[context, page, f"torch.{name}"] for name in ("bfloat16", "float8_e4m3fn"))
        numbers = " | ".join(f"{row['microseconds']:.0f} | {row['gb_per_s']:,}" for row in pair)
        lines.append(f"| {context:,} tokens each | {page} | {numbers} |")
    return "\n".join(lines)


def decode_table() -> str:
    """One layer's attention of a decode step over a paged cache: ours beside FlashAttention 3's."""
    columns = (("flash", "bfloat16"), ("flash", "float8_e4m3fn"), (OURS, "float8_e4m3fn"))
    lines = ["| requests x context | FlashAttention 3, BF16, us (GB/s) | FP8 | ours, FP8 | ours to FP8 |"]
    lines.append("| --- " * 5 + "|")
    cells: dict[tuple[int, int], dict[tuple[str, str], Row]] = {}
    for row in stored("attention_hopper"):
        if "splits" not in row:
            found = cells.setdefault((row["requests"], row["context"]), {})
            found[row["kernel"], row["dtype"].removeprefix("torch.")] = row
    for (requests, context), found in cells.items():
        numbers = [f"{found[key]['microseconds']:.0f} ({found[key]['gb_per_s']:,})" for key in columns]
        _, theirs, ours = (found[key]["microseconds"] for key in columns)
        lines.append(f"| {requests} x {context:,} | {' | '.join(numbers)} | {theirs / ours:.2f}x |")
    return "\n".join(lines)


def sync_table() -> str:
    """An update of Qwen3-8B's parameters from another process's GPU memory."""
    lines = ["| sync of 9.4 GB | quantise, ms | update, read-back included, ms | read-back, ms |", "| --- " * 4 + "|"]
    rows = [row for row in stored("step_costs_hopper") if row["kind"] == "sync"]
    for one_buffer, words in ((False, "651 tensors, each lent by itself"), (True, "all in one buffer")):
        found = [row for row in rows if row["one_buffer"] is one_buffer][1:]  # The first compiles.
        cells = (_middle(found, key) for key in ("quantise_seconds", "seconds", "readback_seconds"))
        lines.append(f"| {words} | {' | '.join(f'{1000 * cell:.0f}' for cell in cells)} |")
    return "\n".join(lines)


def expert_sync_table(rows: list[Row]) -> str:
    """Updates of Qwen3-30B-A3B's parameters, the middle one of a process; its first is left out."""
    same = [row for row in rows if row["kind"] == "sync" and row["model"] == "qwen3-30b-a3b"]
    lines = ["| sync of Qwen3-30B-A3B | GB | update, read-back included, ms | read-back, ms |", "| --- " * 4 + "|"]
    for _, group in itertools.groupby(same, lambda row: (row["shared_layers"], row["commit"], row["command"])):
        first, *later = group
        cells = [f"{1000 * _middle(later or [first], key):,.0f}" for key in ("seconds", "readback_seconds")]
        words = f"{first['tensors']:,} tensors, " + ("one layer's for all" if first["shared_layers"] else "all layers'")
        words += "" if later else ", the first update of a process"
        lines.append(f"| {words} | {first['bytes'] / 1e9:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def rounding_table() -> str:
    """Compiled vLLM against the reference with each of its rounding points."""
    lines = ["| compiled vLLM to the reference, nats | BF16 | FP8 linears |", "| --- " * 3 + "|"]
    rows = [r for r in stored("vllm_bisect_hopper") if r["part"] == "logprobs" and r["mode"] == "compiled"]
    for spread, points in itertools.product((1.0, 2.0), ("stepwise", "native", "kernels", "fused")):
        found = [
            row["mean"]
            for precision in ("bf16", "fp8_linear")
            for row in rows
            if (row["precision"], row["spread"], row["sides"][1]) == (precision, spread, f"reference {points}")
        ]
        weights = "ordinary weights" if spread == 1.0 else "twice the spread"
        lines.append(f"| {points}, {weights} | {found[0]:.4f} | {found[1]:.4f} |")
    return "\n".join(lines)


def exactness_table() -> str:
    """How many of a probe's 64 tokens and log-probs are equal to those of the probe alone, in the modes measured."""
    stored_modes = {name: mode for name, mode in _EXACTNESS.items() if (_VLLM / f"{name}.json").exists()}
    heads = " | ".join(f"{mode}: tokens, log-probs" for mode in stored_modes.values())
    lines = [f"| the probe | {heads} |", "| --- " * (1 + len(stored_modes)) + "|"]
    modes = [[row for row in _rows(name) if row["kind"] == "exactness"] for name in stored_modes]
    for rows in zip(*modes, strict=True):
        cells = " | ".join(f"{row['equal_tokens']}, {row['equal_logprobs']}" for row in rows)
        lines.append(f"| {rows[0]['surroundings']} | {cells} |")
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


def _middle(rows: list[Row], key: str) -> float:
    return statistics.median(row[key] for row in rows)


def _rows(name: str) -> list[Row]:
    rows: list[Row] = json.loads((_VLLM / f"{name}.json").read_text())["rows"]
    return rows


if __name__ == "__main__":
    main()
