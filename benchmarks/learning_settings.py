"""Train `tiny` under one changed setting after another, and under settings that must fail.

    python -m benchmarks.learning_settings --out FOLDER                  all of them; what is done there stays done
    python -m benchmarks.learning_settings --out FOLDER 'rate 4e-4' ...  some of them

All trainings have one seed and begin from one warm start. Every step has 256 completions, whatever the size of a group.
Writes benchmarks/results/learning_settings.json, prints the tables of docs/guides/hyper-parameters.md and
docs/guides/does-not-learn.md (as `python -m benchmarks.tables learning`), draws docs/images/hyper-parameters.svg.
"""

import argparse
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks.harness import RESULTS, ROOT, Row, table, write_rows
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
    "the verifier compares the whole text": ["reward.verifier=benchmarks.random_reward:is_reference"],
    "4 tokens a completion": ["rollout.max_new_tokens=4"],
    "temperature 0.05": ["rollout.temperature=0.05"],
    "rate 1e-7": ["training.learning_rate=1e-7"],
    "trainer in BF16, not corrected": [
        "precision.training.linear=bf16",
        "correction.method=none",
        "precision.accept_mismatch=true",
    ],
    "2 tokens a completion": ["rollout.max_new_tokens=2"],
}
IMAGE = ROOT / "docs" / "images" / "hyper-parameters.svg"
_STEPS, _FAULT_STEPS, _LAST = 40, 16, 10
_MEANS = {
    "signal": "reward/groups_with_signal",
    "right": "reward/outcome_right",
    "unparsed": "reward/outcome_unparsed",
    "cut_off": "rollout/cut_off_share",
    "entropy": "rollout/entropy",
    "gradient": "train/grad_norm",
    "clipped": "train/clip_fraction",
    "error": "alignment/token_mult_prob_error",
}
"""Metrics of which a row has the mean over the last steps."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    options = parser.parse_args()
    trainings = plan(options.out.absolute())
    for name in options.names or trainings:
        if not trainings[name].done:
            code = subprocess.run(trainings[name].command, cwd=ROOT).returncode
            print(f"{name}: exit code {code}", flush=True)
    rows = [row(each) for each in trainings.values() if each.done]
    write_rows(RESULTS / "learning_settings.json", rows)
    print(*learning_tables(rows), sep="\n\n")
    draw(rows)


def plan(folder: Path) -> dict[str, Training]:
    """All trainings by name."""
    settings = {_USUAL: (), **{name: each for group in GROUPS.values() for name, each in group.items()}, **FAULTS}
    trainings = {}
    for number, (name, changes) in enumerate(settings.items()):
        steps = _FAULT_STEPS if name in FAULTS else _STEPS
        trainings[name] = Training(name, folder / f"run{number}", "tiny", (f"steps={steps}", *changes), steps)
    return trainings


def row(training: Training) -> Row:
    """Reward and held-out accuracy by step, means of metrics over the last steps, and the diagnosis."""
    run = read_run(training.folder, training.variant)
    last = run.history[-_LAST:]
    means = {name: [step[metric] for step in last if metric in step] for name, metric in _MEANS.items()}
    sentence = json.loads((training.folder / "summary.json").read_text())["diagnosis"]
    return {
        "kind": "learning_setting",
        "name": training.variant,
        "steps": training.steps,
        "rewards": [round(value, 4) for value in series(run.history, REWARD.name)[1]],
        "heldout": [round(value, 4) for value in series(run.history, HELDOUT.name)[1]],
        "last": {name: float(f"{fmean(values):.6g}") for name, values in means.items() if values},
        "diagnosis": sentence and sentence.replace(f"{training.folder.parent}/", ""),
        **run_provenance(run.view),
        "command": training.label,
    }


def learning_tables(rows: Sequence[Row]) -> list[str]:
    """What each setting learned, and what the metrics say of faults and of settings with a diagnosis."""
    learned, faults = [], []
    for each in rows:
        last, rewards = each["last"], each["rewards"]
        heldout = " -> ".join(f"{each['heldout'][place]:.3f}" for place in (0, len(each["heldout"]) // 4, -1))
        if each["name"] not in FAULTS:
            ends = f"{fmean(rewards[:_LAST]):.3f} -> {fmean(rewards[-_LAST:]):.3f}"
            learned.append([each["name"], ends, heldout, f"{last['signal']:.2f}", f"{last['entropy']:.3f}"])
        if each["name"] in FAULTS or each["diagnosis"]:
            cells = (f"{last[name]:.2f}" for name in ("signal", "right"))
            faults.append([each["name"], heldout, *cells, (each["diagnosis"] or "none").partition(":")[0]])
    held_out = "held-out, first, after a quarter, last"
    return [
        table(["setting", "reward, first 10 -> last 10", held_out, "groups with a signal", "entropy"], learned),
        table(["fault", held_out, "signal", "right", "diagnosis"], faults),
    ]


def draw(rows: Sequence[Row]) -> None:
    """Mean reward of three steps, a panel for each setting; black is tiny.yaml."""
    rewards = {each["name"]: each["rewards"] for each in rows}
    with rc_context({"svg.hashsalt": "fp8-grpo", "font.size": 10}):
        figure = Figure(figsize=(12, 7), layout="constrained")
        panels = figure.subplots(2, 3, sharex=True, sharey=True)
        for panel, (title, settings) in zip(panels.flat, GROUPS.items(), strict=False):
            for name in (_USUAL, *settings):
                means = [fmean(rewards[name][max(0, i - 1) : i + 2]) for i in range(len(rewards[name]))]
                panel.plot(range(1, len(means) + 1), means, label=name, color="black" if name == _USUAL else None)
            panel.set(title=title, xlabel="step", ylabel="mean reward, of three steps")
            panel.grid(alpha=0.3)
            panel.legend(frameon=False)
        panels.flat[-1].set_visible(False)
        figure.savefig(IMAGE, metadata={"Date": None})


if __name__ == "__main__":
    main()
