"""What a training of h200-small came to, as rows: alignment and learning, and the ledger of a step."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from fp8core.report.png import draw_png
from fp8core.report.run_charts import ALIGNMENT, K3, LEARNING, curve_chart
from fp8core.report.run_data import RunData
from fp8core.report.summary import HELDOUT, REWARD, TMPE, series, union_seconds
from fp8core.store.artifacts import read_checked
from fp8core.store.evidence import Commit, Evidence, read_manifest
from fp8core.store.ledger import START, CheckpointEntry, SegmentEntry, StepEntry

Row = dict[str, Any]

P99 = "alignment/abs_diff_p99"
ARTIFACTS, ORCHESTRATION, WALL = "artifacts", "orchestration", "wall"
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
    errors, k3, p99 = (series(run.history, metric)[1] for metric in (TMPE, K3, P99))
    heldout, rewards = series(run.history, HELDOUT)[1], series(run.history, REWARD)[1]
    return {
        "kind": "alignment",
        "variant": variant,
        "tmpe_median": median(errors),
        "tmpe_max": max(errors),
        "k3_kl": median(k3),
        "p99_abs_diff": median(p99),
        "heldout_first": heldout[0],
        "heldout_last": heldout[-1],
        "warm_start": styles(run.evidence),
        "reward_first": rewards[0],
        "reward_last": rewards[-1],
        "steps": len(rewards),
        "asked": run.asked,
        "seconds": seconds_by_task(run),
        **provenance(run.evidence),
        "command": command,
    }


def step_ledger_row(run: RunData, variant: str, command: str) -> Row | None:
    """Mean seconds of a step by part, and their percentage of the whole; None without a step between two commits.

    A part is a task of the pipeline without the files it stored and read; `artifacts` are all files, the step's record,
    its commit and its checkpoint; `orchestration` is when nothing of these ran. Tasks that run side by side count in
    full, so that the percentages may add up to more than 100. The row's own `artifacts` say where those seconds went.
    """
    steps = timed_steps(run.evidence)
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
        **provenance(run.evidence),
        "command": command,
    }


def timed_steps(evidence: Evidence) -> list[TimedStep]:
    """Steps whose whole duration lies within one process; its first one, in which engines compile, is none."""
    found = []
    for _, entries in _processes(evidence):
        before, checkpoint = None, 0.0
        for entry in entries:
            if isinstance(entry, CheckpointEntry):
                checkpoint = entry.seconds
            else:
                if before is not None and entry.step > START + 1:
                    wall = (entry.committed_ms - before.committed_ms) / 1000
                    found.append(TimedStep(evidence.steps[entry.step], wall, checkpoint))
                before, checkpoint = entry, 0.0
    return found


def step_parts(step: TimedStep) -> dict[str, float]:
    """Seconds of a step by part (`step_ledger_row`), and WALL."""
    tasks, commit = step.commit.tasks, step.commit.entry.seconds
    parts = {name: entry.seconds - entry.storing for name, entry in tasks.items() if name != _RECORD}
    parts[ARTIFACTS] = sum(artifact_parts(step).values())
    busy = union_seconds((entry.started, entry.started + entry.seconds) for entry in tasks.values())
    # Tasks are timed by another clock than commits.
    parts[ORCHESTRATION] = max(0.0, step.wall - busy - commit - step.checkpoint)
    return parts | {WALL: step.wall}


def artifact_parts(step: TimedStep) -> dict[str, float]:
    """Seconds of a step's artifacts: the files of each task, the whole of its record, its commit, its checkpoint."""
    files = {name: entry.storing for name, entry in step.commit.tasks.items()}
    if _RECORD in files:
        files[_RECORD] = step.commit.tasks[_RECORD].seconds
    return files | {"commit": step.commit.entry.seconds, "checkpoint": step.checkpoint}


def seconds_by_task(run: RunData) -> dict[str, float]:
    """Over all steps; the tasks of step 0 as `first_...` beside the warm start, and the time of all processes."""
    first = run.evidence.steps[START].tasks
    before = {name if name == "warm_start" else f"first_{name}": entry.seconds for name, entry in first.items()}
    after = {name: sum(steps.values()) for name, steps in run.seconds.items()}
    return before | after | {"total": sum(_durations(run.evidence))}


def styles(evidence: Evidence) -> dict[str, float]:
    """Sampled accuracy of each style of demonstration after the warm start."""
    ref = evidence.steps[START].artifacts["evaluation"]
    content = json.loads(read_checked(evidence.folder / ref.uri, ref.digest, ref.size))
    return {row["style"]: row["accuracy"] for row in content.get("styles", [])}


def provenance(evidence: Evidence) -> Row:
    """Commit, versions and machine of the newest step."""
    manifest, problems = read_manifest(evidence.folder, evidence.steps[max(evidence.steps)])
    assert manifest is not None, problems
    return {
        "commit": manifest.observed.git,
        "versions": manifest.record.versions,
        "hardware": manifest.observed.hardware,
    }


def draw_variants(runs: Mapping[str, RunData], path: Path, title: str) -> None:
    """Learning and alignment of the variants over one another."""
    lines = [(variant, run.history) for variant, run in runs.items()]
    draw_png([curve_chart(curve, lines) for curve in (*LEARNING[:4], *ALIGNMENT[:2])], path, title)


def _processes(evidence: Evidence) -> list[tuple[float, list[StepEntry | CheckpointEntry]]]:
    """When each process of a run started (Unix seconds), and the steps and checkpoints it made, in order."""
    found: list[tuple[float, list[StepEntry | CheckpointEntry]]] = []
    for _, entry in evidence.entries:
        if isinstance(entry, SegmentEntry):
            # Said again before a checkpoint.
            if not found or entry.started != found[-1][0]:
                found.append((entry.started, []))
        elif isinstance(entry, StepEntry | CheckpointEntry):
            found[-1][1].append(entry)
    return found


def _durations(evidence: Evidence) -> Iterator[float]:
    """Seconds of each process, from its start to its last commit."""
    for started, entries in _processes(evidence):
        committed = [entry.committed_ms for entry in entries if isinstance(entry, StepEntry)]
        if committed:
            yield committed[-1] / 1000 - started


def _ordered(run: RunData, parts: Sequence[Mapping[str, float]]) -> list[str]:
    """Parts in the order of the pipeline, then what belongs to no task."""
    present = {name for part in parts for name in part}
    tasks = [step.name for step in run.pipeline if step.name in present]
    return [*tasks, ARTIFACTS, ORCHESTRATION, WALL]
