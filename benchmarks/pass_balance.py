"""How much longer the busiest rank computes than all do in the mean, by how rows are grouped into passes.

    python -m benchmarks.pass_balance

Counted, not timed: updates of 64 completions a rank of Qwen3-8B's shape, whose lengths are those of
`benchmarks.grpo_8gpu`. A rank computes whole passes of at most 16,384 tokens. `plain` fills one pass after another;
`even` is what the packed trainer does. A row of kind `pass_balance` for each number of ranks.
"""

import math
import random
import sys
from collections.abc import Sequence
from statistics import fmean

from benchmarks.grpo_8gpu import NEMO, ends_for
from benchmarks.harness import RESULTS, Row, provenance, table, write_rows
from benchmarks.large_ledger import QWEN3_8B
from fp8core.numerics.packed import packed_length
from fp8core.training.packed.masters import balanced
from fp8core.training.packed.trainer import pass_cost
from fp8core.training.packing import even_groups, row_groups
from fp8core.training.trainer import shares

RESULT = "pass_balance"
RANKS = (2, 4, 8, 16)
_TOKENS = 16384
_COMPLETIONS = 64
_PROMPT = 90
_UPDATES = 40


def main() -> int:
    """Count for each number of ranks; returns 0."""
    rows = [balance_row(ranks) for ranks in RANKS]
    write_rows(RESULTS / f"{RESULT}.json", rows)
    print(balance_table(rows))
    return 0


def balance_row(ranks: int) -> Row:
    """The mean and the largest excess over some updates, by how rows are grouped."""
    found: dict[str, list[float]] = {"plain": [], "even": []}
    for update in range(_UPDATES):
        lengths = drawn_lengths(_COMPLETIONS * ranks, update)
        share = min(_TOKENS, math.ceil(sum(lengths) / ranks))
        found["plain"].append(excess(lengths, list(row_groups(lengths, share)), ranks))
        found["even"].append(excess(lengths, even_groups(lengths, share, ranks), ranks))
    counted = {name: {"mean": fmean(each), "largest": max(each)} for name, each in found.items()}
    return {"kind": "pass_balance", "ranks": ranks, "updates": _UPDATES, **counted, **provenance()}


def drawn_lengths(rows: int, seed: int) -> list[int]:
    """Packed lengths of prompts with completions that end with one probability at each token."""
    size, draw = QWEN3_8B.vocab_size, random.Random(seed)
    end = ends_for(size, NEMO.longest, NEMO.mean) / size
    completions = (1 + int(math.log(1 - draw.random()) / math.log(1 - end)) for _ in range(rows))
    return [packed_length(_PROMPT + min(NEMO.longest, length)) for length in completions]


def excess(lengths: Sequence[int], groups: Sequence[slice], ranks: int) -> float:
    """The multiplications of the busiest rank over the mean of all, minus 1."""
    costs = [pass_cost(QWEN3_8B, lengths[rows]) for rows in groups]
    order = balanced(costs, ranks)
    own = [sum(costs[index] for index in order[share]) for share in shares(len(costs), ranks)]
    return max(own) / fmean(own) - 1


def balance_table(rows: Sequence[Row]) -> str:
    """One line for each number of ranks."""
    return table(
        ("ranks", "filled one after another: mean", "largest", "even: mean", "largest"),
        (
            (
                str(row["ranks"]),
                *(f"{row[how][which]:.1%}" for how in ("plain", "even") for which in ("mean", "largest")),
            )
            for row in rows
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
