"""Draw the charts of docs/results/index.md and README.md from stored rows, and write the claims (docs/claims.yaml).

    python docs/charts.py

All numbers are those of benchmarks/results/*.json. A test compares the table with the page.
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import yaml

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

DOCS = Path(__file__).parent
PAGE = DOCS / "results" / "index.md"
IMAGES = DOCS / "images"
RESULTS = DOCS.parent / "benchmarks" / "results"
Row = dict[str, Any]

# Okabe and Ito, which colour-blind readers can tell apart.
GREY, BLUE, ORANGE, GREEN, RED, SKY, YELLOW = [
    "#8c8c8c",
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#d55e00",
    "#56b4e9",
    "#f0e442",
]
# A step of more than this compiled kernels; the row shows the compiler's speed.
COMPILING_MS = 3000
LIMIT = 8192
SHAPES = {
    "Qwen3-8B\n256 x (512 + 3072)": ("qwen3-8b", 256, 3072, False),
    "Qwen3-8B\n512 x (512 + 2048)": ("qwen3-8b", 512, 2048, False),
    "Qwen3-8B\n256 x (512 + 1024)": ("qwen3-8b", 256, 1024, False),
    "Qwen3-8B, long tail\n256 x (512 + <= 3072)": ("qwen3-8b", 256, 3072, True),
    "Llama-3.1-8B\n256 x (512 + 1024)": ("llama-3.1-8b", 256, 1024, False),
    "Qwen3-30B-A3B\n256 x (512 + 512)": ("qwen3-30b-a3b", 256, 512, False),
}


def main() -> None:
    matplotlib.rcParams.update({"svg.hashsalt": "fp8-grpo", "font.size": 10, "axes.axisbelow": True})
    rollout_chart()
    ledger_chart()
    mismatch_chart()
    learning_chart()
    page = PAGE.read_text()
    PAGE.write_text(rewritten(page, claims()))


def rewritten(page: str, table: str) -> str:
    before, rest = page.split("<!-- begin: claims -->")
    return f"{before}<!-- begin: claims -->\n\n{table}\n\n<!-- end: claims -->{rest.split('<!-- end: claims -->')[1]}"


def claims() -> str:
    """The table of docs/claims.yaml, with the numbers of `measured` in its texts."""
    values = measured()
    lines = ["| claim | measured | condition |", "| --- | --- | --- |"]
    for claim in yaml.safe_load((DOCS / "claims.yaml").read_text()):
        shown, condition = (claim[key].format(**values) for key in ("measured", "condition"))
        lines.append(f"| [{claim['claim']}]({claim['more']}) | {shown} | {condition} |")
    return "\n".join(lines)


def measured() -> dict[str, Any]:
    """The numbers of the claims: of small trainings, of one step, and of engine and trainer alone."""
    tiny = [run for run in stored("tiny_runs") if run["name"].startswith("tiny, seed")]
    small = {row["variant"]: row for row in stored("small_hopper") if row["kind"] == "alignment"}
    real = [row for row in stored("real_accuracy") if row["kind"] == "alignment"]
    (gap,) = (
        row for row in stored("real_accuracy") if row["kind"] == "gap" and "outcome" in row and row["window"] == "end"
    )
    steps = {case: row["seconds"]["wall"] for case, row in _large().items()}
    once = {variant: row for (variant, source), row in _large().items() if source == "training"}
    faults = stored("faults_hopper")
    (experts,) = (row for row in stored("experts_hopper") if row["kind"] == "experts_exactness")
    return {
        "experts": experts,
        "tiny": {"runs": len(tiny), "steps": tiny[0]["steps"], "error": max(run["tmpe_max"] for run in tiny)},
        "tiny_differing": sum(run["tokens_differing"] for run in tiny),
        "small": small,
        "real_error": {
            name: max(row["tmpe_max"] for row in real if row["variant"] == name)
            for name in ("bf16", "fp8-end-to-end-kv")
        },
        "real_steps": real[0]["steps"],
        "gap": gap | {name: 100 * gap[name] for name in ("mean", "low", "high")},
        "nats": {row["scale_rule"]: row["parts"]["all"]["nats"] for row in stored("parts_kl") if row["texts"] >= 512},
        "large": {name: {"steps": len(row["tmpe"]), "error": max(row["tmpe"])} for name, row in once.items()},
        "fp8_seconds": (fp8 := steps["fp8_end_to_end_kv", "training"]),
        "step": {"seconds": (bf16 := steps["bf16", "training"]), "ratio": bf16 / fp8},
        "rollouts": _rollout_speeds(next(iter(SHAPES.values()))),
        "load": _load_speeds(),
        "training": _training_ratios(),
        "resumed": max(row["seconds"] for row in stored("durability_costs") if row["kind"] == "resume"),
        "faults": {"found": sum(row["bound"] is not None for row in faults), "all": len(faults)},
    }


def _rollout_speeds(shape: tuple[str, int, int, bool]) -> dict[str, dict[str, float]]:
    rows = rollouts(shape)
    fastest = max(row["tokens_per_s"] for row in rows if row["precision"] == "bf16")
    base = _last(rows, "bf16", "stock")["tokens_per_s"]
    speeds = {forward: _last(rows, "fp8_linear_kv", forward)["tokens_per_s"] for forward in ("aligned", "stock")}
    return {name: {"speed": s, "ratio": s / base, "of_fastest": s / fastest} for name, s in speeds.items()}


def _load_speeds() -> dict[str, dict[str, float]]:
    """Of `benchmarks.grpo_8gpu`: FP8 against BF16 by GPUs, with the source of FP8's old log-probs."""
    names = ("precision", "gpus", "logprobs", "mode", "staleness")
    rows = {tuple(row[name] for name in names): row for row in stored("grpo_8gpu") if row["layers"] == 36}
    in_turn = ("synchronous", 0)
    found = {}
    for name, gpus, source in (("one", 1, "rollout"), ("four", 4, "pass")):
        fp8, bf16 = rows["fp8", gpus, source, *in_turn], rows["bf16", gpus, "pass", *in_turn]
        speed = fp8["tokens_per_s_per_gpu"]
        found[name] = {"speed": speed, "ratio": speed / bf16["tokens_per_s_per_gpu"]}
    return found


def _training_ratios() -> dict[str, float]:
    # The last of each: a step with activations recomputed, and one with all kept.
    seconds = {
        (row["precision"], row["checkpointing"]): row["seconds"]
        for row in stored("training_hopper")
        if row["kind"] == "training" and row["model"] == "qwen3-8b" and not row["deterministic"]
    }
    names = {"recomputed": True, "kept": False}
    return {name: seconds["bf16", again] / seconds["fp8_block_kv", again] for name, again in names.items()}


def rollout_chart() -> None:
    """Tokens per second by shape: BF16, FP8 in vLLM's own model, FP8 in the aligned engine."""
    kinds = [
        ("BF16", "bf16", "stock", GREY),
        ("FP8 linears, cache and attention, vLLM's own model", "fp8_linear_kv", "stock", BLUE),
        ("the same, aligned engine", "fp8_linear_kv", "aligned", ORANGE),
    ]
    _, axes = plt.subplots(figsize=(10, 4.6), layout="constrained")
    for place, shape in enumerate(SHAPES.values()):
        rows = rollouts(shape)
        base = _last(rows, "bf16", "stock")["tokens_per_s"]
        shown = [(kind, row) for kind in kinds if (row := _last(rows, kind[1], kind[2])) is not None]
        for number, ((_, precision, _, colour), row) in enumerate(shown):
            x, speed = place + 0.26 * (number - (len(shown) - 1) / 2), row["tokens_per_s"]
            axes.bar(x, speed, 0.24, color=colour)
            if precision != "bf16":
                axes.text(x, speed + 250, f"{speed / base:.2f}x", ha="center", fontsize=9)
    axes.set_xticks(range(len(SHAPES)), list(SHAPES), fontsize=8.5)
    axes.set_ylabel("tokens/s")
    axes.set_title("Rollout speed on one H200: requests x (prompt + completion tokens)", loc="left")
    axes.legend([plt.Rectangle((0, 0), 1, 1, color=kind[3]) for kind in kinds], [kind[0] for kind in kinds], ncols=3,
                loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False)  # fmt: skip
    _finish(axes, "rollout-speed.svg")


def ledger_chart() -> None:
    """Seconds of a step at Qwen3-8B's shape by part."""
    parts = {"rollout": BLUE, "logprobs": SKY, "train": ORANGE, "sync": GREEN, "artifacts": RED}
    names = {
        ("fp8_end_to_end_kv", "training"): "FP8, aligned, no pass",
        ("fp8_end_to_end_kv", "pass"): "FP8, aligned, earlier code",
        ("bf16", "training"): "BF16, no pass",
        ("bf16", "pass"): "BF16",
    }
    rows = [_large()[case] for case in names]
    _, axes = plt.subplots(figsize=(10, 3.6), layout="constrained")
    for place, row in enumerate(rows):
        seconds, left = row["seconds"], 0.0
        for part, colour in parts.items():
            width = seconds.get(part, 0.0)
            axes.barh(place, width, 0.6, left=left, color=colour, label=part if place == 0 else None)
            if width > 1.5:
                axes.text(
                    left + width / 2,
                    place,
                    f"{width:.1f} s",
                    ha="center",
                    va="center",
                    color="white" if part == "rollout" else "black",
                )
            left += width
        axes.text(left + 0.3, place, f"{seconds['wall']:.1f} s", va="center")
    axes.set_yticks(range(len(rows)), list(names.values()))
    axes.set_xlabel("seconds of a step")
    axes.set_xlim(0, 50)
    axes.set_title("A whole step at Qwen3-8B's shape on one H200: 192 completions of 1,024 tokens", loc="left")
    axes.legend(ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False)
    _finish(axes, "step-ledger.svg")


def learning_chart() -> None:
    """Held-out accuracy of the trainings of a pretrained model: mean and range of the seeds of each task."""
    runs = [row for row in stored("real_accuracy") if row["kind"] == "alignment"]
    _, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
    for variant, name, color in (("bf16", "BF16", GREY), ("fp8-end-to-end-kv", "FP8", BLUE)):
        errors = [run["tmpe_max"] - 1 for run in runs if run["variant"] == variant]
        mismatch = f"differ by {max(errors):.1%}, in the worst step" if max(errors) else "are equal to the last bit"
        label = f"{name}: token probabilities of generation\nand training {mismatch}"
        for task in ("operations", "sums", "units"):
            curves = [run["curve"] for run in runs if (run["variant"], run["task"]) == (variant, task)]
            steps = [int(step) for step in curves[0]]
            seeds = [[curve[str(step)] for curve in curves] for step in steps]
            mean = [statistics.mean(each) for each in seeds]
            axes.plot(steps, mean, color=color, linewidth=2, label=label if task == "operations" else None)
            axes.fill_between(steps, [*map(min, seeds)], [*map(max, seeds)], color=color, alpha=0.25, linewidth=0)
            if variant == "bf16":
                axes.text(steps[-1] + 5, mean[-1], task, va="center")
    axes.set(xlabel="step", ylabel="share of unseen problems right", xlim=(0, 345), ylim=(0.2, 1.04))
    axes.legend(loc="lower right", frameon=False)
    _finish(axes, "learning.svg")


def mismatch_chart() -> None:
    """The error of each precision: median and largest step, on a logarithmic axis with a lane for 0."""
    names = {
        "fp8_end_to_end_kv": "FP8 linears, cache and attention; aligned",
        "fp8_end_to_end": "FP8 linears on both sides",
        "bf16": "BF16 on both sides",
        "fp8_end_to_end_megatron": "FP8 linears on both sides; Megatron",
        "fp8_rollout": "FP8 rollout, BF16 training",
    }
    rows = {row["variant"]: row for row in stored("small_hopper") if row["kind"] == "alignment"}
    zero = 1e-6
    _, axes = plt.subplots(figsize=(10, 3), layout="constrained")
    for place, variant in enumerate(reversed(names)):
        median, largest = (rows[variant][key] - 1 for key in ("tmpe_median", "tmpe_max"))
        if largest == 0:
            axes.plot(zero, place, "D", color=GREEN, markersize=9)
            axes.text(zero * 1.25, place, "exactly 0", va="center")
            continue
        axes.plot([median, largest], [place, place], color=BLUE, linewidth=2)
        axes.plot(median, place, "o", color=BLUE, markersize=8)
        axes.plot(largest, place, "|", color=BLUE, markersize=14, markeredgewidth=2)
        axes.text(largest * 1.12, place, f"{median:.1e}, at most {largest:.1e}", va="center", fontsize=9)
    axes.set_xscale("log")
    axes.set_xlim(zero / 1.5, 1e-2)
    axes.set_xticks([zero, 1e-5, 1e-4, 1e-3, 1e-2], ["0", "1e-5", "1e-4", "1e-3", "1e-2"])
    axes.minorticks_off()
    axes.axvspan(zero / 1.5, zero * 1.9, color="#eeeeee")
    axes.set_yticks(range(len(names)), list(reversed(names.values())))
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_xlabel("token multiplicative probability error - 1: median (dot) and largest (bar) of 40 steps")
    axes.set_title("Mismatch of rollout and training, 90 million parameters on one H200", loc="left")
    _finish(axes, "mismatch.svg")


def _finish(axes: Axes, name: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y" if name in ("rollout-speed.svg", "learning.svg") else "x", color="#dddddd")
    axes.figure.savefig(IMAGES / name, metadata={"Date": None}, facecolor="white")
    plt.close("all")


def stored(name: str) -> list[Row]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def rollouts(shape: tuple[str, int, int, bool]) -> list[Row]:
    """Rows of a shape at LIMIT tokens a step that compiled nothing, without special options."""
    return [
        row
        for row in stored("rollout_hopper")
        if row["kind"] == "rollout"
        and (row["model"], row["requests"], row["generated"], row["long_tailed"]) == shape
        and row["batched_tokens"] == LIMIT
        and not (row["batch_invariant"] or row.get("block_size") or row.get("routes"))
        and not _compiled(row)
    ]


def _compiled(row: Row) -> bool:
    """True if the run with the row's speed had a step in which kernels were compiled."""
    runs = [run for run in row.get("runs", ()) if run["tokens_per_s"] == row["tokens_per_s"]]
    return any(max(quarter["max"] for quarter in run["step_ms"]) > COMPILING_MS for run in runs)


def _last(rows: Sequence[Row], precision: str, forward: str) -> Row | None:
    found = [row for row in rows if (row["precision"], row.get("forward", "stock")) == (precision, forward)]
    return found[-1] if found else None


def _large() -> dict[tuple[str, str], Row]:
    """By variant and source of old log-probs, with vLLM."""
    rows = (
        row for row in stored("large_ledger") if row["kind"] == "step_ledger" and row.get("engine", "vllm") == "vllm"
    )
    return {(row["variant"], row["logprobs"]): row for row in rows}


if __name__ == "__main__":
    main()
