"""Why gradients on equal weights may differ by per cents: a token whose importance ratio lies at a bound of the clip.

    python -m benchmarks.gradient_gap                  measure on this CPU, in FP32, and print the table
    python -m benchmarks.gradient_gap --out F.json     and keep the rows

A last bit of its log-prob decides whether such a token takes part in the gradient. For the dense models of
`megatron_hopper`'s parity, with the batch that its rows of 2026 were made of, the tokens nearest to a bound are put on
the other side of it, one after another: how far that moves the gradient is what a trainer may differ from another that
computes the same.
"""

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import megatron_cases as cases
from benchmarks.megatron_hopper import gradient_difference
from fp8core.config.run import LossConfig
from fp8core.rl.batch import RolloutBatch
from fp8core.store.versions import git_state, library_versions

FAMILIES, FLIPPED = ("qwen3", "llama"), (1, 2, 3)
ROOT = Path(__file__).parents[1]


def main() -> None:
    """Measure, keep and print."""
    parser = argparse.ArgumentParser(description="How far tokens at a bound of the clip move the gradient.")
    parser.add_argument("--out", type=Path, help="file for the rows")
    out: Path | None = parser.parse_args().out
    torch.set_num_threads(1)
    rows = [row for family in FAMILIES for row in gap_rows(family)]
    if out is not None:
        out.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


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
        rows.append(about | {"git": git_state(ROOT), "libraries": library_versions()})
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


def table(rows: list[Mapping[str, Any]]) -> str:
    """How far the gradient moves, beside how near the tokens were."""
    lines = ["| model | tokens at a bound, of | within, nats | gradients, relative | most, in |", "| --- " * 5 + "|"]
    for row in rows:
        cells = f"{row['flipped']} of {row['tokens']} | {row['within_nats']:.4f} | {row['gradient_relative']:.4f}"
        most = f"{row['gradient_worst']:.4f}, {row['gradient_worst_name'].removeprefix('model.')}"
        lines.append(f"| {row['model']} | {cells} | {most} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
