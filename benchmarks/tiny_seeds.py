"""Measure the main job: `fp8-grpo run tiny` for several seeds, each with a warm start of its own.

    python benchmarks/tiny_seeds.py --seeds 0 1 2

Writes benchmarks/results/tiny_seeds.json (summaries, commit, versions, machine) and prints the table of
docs/performance.md. Run it on an idle machine.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fp8core.store.versions import git_state, hardware, library_versions

RESULTS = Path(__file__).parent / "results" / "tiny_seeds.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds = parser.parse_args().seeds
    with tempfile.TemporaryDirectory() as folder:
        summaries = [measure(seed, Path(folder)) for seed in seeds]
    result = {
        "commit": git_state(Path(__file__).parent),
        "versions": library_versions(),
        "hardware": hardware(),
        "runs": dict(zip(map(str, seeds), summaries, strict=True)),
    }
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(table(result["runs"]))


def measure(seed: int, folder: Path) -> dict[str, Any]:
    """The summary of one training in a process of its own."""
    summary = folder / f"{seed}.json"
    command = [str(Path(sys.executable).parent / "fp8-grpo"), "run", "tiny", "--json", str(summary)]
    settings = [f"seed={seed}", f"run=seed{seed}"]
    subprocess.run([*command, *(flag for s in settings for flag in ("--set", s))], cwd=folder, check=True)
    content: dict[str, Any] = json.loads(summary.read_text())
    return content


def table(runs: dict[str, dict[str, Any]]) -> str:
    """The runs as a Markdown table."""
    lines = [
        "| seed | reward, first 10 -> last 10 steps | held-out, first -> last | tmpe max | tokens differing "
        "| seconds | of it warm start | overhead a step, median / mean |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for seed, run in runs.items():
        overhead, seconds = run["overhead_ms_per_step"], run["seconds"]
        cells = [
            seed,
            f"{run['reward_first10']:.3f} -> {run['reward_last10']:.3f}",
            f"{run['heldout_first']:.3f} -> {run['heldout_last']:.3f}",
            f"{run['tmpe_max']:.6g}",
            str(run["tokens_differing"]),
            f"{seconds['total']:.0f}",
            f"{seconds['warm_start']:.0f}",
            f"{overhead['median']:.0f} / {overhead['mean']:.0f} ms",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
