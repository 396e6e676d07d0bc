"""Measure the main job: three seeds of `fp8-grpo run tiny`, and seed 0 in other precisions from the same warm start.

    python -m benchmarks.tiny_runs
    python -m benchmarks.tiny_runs "tiny-tools, seed 0"     one of them; the rows of the others stay

`tiny-tools` learns to hand its arithmetic to a calculator. Predicted before its first row here: at most 240 s, held-out
accuracy from at most 0.5 to at least 0.95, error exactly 1.

Writes benchmarks/results/tiny_runs.json (summaries, commit, versions, machine) and prints a table. Run it on an idle
machine; it takes some ten minutes on two cores.
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import RESULTS, ROOT, Row, provenance, table, training_command, write_rows

SEEDS = {f"tiny, seed {seed}": ("tiny", [f"seed={seed}"]) for seed in (0, 1, 2)}
VARIANTS = {
    "nemo-fp32 (FP32 scales, attention in BF16)": ("nemo-fp32", ["seed=0"]),
    "tiny, BF16 on both sides": (
        "tiny",
        [f"precision.{side}.{part}=bf16" for side in ("rollout", "training") for part in ("linear", "kv_cache")],
    ),
    "tiny, FP8 rollout, BF16 training": ("tiny", ["precision.training.linear=bf16"]),
    "tiny-tools, seed 0": ("tiny-tools", ["seed=0"]),
}
_RUNS = {**SEEDS, **VARIANTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {'; '.join(_RUNS)} (default: all)")
    names, path = parser.parse_args().names or list(_RUNS), RESULTS / "tiny_runs.json"
    found = {row["name"]: row for row in json.loads(path.read_text())}
    with tempfile.TemporaryDirectory() as folder:
        for i, name in enumerate(names):
            measured = measure(*_RUNS[name], f"run{i}", Path(folder))
            found[name] = {"kind": "training_run", "name": name, **measured, **provenance()}
    rows = [found[name] for name in _RUNS if name in found]
    write_rows(path, rows)
    print(learning_table(rows))


def measure(config: str, settings: list[str], run: str, folder: Path) -> Row:
    """The summary of one training in a process of its own; runs of one seed share their warm start."""
    summary = folder / f"{run}.json"
    command = training_command(config, [f"runs={folder / 'runs'}", f"run={run}", *settings])
    subprocess.run([*command, "--json", str(summary)], cwd=ROOT, check=True)
    content: Row = json.loads(summary.read_text())
    return content


def learning_table(runs: Sequence[Row]) -> str:
    """Learning of each run, and the distance of rollout and training."""
    return table(
        ["run", "reward, first 10 -> last 10", "held-out, first -> last", "largest tmpe", "tokens differing"],
        [
            [
                run["name"],
                f"{run['reward_first10']:.3f} -> {run['reward_last10']:.3f}",
                f"{run['heldout_first']:.3f} -> {run['heldout_last']:.3f}",
                f"{run['tmpe_max']:.6g}",
                str(run["tokens_differing"]),
            ]
            for run in runs
        ],
    )


if __name__ == "__main__":
    main()
