"""Train the variants of h200-small, from BF16 to FP8 everywhere, and collect their rows and curves.

    python -m benchmarks.small_hopper --out FOLDER --seconds 520                    the usual ones, one after another
    python -m benchmarks.small_hopper --out FOLDER --seconds 520 bf16 fp8_rollout   some of them

Every variant is a run of its own in FOLDER/runs, begun from one warm start that the first of them makes. When the time
is over the one that trains stops after its step. The same command goes on from there: call it until all are done. A
warm start that is cut begins anew: give the first call time for it. FOLDER/small_hopper.json has the rows,
FOLDER/small_hopper.png the curves, FOLDER/logs the output of each run.

Predicted before their first run on an H200: `fp8_end_to_end_kv_sglang` has an error between 1.0001 and 1.001 (its
linears are ours, its attention reads FP8 codes in another order than training) and the held-out accuracy of the others,
1.0; with the aligned model (`fp8_end_to_end_kv_sglang_aligned`) the error is exactly 1. `fp8_end_to_end_kv_tools`,
whose policy may call the calculator, has an error of exactly 1 and learns to call it: 0.5 to 0.99 held out. Nothing
was written down before for `fp8_end_to_end_kv_tools_asynchronous`, whose tokens are up to two versions old.
`fp8_end_to_end_kv_turns` answers ten questions in ten turns or more: predicted are an error of exactly 1 in every step,
no token that differs, 9.9 turns an episode, and a held-out reward that goes from 0.4 to 0.9 in 40 steps.
`fp8_end_to_end_kv_top_p` samples with top-p 0.95: an error of exactly 1, and less entropy than without.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.harness import Row, provenance, run_until, training_command, write_rows
from benchmarks.tables import WALL, loop_tables
from fp8core.config.load import load_config
from fp8core.config.run import RunConfig
from fp8core.metrics.reward import REWARD
from fp8core.parity import VARIANTS, variant_settings
from fp8core.report.chart import curve_chart, section_metrics
from fp8core.report.drawing import draw_png
from fp8core.report.run_data import RunData, read_run, union_seconds
from fp8core.rl.alignment_metrics import K3, TMPE, TOKENS_DIFFERING
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import START, CheckpointEntry, SegmentEntry, StepEntry
from fp8core.store.metrics import HELDOUT, series
from fp8core.store.run_view import Commit, RunView

NAMES = {
    "bf16": "bf16",
    "fp8_rollout": "fp8-rollout",
    "fp8_rollout_tis": "fp8-rollout-corrected",
    "fp8_end_to_end": "fp8-end-to-end",
    "fp8_end_to_end_kv": "fp8-end-to-end-kv",
    "fp8_end_to_end_kv_stock": "fp8-end-to-end-kv",
    "fp8_end_to_end_kv_sglang": "fp8-end-to-end-kv",
    "fp8_end_to_end_kv_sglang_aligned": "fp8-end-to-end-kv",
    "fp8_end_to_end_kv_tools": "fp8-end-to-end-kv",
    "fp8_end_to_end_kv_tools_asynchronous": "fp8-end-to-end-kv",
    "fp8_end_to_end_kv_turns": "fp8-end-to-end-kv",
    "fp8_end_to_end_kv_top_p": "fp8-end-to-end-kv",
    "bf16_megatron": "bf16",
    "fp8_end_to_end_megatron": "fp8-end-to-end",
}
"""Variants of the rows, by the names that the parity flow has for them."""
# Repeatable attention of Megatron would hold all scores of a pack, and then nothing is repeated bit for bit.
_MEGATRON = {"training.trainer": "megatron", "training.deterministic": False, "replay.level": "tolerant"}
# As configs/tiny-tools.yaml: guesses and calls of the calculator are demonstrated, nothing worked step by step.
_TOOLS = {
    "environment.name": "calculator",
    "environment.options": {"modulus": 10, "left_to_right": True},
    "environment.max_turns": 3,
    "warm_start.step_by_step_share": 0.0,
    "warm_start.tool_share": 0.4,
    "warm_start.steps": 1500,
    "rollout.max_new_tokens": 64,
}
# Ten questions, one after another: the policy answers as the usual warm start taught it.
_TURNS = {
    "environment.name": "benchmarks.quiz:Quiz",
    "environment.max_turns": 12,
    "rollout.max_new_tokens": 224,
    "rollout.vllm.max_model_len": 256,
}
# All tokens are scored again by the versions that wrote them.
_AHEAD = {
    "pipeline.mode": "asynchronous",
    "pipeline.max_staleness": 2,
    "pipeline.verified_share": 1.0,
    "rollout.vllm.sleep": False,
}
_CHANGED: Mapping[str, Mapping[str, Any]] = {
    "fp8_end_to_end_kv_stock": {"rollout.vllm.model": "stock", "precision.attention": "fp8"},
    "fp8_end_to_end_kv_sglang": {
        "rollout.engine": "sglang",
        "precision.rounding_points": "stepwise",
        "precision.attention": "fp8",
    },
    "fp8_end_to_end_kv_sglang_aligned": {
        "rollout.engine": "sglang",
        "rollout.sglang.model": "aligned",
        "rollout.sglang.page_size": 64,
    },
    "fp8_end_to_end_kv_tools": _TOOLS,
    "fp8_end_to_end_kv_tools_asynchronous": _TOOLS | _AHEAD,
    "fp8_end_to_end_kv_turns": _TURNS,
    "fp8_end_to_end_kv_top_p": {"rollout.top_p": 0.95},
    "bf16_megatron": _MEGATRON,
    "fp8_end_to_end_megatron": {**_MEGATRON, "precision.scale_rule": "pow2"},
}
"""What more is unlike the configuration in variants that are trained when they are asked for: vLLM's own model, to show
what the aligned one changes, SGLang beside vLLM, episodes with a tool, also beside the update, and Megatron beside
torch."""
_USUAL = [name for name in NAMES if name not in _CHANGED]

RESULT = "small_hopper"
TERMINATED = 143
_SHOWN = 12_000


@dataclass(frozen=True)
class Training:
    """A variant, its folder, and its settings on top of the configuration."""

    variant: str
    folder: Path
    config: str
    settings: tuple[str, ...]
    steps: int

    @property
    def command(self) -> list[str]:
        """The command that trains it, or continues it."""
        return training_command(self.config, [*self.settings, f"runs={self.folder.parent}", f"run={self.folder.name}"])

    @property
    def label(self) -> str:
        """The same for readers, without the places of this machine."""
        return " ".join(["fp8-grpo run", self.config, *(f"--set {setting}" for setting in self.settings)])

    @property
    def done(self) -> bool:
        """True if its last step is committed and its report is written."""
        summary = self.folder / "summary.json"
        return summary.exists() and json.loads(summary.read_text())["steps"] == self.steps


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is not done, then write rows and curves of all that there is; returns 0 when all is done, else 1."""
    options = _options(arguments)
    out = options.out.absolute()
    (out / "logs").mkdir(parents=True, exist_ok=True)
    trainings = plan(options.config, options.overrides, options.variants or _USUAL, out / "runs")
    everything = plan(options.config, options.overrides, list(NAMES), out / "runs")
    failures: list[Row] = []
    for failure in _train(trainings, out / "logs", time.monotonic() + options.seconds, options.grace):
        failures += [] if failure is None else [failure]
        # After every variant: measurements survive any end of this process.
        _write(out, everything, failures)
    _show(out, everything, _write(out, everything, failures))
    left = [training.variant for training in trainings if not training.done]
    print(f"left: {', '.join(left)}" if left else "all are done", flush=True)
    return 1 if left else 0


def plan(config: str, overrides: Sequence[str], variants: Sequence[str], runs: Path) -> list[Training]:
    """The trainings of variants, in the order given. Raises UserError: the configuration is refused."""
    base = load_config(config, overrides)
    return [_training(base, config, overrides, variant, runs) for variant in variants]


def _training(base: RunConfig, config: str, overrides: Sequence[str], variant: str, runs: Path) -> Training:
    values = variant_settings(VARIANTS[NAMES[variant]], base, base.seed)
    values |= _CHANGED.get(variant, {})
    settings = (*overrides, *(f"{key}={json.dumps(value)}" for key, value in values.items()))
    return Training(variant, runs / f"{base.name}-{variant}", config, settings, base.steps)


def _train(trainings: Sequence[Training], logs: Path, deadline: float, grace: float) -> Iterator[Row | None]:
    """Train one after another until `deadline`; yields a row for each that failed, None for others."""
    for training in trainings:
        if training.done:
            print(f"{training.variant}: done before", flush=True)
            continue
        if time.monotonic() > deadline - 2 * grace:
            return
        began, log = time.monotonic(), logs / f"{training.variant}.log"
        with log.open("ab") as output:
            code = run_until(training.command, output, deadline - grace, deadline)
        print(f"{training.variant}: {_outcome(code)}, {time.monotonic() - began:.0f} s", flush=True)
        if not training.done and code != TERMINATED and time.monotonic() < deadline:
            said = log.read_text(errors="replace")[-_SHOWN:]
            print(said, flush=True)
            yield {"kind": "failure", "variant": training.variant, "code": code, "said": said, **provenance()}
        else:
            yield None


def _outcome(code: int) -> str:
    if code == 0:
        return "done"
    return f"stopped after a step ({code})" if code == TERMINATED else f"ended with {code}"


def _write(out: Path, trainings: Sequence[Training], failures: Sequence[Row]) -> list[Row]:
    """The rows of all that there is."""
    rows: list[Row] = []
    for training in filter(_has_steps, trainings):
        run = read_run(training.folder, training.variant)
        rows.append(alignment_row(run, training.variant, training.label))
        ledger = step_ledger_row(run, training.variant, training.label)
        rows += [] if ledger is None else [ledger]
    write_rows(out / f"{RESULT}.json", [*rows, *failures])
    return rows


def _show(out: Path, trainings: Sequence[Training], rows: Sequence[Row]) -> None:
    """Curves and tables."""
    runs = {training.variant: read_run(training.folder, training.variant) for training in filter(_has_steps, trainings)}
    if runs:
        draw_variants(runs, out / f"{RESULT}.png", "One warm start, several precisions")
    print(*loop_tables(rows), sep="\n\n", flush=True)


def _has_steps(training: Training) -> bool:
    """True if an iteration is committed."""
    if not (training.folder / LEDGER).exists():
        return False
    return max(read_run(training.folder, training.variant).view.steps, default=START) > START


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the variants of h200-small; call it again until all are done.")
    parser.add_argument("variants", nargs="*", type=_variant, metavar="VARIANT", help=", ".join(NAMES))
    parser.add_argument("--out", type=Path, required=True, help="folder of runs and results; the same for every call")
    parser.add_argument("--seconds", type=float, default=520.0, help="of this call (default 520)")
    parser.add_argument("--grace", type=float, default=45.0, help="of these, for a last step and its checkpoint")
    parser.add_argument("--config", default="h200-small", help="another configuration to make the variants of")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    return parser.parse_args(arguments)


def _variant(name: str) -> str:
    if name not in NAMES:
        raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(NAMES)}")
    return name


P99, TURNS = "alignment/abs_diff_p99", "environment/turns"
ARTIFACTS, ORCHESTRATION = "artifacts", "orchestration"
# Its work is the step's metrics and records.
_RECORD = "record"


@dataclass(frozen=True)
class TimedStep:
    """A step between two commits of one process: its seconds, and those of the checkpoint before it."""

    commit: Commit
    wall: float
    checkpoint: float


def alignment_row(run: RunData, variant: str, command: str) -> Row:
    """Mismatch over the steps, held-out accuracy and reward at both ends, and where the seconds went."""
    errors, k3, p99 = (series(run.history, metric)[1] for metric in (TMPE.name, K3.name, P99))
    heldout, rewards = series(run.history, HELDOUT.name)[1], series(run.history, REWARD.name)[1]
    differing, turns = (series(run.history, metric)[1] for metric in (TOKENS_DIFFERING.name, TURNS))
    return {
        "kind": "alignment",
        "variant": variant,
        "tmpe_median": median(errors),
        "tmpe_max": max(errors),
        "k3_kl": median(k3),
        "p99_abs_diff": median(p99),
        "tokens_differing": sum(differing),
        **({"turns": fmean(turns)} if turns else {}),
        "heldout_first": heldout[0],
        "heldout_last": heldout[-1],
        "reward_first": rewards[0],
        "reward_last": rewards[-1],
        "steps": len(rewards),
        "asked": run.requested,
        "seconds": seconds_by_task(run),
        **run_provenance(run.view),
        "command": command,
    }


def step_ledger_row(run: RunData, variant: str, command: str) -> Row | None:
    """Mean seconds of a step by part, and their percentage of the whole; None without a step between two commits.

    A part is a task of the pipeline with its files. `artifacts` are the step's record, its commit and its checkpoint;
    `orchestration` is the time without any of these. Tasks that run side by side count
    in full, so that the percentages may add up to more than 100. The row's own `artifacts` split those seconds.
    """
    steps = timed_steps(run.view)
    if not steps:
        return None
    parts = [step_parts(step) for step in steps]
    seconds = {name: fmean(part.get(name, 0.0) for part in parts) for name in _ordered(run, parts)}
    wall = seconds[WALL]
    stored = [artifact_parts(step) for step in steps]
    return {
        "kind": "step_ledger",
        "variant": variant,
        "steps": len(steps),
        "seconds": seconds,
        "percent": {name: 100 * value / wall for name, value in seconds.items() if name != WALL},
        "artifacts": {name: fmean(part[name] for part in stored) for name in stored[0]},
        **run_provenance(run.view),
        "command": command,
    }


def timed_steps(view: RunView) -> list[TimedStep]:
    """Steps whose whole duration lies within one process; its first one, in which engines compile, is none."""
    found = []
    for _, entries in _processes(view):
        before, checkpoint = None, 0.0
        for entry in entries:
            if isinstance(entry, CheckpointEntry):
                checkpoint = entry.seconds
            else:
                if before is not None and entry.step > START + 1:
                    wall = (entry.committed_ms - before.committed_ms) / 1000
                    found.append(TimedStep(view.steps[entry.step], wall, checkpoint))
                before, checkpoint = entry, 0.0
    return found


def step_parts(step: TimedStep) -> dict[str, float]:
    """Seconds of a step by part (`step_ledger_row`), and WALL."""
    tasks, commit = step.commit.tasks, step.commit.entry.seconds
    parts = {name: entry.seconds for name, entry in tasks.items() if name != _RECORD}
    parts[ARTIFACTS] = sum(artifact_parts(step).values())
    busy = union_seconds((entry.started, entry.started + entry.seconds) for entry in tasks.values())
    # Tasks are timed by another clock than commits.
    parts[ORCHESTRATION] = max(0.0, step.wall - busy - commit - step.checkpoint)
    return parts | {WALL: step.wall}


def artifact_parts(step: TimedStep) -> dict[str, float]:
    """Seconds of a step's record, its commit and its checkpoint."""
    record = {name: entry.seconds for name, entry in step.commit.tasks.items() if name == _RECORD}
    return record | {"commit": step.commit.entry.seconds, "checkpoint": step.checkpoint}


def seconds_by_task(run: RunData) -> dict[str, float]:
    """Over all steps; the tasks of step 0 as `first_...` beside the warm start, and the time of all processes."""
    first = run.view.steps[START].tasks
    before = {name if name == "warm_start" else f"first_{name}": entry.seconds for name, entry in first.items()}
    after = {name: sum(steps.values()) for name, steps in run.seconds.items()}
    return before | after | {"total": sum(_durations(run.view))}


def run_provenance(view: RunView) -> Row:
    """Commit, versions and machine of the newest step."""
    manifest = ArtifactStore(view.folder).get_manifest(view.steps[max(view.steps)].entry.manifest)
    return {
        "commit": None,
        **manifest.observed.git,
        "versions": manifest.record.versions,
        "hardware": manifest.observed.hardware,
    }


def draw_variants(runs: Mapping[str, RunData], path: Path, title: str) -> None:
    """Learning and alignment of the variants, overlaid."""
    lines = [(variant, run.history) for variant, run in runs.items()]
    metrics = [*section_metrics("learning")[:4], *section_metrics("alignment")[:2]]
    draw_png([curve_chart(metric, lines) for metric in metrics], path, title)


def _processes(view: RunView) -> list[tuple[float, list[StepEntry | CheckpointEntry]]]:
    """When each process of a run started (Unix seconds), and the steps and checkpoints it made, in order."""
    found: list[tuple[float, list[StepEntry | CheckpointEntry]]] = []
    for _, entry in view.entries:
        if isinstance(entry, SegmentEntry):
            # Repeated before a checkpoint.
            if not found or entry.started != found[-1][0]:
                found.append((entry.started, []))
        elif isinstance(entry, StepEntry | CheckpointEntry):
            found[-1][1].append(entry)
    return found


def _durations(view: RunView) -> Iterator[float]:
    """Seconds of each process, from its start to its last commit."""
    for started, entries in _processes(view):
        committed = [entry.committed_ms for entry in entries if isinstance(entry, StepEntry)]
        if committed:
            yield committed[-1] / 1000 - started


def _ordered(run: RunData, parts: Sequence[Mapping[str, float]]) -> list[str]:
    """Parts in the order of the pipeline, then what belongs to no task."""
    present = {name for part in parts for name in part}
    tasks = [name for name in run.seconds if name in present]
    return [*tasks, ARTIFACTS, ORCHESTRATION, WALL]


if __name__ == "__main__":
    sys.exit(main())
