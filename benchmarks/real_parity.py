"""Train a pretrained checkpoint on three tasks in BF16 and in FP8, many trainings at once on each GPU, and judge them.

    python -m benchmarks.real_checkpoint build/real --roundings 3
    fp8-grpo compile real-h200
    nvidia-cuda-mps-control -d                                         trainings compute at the same time, not in turn
    python -m benchmarks.real_parity --out FOLDER --seconds 560        until it says that all are done

Three tasks are trained from three seeds each: in BF16, in FP8 end to end with its cache, and once more in BF16. The
last ones begin at a checkpoint that was rounded anew, another one for each seed. Where the time is over each training
stops after its step, and the same command goes on from there. FOLDER gets rows with the verdict over all tasks and
seeds (benchmarks/real_accuracy.py has the rules) and its picture. FOLDER/logs has what each training printed. `--set`
is of all trainings.

All trainings share SETTINGS, which cost little and leave what is judged as it is:
- The update's own forward gives the old log-probs. So there is no scoring pass, and every token is compared all the
  same. (A rollout's log-probs would do for FP8 alone.)
- 1,024 held-out prompts answer every 25 steps. A checkpoint is written at the end, and where a training is stopped.
- Each process has one thread and one verifier, and neither Prefect nor MLflow (benchmarks/real_training.py).
- vLLM's own model, of BF16, runs eagerly, which saves its compilation at each start.
- The cache has room for all 512 completions of 76 tokens. A pass has a third of most tasks' tokens.
A training takes 10 GB, so that 13 fit on 141 GB. The reason of one that ends early is printed, and the
next call begins it again. Files are synced many times a step: a `--runs` folder in memory, of 4 GiB a training, saves
that time.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import ROOT, Row, ended, provenance, start, write_rows
from benchmarks.real_accuracy import FP8, REDRAWN, VARIANTS, TrainedCurve, accuracy_tables, draw_gaps, gap_rows
from benchmarks.real_checkpoint import TASKS, rounded_folder
from benchmarks.small_hopper import alignment_row
from flows.parity_plan import last_committed_step
from fp8core.config.load import load_config
from fp8core.config.run import RunConfig
from fp8core.errors import last_words
from fp8core.parity import BASELINE, learning_curve, variant_settings
from fp8core.parity import VARIANTS as FORMATS
from fp8core.report.run_data import read_run

CONFIG, RESULT = "real-h200", "real_accuracy"
DATA = ROOT / "build" / "real"
SETTINGS: Mapping[str, Any] = {
    "threads": 1,
    "reward.workers": 1,
    "logprobs.source": "training",
    "rollout.vllm.kv_cache_gib": 1,
    "rollout.vllm.gpu_memory_utilization": 0.03,
    "training.tokens_per_pass": 6144,
    "evaluation.every": 25,
    "evaluation.prompts": 1024,
    "evaluation.precision_gap": 0,
    "checkpoint.every": 1_000_000,
    "checkpoint.keep": 1,
}
# vLLM compiles its own model for each training anew, because the name of a new folder is part of its cache's key.
_STOCK = {"rollout.vllm.graphs": False}
# Libraries that would start a thread for each core, and a compiler with a process for each.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Training:
    task: str
    variant: str
    seed: int
    settings: tuple[str, ...]
    config: RunConfig

    @property
    def name(self) -> str:
        return f"{self.task}-{self.variant}-{self.seed}"

    @property
    def folder(self) -> Path:
        return self.config.runs / self.name

    @property
    def steps(self) -> int:
        """The last step that is committed; -1 where none is."""
        last = last_committed_step(self.folder)
        return -1 if last is None else last

    @property
    def done(self) -> bool:
        return self.steps == self.config.steps

    def command(self, config: str) -> list[str]:
        place = [f"runs={self.config.runs}", f"run={self.name}"]
        return [sys.executable, "-m", "benchmarks.real_training", config, *self.settings, *place]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is not done; write the rows and the verdict of what there is. Returns 0 when all is done, else 1."""
    options = _options(arguments)
    end = time.monotonic() + options.seconds
    out: Path = options.out.absolute()
    (out / "logs").mkdir(parents=True, exist_ok=True)
    trainings = plan(options)
    train([training for training in trainings if not training.done], options, out / "logs", end)
    left = [f"{each.name} after step {each.steps}" for each in trainings if not each.done]
    rows = measured_rows(trainings, options.config)
    write_rows(out / f"{RESULT}.json", [*rows, {"kind": "provenance", **provenance()}])
    if any(row["kind"] == "gap" for row in rows):
        draw_gaps(rows, out / f"{RESULT}.png")
        print(*accuracy_tables(rows), sep="\n\n")
    print(f"left: {'; '.join(left)}" if left else "all are done", flush=True)
    return 1 if left else 0


def plan(options: argparse.Namespace) -> list[Training]:
    """All trainings, seed by seed, so that pairs are whole when time runs out. Raises UserError: a setting is refused.

    A rounding of the checkpoint is one draw: each seed has another.
    """
    base, found = load_config(options.config, options.settings), []
    for seed, task, variant in product(options.seeds, options.tasks, VARIANTS):
        settings = {**SETTINGS, **variant_settings(FORMATS[FP8 if variant == FP8 else BASELINE], base, seed)}
        settings |= {} if variant == FP8 else _STOCK
        model = rounded_folder(options.data, seed) if variant == REDRAWN else options.data / "model"
        settings |= {"model": str(model), "data.source": str(options.data / f"{task}.jsonl"), "steps": options.steps}
        given = (*(f"{key}={json.dumps(value)}" for key, value in settings.items()), *options.settings)
        config = load_config(options.config, [*given, f"runs={options.runs.absolute()}"])
        found.append(Training(task, variant, seed, given, config))
    return found


def train(trainings: Sequence[Training], options: argparse.Namespace, logs: Path, end: float) -> None:
    """Train on every GPU as many side by side as are allowed, and begin the next when one ends; stop before `end`."""
    waiting, running = [*trainings], dict[subprocess.Popen[bytes], tuple[Training, str]]()
    while (waiting or running) and time.monotonic() < end - options.grace:
        load = Counter({gpu: 0 for gpu in options.gpus} | Counter(gpu for _, gpu in running.values()))
        gpu, busy = min(load.items(), key=lambda found: found[1])
        if waiting and busy < options.at_once:
            training = waiting.pop(0)
            with (logs / f"{training.name}.log").open("ab") as log:
                variables = {**_ONE_THREAD, "CUDA_VISIBLE_DEVICES": gpu}
                running[start(training.command(options.config), log, variables)] = training, gpu
            continue
        for process in [process for process in running if process.poll() is not None]:
            training, _ = running.pop(process)
            why = "" if process.returncode == 0 else f": {last_words((logs / f'{training.name}.log').read_text())}"
            print(f"{training.name}: ended with {process.returncode} after step {training.steps}{why}", flush=True)
        time.sleep(_POLL_SECONDS)
    for process in running:
        process.send_signal(signal.SIGTERM)
    for process, (training, _) in running.items():
        code = ended(process, end)
        print(f"{training.name}: stopped with {code} after step {training.steps}", flush=True)


def measured_rows(trainings: Sequence[Training], config: str) -> list[Row]:
    """Alignment and curve of each training that has a step, then the gaps of those that are done."""
    rows, curves = list[Row](), list[TrainedCurve]()
    for training in trainings:
        if training.steps < 1:
            continue
        run, about = read_run(training.folder, training.name), {"task": training.task, "seed": training.seed}
        shown = " ".join(["fp8-grpo run", config, *(f"--set {setting}" for setting in training.settings)])
        shown = shown.replace(f"{ROOT}/", "")
        curve = learning_curve(run)
        if curve is not None and training.done:
            curves.append(TrainedCurve(training.task, training.variant, training.seed, curve))
        points = {} if curve is None else dict(zip(curve.steps, curve.accuracies, strict=True))
        rows.append(alignment_row(run, training.variant, shown) | about | {"curve": points})
    pairs = len({(training.task, training.seed) for training in trainings})
    return [*rows, *gap_rows(curves, pairs, trainings[0].config.parity.last_evaluations)]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a pretrained checkpoint on three tasks, in BF16 and in FP8.")
    parser.add_argument("--out", type=Path, required=True, help="folder of results; the same for every call")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of runs; the same for every call")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of benchmarks.real_checkpoint")
    parser.add_argument("--config", default=CONFIG)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300, help="of each training (default 300)")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    gpus = [str(gpu) for gpu in range(torch.cuda.device_count())] or [""]
    parser.add_argument("--gpus", nargs="+", default=gpus, help="numbers of GPUs (default: all)")
    parser.add_argument("--at-once", type=int, default=13, help="trainings side by side on each GPU (default 13)")
    parser.add_argument("--seconds", type=float, default=560.0, help="of this call (default 560)")
    parser.add_argument("--grace", type=float, default=60.0, help="of these, for a last step and its checkpoint")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
