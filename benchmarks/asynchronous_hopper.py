"""Whole trainings of real-h200 that wait for the update, generate one step ahead, and generate beside it, on one GPU.

    python -m benchmarks.real_checkpoint build/real
    python -m benchmarks.asynchronous_hopper --out FOLDER --seconds 560
    nvidia-cuda-mps-control -d                                         trainings compute at the same time, not in turn
    python -m benchmarks.asynchronous_hopper --out FOLDER asynchronous --seconds 560 --steps 300 --seeds 0 1 2
    python -m benchmarks.asynchronous_hopper --out FOLDER synchronous asynchronous --seconds 560 \
        --steps 40 --config h200-small --staleness 2 [--variant bf16]

One mode trains after another, from the same checkpoint; the seeds of a mode train side by side. Every token is scored
again by the weights of the version that wrote it. Each training is a row of kind `grpo_step` in
FOLDER/asynchronous_hopper.json; FOLDER/logs has what it printed. One whose time is over ends after its step, and its
row has the steps that it made.

Predicted before the first measurement, for one H200 that generation and update share: 1.05 s a step synchronously, 0.95
one step off and asynchronously (reward, records and checkpoints of a step lie beside generation; the update and the
generation still share the GPU); 0 tokens differ in every mode; a token is 0.9 versions old in the mean.

Predicted for three seeds of 300 steps side by side, asynchronous: 0.9 s a step, 5.3 million tokens verified, and a last
held-out reward within two points of the synchronous trainings of commit e256e982 (`real_parity`) (0.934 in the mean).

Alone and asynchronous it took 1.50 s a step on a host that was busy. Predicted for all three modes, one after another
on a host without other work, with prompts captured in the asynchronous one: 1.45 s synchronously, 1.35 s one step off,
1.30 s asynchronously.

Predicted for three seeds of h200-small, 40 steps, tokens up to two versions old: held-out accuracy ends within 0.01 of
the synchronous trainings. In FP8 no token differs; BF16 is unverifiable.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.harness import Row, ended, provenance, start, table, training_command, write_rows
from benchmarks.small_hopper import step_ledger_row, timed_steps
from fp8core.config.load import load_config
from fp8core.parity import VARIANTS, variant_settings
from fp8core.report.run_data import read_run
from fp8core.store.layout import LEDGER
from fp8core.store.metrics import HELDOUT, series

RESULT = "asynchronous_hopper"
MODES = ("synchronous", "one_step_off", "asynchronous")
_PRECISIONS = {"fp8-end-to-end-kv": "fp8_linear_kv", "bf16": "bf16"}
_GRACE = 30.0
_POLL_SECONDS = 0.2


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the modes; returns 0 when each has a row."""
    options = _options(arguments)
    out, rows = options.out.absolute(), list[Row]()
    (out / "logs").mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.seconds
    for number, mode in enumerate(options.modes):
        share = (end - time.monotonic()) / (len(options.modes) - number)
        rows += _measured(mode, options, out, time.monotonic() + share)
        write_rows(out / f"{RESULT}.json", rows)
    print(mode_table(rows), flush=True)
    return int(len(rows) < len(options.modes) * len(options.seeds))


def _measured(mode: str, options: argparse.Namespace, out: Path, end: float) -> list[Row]:
    """The rows of a mode, one for each seed that made two steps."""
    asked = [f"pipeline.mode={mode}", f"steps={options.steps}"]
    if mode != "synchronous":
        asked.append("pipeline.verified_share=1.0")
    if mode == "asynchronous":
        asked.append(f"pipeline.max_staleness={options.staleness}")
    running = []
    for seed in options.seeds:
        folder = out / "runs" / f"{options.variant}-{mode}-{seed}"
        settings = [*asked, *_variant_settings(options, seed), *options.overrides]
        command = training_command(options.config, [*settings, f"runs={folder.parent}", f"run={folder.name}"])
        with (out / "logs" / f"{folder.name}.log").open("ab") as log:
            home = {"PREFECT_HOME": str(out / "logs" / f"prefect-{folder.name}")}
            running.append((start(command, log, home), folder, seed, settings))
    while any(process.poll() is None for process, *_ in running) and time.monotonic() < end - _GRACE:
        time.sleep(_POLL_SECONDS)
    for process, *_ in running:
        process.send_signal(signal.SIGTERM)
    for process, folder, *_ in running:
        print(f"{folder.name}: ended with {ended(process, end)}", flush=True)
    found = [_row(mode, options, folder, seed, settings) for _, folder, seed, settings in running]
    return [row for row in found if row is not None]


def _row(mode: str, options: argparse.Namespace, folder: Path, seed: int, settings: Sequence[str]) -> Row | None:
    if not (folder / LEDGER).exists():
        return None
    run = read_run(folder, mode)
    shown = " ".join(["fp8-grpo run", options.config, *(f"--set {setting}" for setting in settings)])
    ledger, timed = step_ledger_row(run, mode, shown), timed_steps(run.view)
    if ledger is None:
        return None

    def measured(name: str) -> list[float]:
        return series(run.history, name)[1]

    tokens = dict(zip(*series(run.history, "rollout/tokens"), strict=True))
    counted = sum(tokens[step.commit.entry.step] for step in timed)
    return {
        **ledger,
        "kind": "grpo_step",
        "model": options.config,
        "mode": mode,
        "seed": seed,
        "side_by_side": len(options.seeds),
        "precision": _PRECISIONS[options.variant],
        "gpus": 1,
        "tokens_per_s_per_gpu": counted / sum(step.wall for step in timed),
        "tokens_verified": int(sum(measured("alignment/tokens"))),
        "tokens_differing": int(sum(measured("alignment/tokens_differing"))),
        "staleness_mean": fmean(measured("rollout/staleness_mean") or [0.0]),
        "staleness_max": max(measured("rollout/staleness_max") or [0.0]),
        "heldout": measured(HELDOUT.name),
        **provenance(),
        "command": shown,
    }


def _variant_settings(options: argparse.Namespace, seed: int) -> list[str]:
    base = load_config(options.config, options.overrides)
    values = variant_settings(VARIANTS[options.variant], base, seed)
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def mode_table(rows: Sequence[Row]) -> str:
    """One line a model, precision and mode: means over its seeds, and sums of tokens."""
    same = dict[tuple[str, ...], list[Row]]()
    for row in rows:
        same.setdefault((row["model"], "BF16" if row["precision"] == "bf16" else "FP8", row["mode"]), []).append(row)
    lines = []
    for case, seeds in same.items():
        means = (fmean(row["seconds"]["wall"] for row in seeds), fmean(row["staleness_mean"] for row in seeds))
        sums = (sum(row[f"tokens_{name}"] for row in seeds) for name in ("verified", "differing"))
        heldout = fmean(row["heldout"][-1] for row in seeds)
        cells = [str(len(seeds)), str(seeds[0]["steps"]), *(f"{mean:.2f}" for mean in means)]
        lines.append([*case, *cells, *(f"{tokens:,}" for tokens in sums), f"{heldout:.3f}"])
    header = ("model", "precision", "mode", "seeds", "steps", "s a step", "staleness", "verified", "differ", "held-out")
    return table(header, lines)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="*", default=MODES, help=f"default: {' '.join(MODES)}")
    parser.add_argument("--out", type=Path, required=True, help="folder of the rows, the runs and their logs")
    parser.add_argument("--seconds", type=float, default=560.0, help="of the whole call")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="trainings side by side (default: 0)")
    parser.add_argument("--staleness", type=int, default=1, help="of asynchronous tokens, in versions (default 1)")
    parser.add_argument("--config", default="real-h200")
    parser.add_argument("--variant", choices=list(_PRECISIONS), default="fp8-end-to-end-kv", help="of the parity flow")
    parser.add_argument("--set", dest="overrides", action="append", default=[], help="further settings, key=value")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
