"""Measure the main job: three seeds of `fp8-grpo run tiny`, and seed 0 in other precisions from the same warm start.

    python benchmarks/tiny_runs.py

Writes benchmarks/results/tiny_runs.json (summaries, commit, versions, machine) and prints the tables of
docs/performance.md. Run it on an idle machine; it takes some ten minutes on two cores.
"""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.trainings import ROOT, training_command
from fp8core.store.versions import git_state, hardware, library_versions

RESULTS = Path(__file__).parent / "results" / "tiny_runs.json"

SEEDS = {f"tiny, seed {seed}": ("tiny", [f"seed={seed}"]) for seed in (0, 1, 2)}
VARIANTS = {
    "nemo-fp32 (FP32 scales, attention in BF16)": ("nemo-fp32", ["seed=0"]),
    "tiny, BF16 on both sides": (
        "tiny",
        [f"precision.{side}.{part}=bf16" for side in ("rollout", "training") for part in ("linear", "kv_cache")],
    ),
    "tiny, FP8 rollout, BF16 training": ("tiny", ["precision.training.linear=bf16"]),
}

Summary = dict[str, Any]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        summaries = {
            name: measure(config, settings, f"run{i}", Path(folder))
            for i, (name, (config, settings)) in enumerate({**SEEDS, **VARIANTS}.items())
        }
    result = {
        "commit": git_state(Path(__file__).parent),
        "versions": library_versions(),
        "hardware": hardware(),
        "runs": summaries,
    }
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(learning_table(summaries), cost_table(summaries), sep="\n\n")


def measure(config: str, settings: list[str], run: str, folder: Path) -> Summary:
    """The summary of one training in a process of its own; runs of one seed share their warm start."""
    summary = folder / f"{run}.json"
    command = training_command(config, [f"runs={folder / 'runs'}", f"run={run}", *settings])
    subprocess.run([*command, "--json", str(summary)], cwd=ROOT, check=True)
    content: Summary = json.loads(summary.read_text())
    return content


def learning_table(runs: dict[str, Summary]) -> str:
    """What each run learnt and how far rollout and training were apart, as Markdown."""
    rows = [
        "| run | reward, first 10 -> last 10 | held-out, first -> last | largest tmpe | tokens differing |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, run in runs.items():
        reward = f"{run['reward_first10']:.3f} -> {run['reward_last10']:.3f}"
        heldout = f"{run['heldout_first']:.3f} -> {run['heldout_last']:.3f}"
        rows.append(f"| {name} | {reward} | {heldout} | {run['tmpe_max']:.6g} | {run['tokens_differing']} |")
    return "\n".join(rows)


def cost_table(runs: dict[str, Summary]) -> str:
    """Where the seconds of each run went, as Markdown."""
    tasks = ("warm_start", "rollout", "logprobs", "train", "evaluate", "commit")
    rows = [
        f"| run | seconds | {' | '.join(tasks)} | overhead a step, median / mean |",
        "| --- | --- | " + "--- | " * len(tasks) + "--- |",
    ]
    for name, run in runs.items():
        seconds, overhead = run["seconds"], run["overhead_ms_per_step"]
        parts = " | ".join(f"{seconds[task]:.1f}" for task in tasks)
        rows.append(
            f"| {name} | {seconds['total']:.0f} | {parts} | {overhead['median']:.0f} / {overhead['mean']:.0f} ms |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
