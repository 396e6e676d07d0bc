"""Train `tiny` under one changed setting after another, and under settings that must fail.

    python -m benchmarks.learning_settings --out FOLDER                  all of them; what is done there stays done
    python -m benchmarks.learning_settings --out FOLDER 'rate 4e-4' ...  some of them, with `rate` also SmolLM2's

All trainings of `tiny` have one seed and begin from one warm start, a group's size changes the prompts so that a step
has 256 completions. `SmolLM2 ...` needs build/real (`benchmarks.real_checkpoint`). Writes
benchmarks/results/learning_settings.json.
"""

import argparse
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.harness import RESULTS, ROOT, Row, write_rows
from benchmarks.small_hopper import Training, run_provenance
from fp8core.metrics.reward import REWARD
from fp8core.report.run_data import read_run
from fp8core.store.metrics import HELDOUT, series

_REFERENCE = {"name": "reference", "uses": "tasks.reference:reference", "needs": ["rollouts", "scales"]}
_INSERTED = f"pipeline.insert={json.dumps([{'after': 'rollout', 'step': _REFERENCE}])}"
_USUAL = "as tiny.yaml"
GROUPS: dict[str, dict[str, Sequence[str]]] = {
    "learning rate": {f"rate {rate}": [f"training.learning_rate={rate}"] for rate in ("2e-5", "4e-4", "1e-3", "4e-3")},
    "completions of a prompt": {
        f"group of {size}": [f"rollout.group_size={size}", f"rollout.prompts_per_step={256 // size}"]
        for size in (2, 4, 16)
    },
    "clip, four updates of a rollout": {
        f"4 updates, clip {low}, {high}": ["training.minibatches=4", f"loss.clip_low={low}", f"loss.clip_high={high}"]
        for low, high in ((0.2, 0.28), (0.02, 0.02))
    },
    "penalty towards the reference": {
        f"KL {weight}": [f"loss.reference_kl={weight}", _INSERTED] for weight in (0.05, 1.0)
    },
    "versions ahead": {
        f"staleness {age}": ["pipeline.mode=asynchronous", f"pipeline.max_staleness={age}"] for age in (1, 4)
    },
}
FAULTS: dict[str, Sequence[str]] = {
    "verifier of another format": ["reward.verifier=integer"],
    "4 tokens a completion": ["rollout.max_new_tokens=4"],
    "temperature 0.05": ["rollout.temperature=0.05"],
    "rate 1e-7": ["training.learning_rate=1e-7"],
    "training in BF16": ["precision.training.linear=bf16", "correction.method=none"],
}
REAL = {f"SmolLM2 {rate}": [f"training.learning_rate={rate}"] for rate in ("2e-6", "2e-5", "2e-4")}
_STEPS, _FAULT_STEPS, _LAST = 40, 16, 10
_MEANS = {
    "reward": REWARD.name,
    "signal": "reward/groups_with_signal",
    "right": "reward/outcome_right",
    "unparsed": "reward/outcome_unparsed",
    "cut_off": "rollout/cut_off_share",
    "entropy": "rollout/entropy",
    "gradient": "train/grad_norm",
    "clipped": "train/clip_fraction",
    "kl": "train/reference_kl",
    "gain": "train/update_gain",
    "error": "alignment/token_mult_prob_error",
    "ess": "correction/ess",
}
"""Metrics of which a row has the mean over the last steps."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all but SmolLM2's")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    options = parser.parse_args()
    trainings = plan(options.out.absolute())
    for name in options.names or [name for name in trainings if name not in REAL]:
        if not trainings[name].done:
            code = subprocess.run(trainings[name].command, cwd=ROOT).returncode
            print(f"{name}: exit code {code}", flush=True)
    write_rows(RESULTS / "learning_settings.json", [row(each) for each in trainings.values() if each.done])


def plan(folder: Path) -> dict[str, Training]:
    """All trainings by name."""
    settings = {_USUAL: [], **{name: each for group in GROUPS.values() for name, each in group.items()}}
    steps = {**dict.fromkeys(settings, _STEPS), **dict.fromkeys(FAULTS, _FAULT_STEPS), **dict.fromkeys(REAL, _LAST)}
    trainings = {}
    for number, (name, changes) in enumerate({**settings, **FAULTS, **REAL}.items()):
        config = "real" if name in REAL else "tiny"
        every = [f"steps={steps[name]}", *changes]
        trainings[name] = Training(name, folder / f"run{number}", config, tuple(every), steps[name])
    return trainings


def row(training: Training) -> Row:
    """Reward and held-out accuracy by step, means of metrics over the last steps, and the diagnosis."""
    run = read_run(training.folder, training.variant)
    last = run.history[-_LAST:]
    means = {name: [step[metric] for step in last if metric in step] for name, metric in _MEANS.items()}
    heldout_steps, heldout = series(run.history, HELDOUT.name)
    return {
        "kind": "learning_setting",
        "name": training.variant,
        "steps": training.steps,
        "rewards": [round(value, 4) for value in series(run.history, REWARD.name)[1]],
        "heldout_steps": heldout_steps,
        "heldout": [round(value, 4) for value in heldout],
        "last": {name: float(f"{fmean(values):.6g}") for name, values in means.items() if values},
        "diagnosis": json.loads((training.folder / "summary.json").read_text())["diagnosis"],
        **run_provenance(run.view),
        "command": training.shown,
    }


if __name__ == "__main__":
    main()
