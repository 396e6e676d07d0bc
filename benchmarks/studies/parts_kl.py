"""What each part of FP8 costs the pretrained checkpoint, under the default recipe and under powers of two.

    python -m benchmarks.real_checkpoint build/real
    python -m benchmarks.studies.parts_kl build/real

The texts are the first problems of harder.jsonl: 512 for everything together, 64 by part. `fp8-grpo evaluate --parts`
computes the same.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import RESULTS, RowFile, table
from fp8core.config.load import load_config
from fp8core.data.source import read_rows
from fp8core.evaluation.parts import part_costs
from fp8core.numerics.recipe import RecipeName
from fp8core.progress import Part
from fp8core.run.measurement import read_subjects

RULES: tuple[RecipeName, ...] = ("fp32_activations", "pow2")
SIZES = {512: ("all",), 64: ("rounding", "activations", "weights", "cache", "attention", "all")}
"""Texts: the parts that are measured on them."""
PREDICTED = {"fp32_activations": {"nats": 0.034, "worst": 0.065}, "pow2": {"nats": 0.115, "worst": 0.45}}
"""Of `all` on 512 texts, before they were measured; from fake quantisation of 64 of them in another library.

That quantised outputs of norms in FP32. Powers of two cost less than half of it where they are BF16 first, as in every
engine: massive activations are rounded another way.
"""


def main() -> None:
    """Measure, keep and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="has model/ and harder.jsonl")
    parser.add_argument("--texts", type=int, nargs="+", choices=SIZES, default=[*SIZES], help="sizes to measure")
    parser.add_argument("--out", type=Path, default=RESULTS / "parts_kl.json", help="file for the rows")
    given = parser.parse_args()
    torch.set_num_threads(1)
    file = RowFile(given.out, model="SmolLM2-135M-Instruct")
    for texts in given.texts:
        for rule in RULES:
            file.append(parts_row(given.folder, rule, texts, SIZES[texts]))
            print(parts_table(file.rows[-1]), flush=True)


def parts_row(folder: Path, rule: RecipeName, count: int, names: Sequence[str]) -> dict[str, Any]:
    """The costs of these parts, where the recipe has them, on the first texts of the file."""
    settings = {
        "model": str(folder / "model"),
        "data.source": str(folder / "harder.jsonl"),
        "precision.scale_rule": rule,
    }
    config = load_config("real", settings)
    subjects, texts = read_subjects(config, read_rows(config.data)[:count])
    subjects = replace(subjects, parts={name: one for name, one in subjects.parts.items() if name in names})
    with Part(f"{rule}, {count} texts", print) as part:
        costs = part_costs(subjects, texts, part)
    row = {"kind": "parts_kl", "scale_rule": rule, "attention": config.precision.recipe.attention, **asdict(costs)}
    return row | ({"predicted": PREDICTED[rule]} if names == SIZES[512] else {})


def parts_table(row: dict[str, Any]) -> str:
    """KL from BF16 in nats a token by part, and the shift of the right answer's log-probability."""
    header = [
        f"{row['scale_rule']}, {row['texts']} texts",
        "KL",
        "median",
        "worst text",
        "same choice",
        "answers",
        "shift",
    ]
    names = ("nats", "median", "worst", "same_choice", "answer_nats", "answer_shift")
    return table(header, [[part, *(f"{cost[name]:.4f}" for name in names)] for part, cost in row["parts"].items()])


if __name__ == "__main__":
    main()
