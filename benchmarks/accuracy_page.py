"""Print the tables of docs/results/accuracy.md from stored rows, and draw its picture.

    python -m benchmarks.accuracy_page

Rows: parts_kl.json (`benchmarks.studies.parts_kl`), recipe_errors.json (commit db6f5a56 has its script), and
recipe_hopper.json: of `benchmarks.rollout_hopper` the engines qwen3-8b/fp8_linear_kv/aligned/{fp32_activations,pow2},
of `benchmarks.training_hopper` the cells qwen3-8b/fp8_block_kv/pow2 and qwen3-8b/fp8_block_kv, one after the other on
one H200 each, and of `benchmarks.small_hopper` the variant fp8_end_to_end_kv_tools_asynchronous.
"""

from collections.abc import Sequence
from statistics import fmean

import matplotlib

from benchmarks.harness import ROOT, Row, table
from benchmarks.tables import stored

matplotlib.use("Agg")
import matplotlib.pyplot as plt

IMAGE = ROOT / "docs" / "images" / "accuracy.svg"
_COLOURS = {"fp32_activations": "#0072b2", "pow2": "#e69f00"}
_SHOWN = ("activations", "weights", "cache", "attention", "all")


def main() -> None:
    parts, errors, speeds = stored("parts_kl"), stored("recipe_errors"), stored("recipe_hopper")
    largest = max(row["texts"] for row in parts)
    for title, lines in {
        "everything": whole_table([row for row in parts if row["texts"] == largest]),
        "by part": part_table([row for row in parts if row["texts"] < largest]),
        "gradients": gradient_table([row for row in errors if row["kind"] == "recipe_gradients"]),
        "roundings": rounding_table([row for row in errors if row["kind"] == "recipe_weights"]),
        "speed": speed_table(speeds),
    }.items():
        print(f"{title}\n\n{lines}\n")
    draw([row for row in parts if row["texts"] < largest])


def whole_table(rows: Sequence[Row]) -> str:
    header = ["recipe", "KL, mean", "median", "worst text", "same first choice", "shift of the right answer"]
    return table(header, [[f"`{row['scale_rule']}`", *_cells(row["parts"]["all"], row)] for row in rows])


def part_table(rows: Sequence[Row]) -> str:
    header = ["in FP8", "recipe", "KL, mean", "median", "worst text", "same first choice", "shift"]
    names = ("rounding", *_SHOWN)
    lines = [(name, row) for name in names for row in rows if name in row["parts"]]
    return table(header, [[name, f"`{row['scale_rule']}`", *_cells(row["parts"][name], row)] for name, row in lines])


def _cells(cost: Row, row: Row) -> list[str]:
    nats = [f"{cost[name]:.4f}" for name in ("nats", "median", "worst")]
    return [*nats, f"{cost['same_choice']:.3f}", f"{cost['answer_shift']:+.3f}"]


def gradient_table(rows: Sequence[Row]) -> str:
    """Errors of products with FP8 gradients, from FP64, over all linears."""
    header = ["product", "gradient before it", "scales", "error, median", "worst", "packing, median", "worst"]
    return table(
        header,
        [
            [row["product"], row["backward"], row["rules"], f"{row['error']:.2%}", f"{row['error_worst']:.2%}"]
            + [f"{row[name]:.1e}" if name in row else "" for name in ("packing", "packing_worst")]
            for row in rows
            if row["backward"] == "exact" or row["rules"] == "pow2 pow2"
        ],
    )


def rounding_table(rows: Sequence[Row]) -> str:
    """KL and shift of the right answer of each rounding of weights: means over its draws, and their range."""
    header = ["rounding", "task", "KL, mean", "worst text", "shift, lowest draw", "shift, highest draw"]
    lines = []
    for rounding, task in dict.fromkeys((row["rounding"], row["task"]) for row in rows):
        own = [row for row in rows if (row["rounding"], row["task"]) == (rounding, task)]
        shifts = [row["shift"] for row in own]
        means = [f"{fmean(row[name] for row in own):.4f}" for name in ("kl", "kl_worst")]
        lines.append([rounding, task, *means, f"{min(shifts):+.3f}", f"{max(shifts):+.3f}"])
    return table(header, lines)


def speed_table(rows: Sequence[Row]) -> str:
    header = ["Qwen3-8B's shape on an H200", "recipe", "tokens/s"]
    names = {"rollout": "rollout, 256 x (512 + 3072)", "training": "training step, 65,536 tokens"}
    speeds = [row for row in rows if row["kind"] in names]
    return table(
        header, [[names[row["kind"]], f"`{row['scale_rule']}`", f"{row['tokens_per_s']:,.0f}"] for row in speeds]
    )


def draw(rows: Sequence[Row]) -> None:
    """KL by part under each recipe; a mark is the worst text."""
    matplotlib.rcParams.update({"svg.hashsalt": "fp8-grpo", "font.size": 10, "axes.axisbelow": True})
    figure, axes = plt.subplots(figsize=(9, 4.2), layout="constrained")
    for number, row in enumerate(rows):
        rule = row["scale_rule"]
        for place, name in enumerate(_SHOWN):
            if (cost := row["parts"].get(name)) is None:
                continue
            x = place + 0.36 * (number - 0.5)
            axes.bar(x, cost["nats"], 0.34, color=_COLOURS[rule], label=rule if place == 0 else None)
            axes.plot(x, cost["worst"], "_", color="black", markersize=16, label="worst text" if x < 0 else None)
            axes.text(x, cost["nats"] * 1.06, f"{cost['nats']:.3f}", ha="center", fontsize=9)
    axes.set_yscale("log")
    axes.set_xticks(range(len(_SHOWN)), _SHOWN)
    axes.set_ylabel("KL from BF16, nats a token")
    axes.set_title(f"What each part of FP8 costs SmolLM2-135M: {rows[0]['texts']} questions", loc="left")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(IMAGE, metadata={"Date": None})


if __name__ == "__main__":
    main()
