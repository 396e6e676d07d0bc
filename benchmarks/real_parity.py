"""Train a pretrained checkpoint in BF16 and in FP8 on one Hopper GPU, several trainings at once, and judge them.

    python -m benchmarks.real_checkpoint build/real
    fp8-grpo compile real-h200
    nvidia-cuda-mps-control -d                                         trainings compute at the same time, not in turn
    python -m benchmarks.real_parity --out FOLDER --seconds 560        until it says that all are done

The trainings are those of `fp8-grpo parity real-h200`, which would train one after another. Here each is a process with
Prefect's files in a folder of its own. When the time is over each stops after its step, and the same command goes on
from there. When all are done the parity flow judges what is there. FOLDER gets its verdict, report and chart, and
FOLDER/logs what each training printed.

Predicted before the first measurement: held-out reward 0.23 at first and 0.70 after 300 steps in both precisions, their
gap below one point, error exactly 1 in FP8, and 4 s a step with six trainings side by side (three took 2.0 s each, in
turn).

Predicted before all five variants were trained side by side on H100s (they came to H200s): FP8 has the held-out
accuracies that it had before, digit for digit (0.934, 0.922, 0.945). With generation alone in FP8 the error is 1.03 to
1.10; without correction it ends 2 points below BF16, with it 1. Asynchronously it ends within 2 points of FP8, and no
token differs.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Row, ended, provenance, start, training_command, write_rows
from benchmarks.small_hopper import alignment_row, draw_variants, step_ledger_row
from flows.parity_plan import ParityPlan, ParityRequest, Training, committed, refuse
from fp8core.report.run_data import read_run

CONFIG, RESULT = "real-h200", "real_parity"
VARIANTS = ("bf16", "fp8-rollout-kv", "fp8-rollout-kv-corrected", "fp8-end-to-end-kv", "asynchronous")
# For a last step and its checkpoint.
_GRACE = 40.0
_POLL_SECONDS = 0.5


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is not done; write the rows of what there is; judge when all is done. Returns 0 then, else 1."""
    options = _options(arguments)
    out: Path = options.out.absolute()
    (out / "logs").mkdir(parents=True, exist_ok=True)
    settings = {"runs": str(options.runs.absolute())}
    asked = ParityRequest(
        options.config, RESULT, tuple(options.seeds), options.steps, tuple(options.variants), settings
    )
    plan = refuse(asked, "")
    end = time.monotonic() + options.seconds
    train([training for training in plan.trainings if not _done(training)], out / "logs", options.at_once, end)
    left = [training.shown_as for training in plan.trainings if not _done(training)]
    _write(out, plan)
    print(f"left: {'; '.join(left)}" if left else "all are done", flush=True)
    return 1 if left else _judge(out, plan, settings)


def train(trainings: Sequence[Training], logs: Path, at_once: int, end: float) -> None:
    """Train as many side by side as are allowed, and begin the next when one ends; stop them all before `end`."""
    waiting, running = [*trainings], dict[subprocess.Popen[bytes], Training]()
    while (waiting or running) and time.monotonic() < end - _GRACE:
        while waiting and len(running) < at_once:
            training = waiting.pop(0)
            with (logs / f"{training.folder.name}.log").open("ab") as log:
                home = {"PREFECT_HOME": str(logs / f"prefect-{training.folder.name}")}
                running[start(_command(training), log, home)] = training
        for process in [process for process in running if process.poll() is not None]:
            print(f"{running.pop(process).shown_as}: ended with {process.returncode}", flush=True)
        time.sleep(_POLL_SECONDS)
    for process in running:
        process.send_signal(signal.SIGTERM)
    for process, training in running.items():
        print(
            f"{training.shown_as}: stopped with {ended(process, end)} after step {committed(training.folder)}",
            flush=True,
        )


def _command(training: Training) -> list[str]:
    return training_command(str(training.parameters["config"]), _settings(training))


def _shown(training: Training) -> str:
    """The same for readers, without the places of this machine."""
    settings = [setting for setting in _settings(training) if not setting.startswith("runs=")]
    return " ".join(["fp8-grpo run", training.parameters["config"], *(f"--set {setting}" for setting in settings)])


def _settings(training: Training) -> list[str]:
    overrides = training.parameters["overrides"]
    return [f"{key}={json.dumps(overrides[key])}" for key in overrides]


def _done(training: Training) -> bool:
    return committed(training.folder) == training.config.steps


def _write(out: Path, plan: ParityPlan) -> None:
    """Rows and curves of all trainings that have a step."""
    rows, shown = list[Row](), {}
    for training in plan.trainings:
        if not committed(training.folder):
            continue
        run, said = read_run(training.folder, training.shown_as), _shown(training)
        shown[training.shown_as] = run
        about = {"seed": training.seed}
        rows.append(alignment_row(run, training.variant, said) | about)
        ledger = step_ledger_row(run, training.variant, said)
        rows += [] if ledger is None else [ledger | about]
    write_rows(out / f"{RESULT}.json", [*rows, {"kind": "provenance", **provenance()}])
    if shown:
        draw_variants(shown, out / f"{RESULT}.png", "A pretrained checkpoint in BF16 and in FP8")


def _judge(out: Path, plan: ParityPlan, settings: dict[str, str]) -> int:
    """The parity flow, which finds all trainings done."""
    variants = [word for variant in plan.variants for word in ("--variant", variant)]
    seeds = ",".join(map(str, plan.seeds))
    command = [sys.executable, "-m", "flows.cli", "parity", CONFIG, "--name", plan.name, "--seeds", seeds, *variants]
    overrides = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    code = subprocess.run([*command, *overrides], check=False).returncode
    for path in plan.folder.iterdir():
        if path.is_file():
            shutil.copy(path, out / path.name)
    return code


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a pretrained checkpoint in several precisions, side by side.")
    parser.add_argument("variants", nargs="*", default=VARIANTS, help=f"of the parity flow (default: {VARIANTS})")
    parser.add_argument("--out", type=Path, required=True, help="folder of results; the same for every call")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of runs; the same for every call")
    parser.add_argument("--config", default=CONFIG)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="of each training (default: as configured)")
    parser.add_argument("--at-once", type=int, default=6, help="trainings side by side (default 6)")
    parser.add_argument("--seconds", type=float, default=560.0, help="of this call (default 560)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
