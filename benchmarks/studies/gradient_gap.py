"""A reason for gradients that differ by per cents on equal weights: a token whose ratio lies at a bound of the clip.

    python -m benchmarks.studies.gradient_gap                  measure on this CPU, in FP32, and print the table
    python -m benchmarks.studies.gradient_gap --out F.json     and keep the rows

A last bit of its log-prob decides whether such a token takes part in the gradient. The models are the dense ones of
`megatron_hopper`'s parity, with the batch of its rows of 2026. The tokens nearest to a bound are put on the other side
of it, one after another. The distance that this moves the gradient may occur between two trainers that compute the
same.
"""

import argparse
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import megatron_hopper as cases
from benchmarks.harness import provenance, table, write_rows
from benchmarks.megatron_hopper import gradient_difference
from fp8core.config.loss import LossConfig
from fp8core.rl.batch import RolloutBatch

FAMILIES, FLIPPED = ("qwen3", "llama"), (1, 2, 3)


def main() -> None:
    """Measure, keep and print."""
    parser = argparse.ArgumentParser(description="How far tokens at a bound of the clip move the gradient.")
    parser.add_argument("--out", type=Path, help="file for the rows")
    out: Path | None = parser.parse_args().out
    torch.set_num_threads(1)
    rows = [row for family in FAMILIES for row in gap_rows(family)]
    if out is not None:
        write_rows(out, rows)
    print(gap_table(rows))


def gap_rows(family: str) -> list[dict[str, Any]]:
    """A row for each number of tokens that are put on the other side."""
    config, arch = cases.configuration("fp32"), cases.small(family)
    weights, batch = cases.small_policy(arch), cases.random_batch(arch, sequences=8, prompt=40, completion=88)
    before = cases.in_fp32(config, arch, weights, batch)
    distances = to_bound(before.logprobs, batch, config.loss)
    nearest = distances.abs().flatten().sort().values
    rows = []
    for count in FLIPPED:
        after = cases.in_fp32(config, arch, weights, flipped(batch, distances, count))
        pairs = {name: (after.gradients[name], gradient) for name, gradient in before.gradients.items()}
        about = {"kind": "gradient_gap", "model": family, "tokens": int(batch.mask.sum()), "flipped": count}
        about |= {"within_nats": float(nearest[count - 1]), **gradient_difference(pairs)}
        rows.append(about | provenance())
    return rows


def to_bound(logprobs: Tensor, batch: RolloutBatch, loss: LossConfig) -> Tensor:
    """Nats from a token's log-ratio to the bound that its advantage may cut it off at [B, C]; infinite where masked."""
    ratios = logprobs - batch.old_logprobs
    bounds = torch.where(batch.advantages > 0, math.log(1 + loss.clip_high), math.log(1 - loss.clip_low))
    return (ratios - bounds[:, None]).masked_fill(~batch.mask, math.inf)


def flipped(batch: RolloutBatch, distances: Tensor, count: int) -> RolloutBatch:
    """The batch with the `count` tokens nearest to their bound as far beyond it as they were before it."""
    chosen = distances.abs().flatten().argsort()[:count]
    old = batch.old_logprobs.clone()
    old.view(-1)[chosen] += 2 * distances.flatten()[chosen]
    return replace(batch, old_logprobs=old)


def gap_table(rows: list[Mapping[str, Any]]) -> str:
    """Change of the gradient, beside the distance of the tokens to their bound."""
    lines = []
    for row in rows:
        near = [row["model"], f"{row['flipped']} of {row['tokens']}", f"{row['within_nats']:.4f}"]
        most = f"{row['gradient_worst']:.4f}, {row['gradient_worst_name'].removeprefix('model.')}"
        lines.append([*near, f"{row['gradient_relative']:.4f}", most])
    return table(["model", "tokens at a bound, of", "within, nats", "gradients, relative", "most, in"], lines)


if __name__ == "__main__":
    main()
