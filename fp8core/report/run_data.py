"""The content of a run's report, read from its folder alone, as far as it can be.

A file that could not be read is named as `damaged` (not what was written) or `removed` (by gc).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

from fp8core.errors import StoredFileError
from fp8core.metrics.drafts import draft_metrics
from fp8core.metrics.reward import REWARD, SIGNAL
from fp8core.metrics.rollout import TOKENS
from fp8core.report.chart import count_text
from fp8core.report.completions import Examples, heldout_examples, read_examples, unread
from fp8core.rl.alignment_metrics import COMPARED_TOKENS, TMPE, TOKENS_DIFFERING
from fp8core.store.artifacts import ArtifactError, ArtifactStore
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import START, START_TASKS, BoundEntry, CheckpointEntry, RemovalEntry, StepEntry, TaskEntry
from fp8core.store.metrics import HELDOUT, OF_START, STEP, History, Interval, series, start_metrics
from fp8core.store.run_view import Commit, Provenance, RunView, spans

OUTSIDE_TASKS = "outside_tasks"
# Kinds of artifact that generation alone stores: completions, and what was written beside the update.
_ROLLOUT_KINDS = frozenset({"rollouts", "schedule"})


@dataclass(frozen=True)
class RunData:
    """A run as a report shows it.

    history: metrics of every committed step. seconds: task -> step -> seconds. busy: step -> seconds in which some task
    ran. stopped: why its last start ended before it was done, where that is known.
    """

    label: str
    view: RunView
    history: History
    seconds: Mapping[str, Mapping[int, float]]
    busy: Mapping[int, float]
    heldout: Examples
    examples: Examples
    provenance: Provenance
    damage_lines: Sequence[str]
    removed: Sequence[str]
    stopped: str | None = None

    @property
    def missing(self) -> list[str]:
        return [*self.damage_lines, *self.removed]

    @property
    def generating(self) -> dict[int, float]:
        """Seconds of generation by step, with those beside the update, whatever the pipeline calls its steps."""
        seconds: dict[int, float] = defaultdict(float)
        for commit in self.view.commits:
            for name, task in commit.tasks.items():
                if commit.step in self.seconds.get(name, {}) and _ROLLOUT_KINDS & {
                    r.kind for r in task.outputs.values()
                }:
                    seconds[commit.step] += self.seconds[name][commit.step]
        return seconds

    @property
    def requested(self) -> int | None:
        """The number of steps that the run was begun with, or was extended to."""
        config = self.view.config
        last = self.provenance.last
        known = ([] if config is None else [config.steps]) + ([] if last is None else [last.record.steps])
        return max(known, default=None)

    @property
    def steps_left(self) -> int:
        return max(0, (self.requested or 0) - max(self.view.steps, default=0))

    @property
    def status(self) -> str:
        last = max(self.view.steps, default=None)
        steps = "? steps" if self.requested is None else count_text(self.requested, "step")
        progress = f"finished, {steps}" if last == self.requested else f"{last} of {steps}"
        progress = "no step committed" if last is None else progress
        if self.stopped is None:
            return progress
        # One that has all its steps may have been opened once more, in vain.
        return f"{progress}; {'' if self.steps_left else 'its last start '}{self.stopped}"


def labels(folders: Sequence[Path]) -> list[str]:
    """The names of the folders, and their paths where two have one name."""
    names = [folder.absolute().name for folder in folders]
    return names if len({*names}) == len(names) else [str(folder) for folder in folders]


def read_run(folder: Path, label: str, error: str | None = None) -> RunData:
    """A run, and the `error` that its training failed with, where that is known.

    Raises UserError: the folder holds no run, or has a malformed run.json.
    """
    view = RunView.read(folder)
    commits = sorted(view.commits, key=lambda commit: commit.step)
    missing = [f"{problem.place}: {problem.problem}" for problem in view.problems]
    missing += [f"{LEDGER}: {fault}" for fault in (view.gap, view.cut_end) if fault is not None]
    provenance = Provenance()
    drafts: dict[int, dict[str, float]] = {}
    for commit in commits:
        try:
            manifest = ArtifactStore(folder).get_manifest(commit.entry.manifest)
        except StoredFileError as damage:
            missing.append(str(damage))
        else:
            provenance.add(manifest)
            drafts[commit.step] = draft_metrics(manifest.observed.drafts)
    compared = compared_artifacts(view)
    seconds: dict[str, dict[int, float]] = defaultdict(dict)
    busy: dict[int, float] = {}
    for commit in commits:
        if commit.step == START:
            continue
        busy[commit.step] = _busy(commit.tasks.values())
        for name, entry in commit.tasks.items():
            seconds[name][commit.step] = entry.seconds
    return RunData(
        label=label,
        view=view,
        history=[row | drafts.get(int(row[STEP]), {}) for row in _history(view, commits, missing)],
        seconds=seconds,
        busy=busy,
        heldout=heldout_examples(view, missing),
        examples=read_examples(view, compared, missing),
        provenance=provenance,
        damage_lines=missing,
        removed=_removed_files(view),
        stopped=_crossing_text(view) or (f"failed: {error}" if error else None),
    )


def _crossing_text(view: RunView) -> str | None:
    last = view.ledger.entries[-1] if view.ledger.entries else None
    if not isinstance(last, BoundEntry) or last.action not in ("pause", "fail"):
        return None
    return f"{'paused' if last.action == 'pause' else 'failed'} after step {last.step}: {last.reason}"


def _history(view: RunView, commits: Iterable[Commit], missing: list[str]) -> list[dict[str, float]]:
    store = ArtifactStore(view.folder)
    rows: list[dict[str, float]] = []
    for commit in commits:
        row: dict[str, float] = {STEP: commit.step}
        for ref in commit.artifacts.values():
            first = commit.step == START and ref.kind in OF_START
            if not first and ref.kind != "metrics":
                continue
            try:
                content = store.get_json(ref)
            except ArtifactError as error:
                missing.append(unread("metrics", commit.step, error, view.folder))
            else:
                row |= start_metrics(ref.kind, content) if first else content
        rows.append(row)
    return rows


def time_spent(view: RunView) -> dict[str, float]:
    """Seconds in each committed task: of the start, then of all iterations, their commits and checkpoints.

    `OUTSIDE_TASKS` is the rest of the time of all processes, such as the start of workers.
    """
    seconds: dict[str, float] = defaultdict(float)
    for commit in sorted(view.commits, key=lambda commit: commit.step):
        for name, task in commit.tasks.items():
            known = START_TASKS.get(name) if commit.step == START else None
            seconds[name if known is None else known.stage] += task.seconds
    for _, entry in view.entries:
        if isinstance(entry, StepEntry | CheckpointEntry):
            seconds["commit" if isinstance(entry, StepEntry) else "checkpoint"] += entry.seconds
    inside = _busy(entry for commit in view.commits for entry in commit.tasks.values())
    rest = sum(view.process_seconds) - inside - seconds.get("commit", 0.0) - seconds.get("checkpoint", 0.0)
    return {**seconds, OUTSIDE_TASKS: max(0.0, rest)}


def _busy(tasks: Iterable[TaskEntry]) -> float:
    return union_seconds((entry.started, entry.started + entry.seconds) for entry in tasks)


def compared_artifacts(view: RunView) -> tuple[str, str]:
    """Rollouts and log-probs that the metrics compare; ahead, these are by the versions that wrote the tokens."""
    compared = {"rollouts": "rollouts", "logprobs": "logprobs", "behaviour": "behaviour"}
    if view.config is None:
        return compared["rollouts"], compared["logprobs"]
    # The step that records metrics names both.
    steps = [step.inputs() for step in view.config.pipeline.steps]
    inputs_by_port = next((inputs for inputs in steps if {"rollouts", "logprobs"} <= inputs.keys()), {})
    compared |= {port: artifact for port, artifact in inputs_by_port.items() if artifact is not None}
    return compared["rollouts"], compared["behaviour" if "ahead" in view.config.features else "logprobs"]


def _removed_files(view: RunView) -> list[str]:
    return [
        f"gc removed files of steps {spans(entry.steps)} on {datetime.fromtimestamp(entry.when, UTC):%Y-%m-%d}"
        for _, entry in view.entries
        if isinstance(entry, RemovalEntry)
    ]


REPORT = "report.html"
CURVES = "curves.png"

EDGE_STEPS = 10
Learning = Literal["learned", "learned its prompts alone", "not learned", "got worse", "too short to tell"]


class ComparedTokens(NamedTuple):
    """The tokens on which both policies were compared, and their share of all; 0 and 1 where that is not known."""

    tokens: int
    share: float

    @property
    def words(self) -> str:
        if self.share < 1:
            return f"the {self.tokens:,} tokens that were compared, {100 * self.share:.2g} % of all"
        return f"all {self.tokens:,} tokens" if self.tokens else "all tokens"


def compared_tokens(history: History) -> ComparedTokens:
    rows = [row for row in history if COMPARED_TOKENS.name in row]
    count, total = (int(sum(row.get(name, 0.0) for row in rows)) for name in (COMPARED_TOKENS.name, TOKENS.name))
    return ComparedTokens(count, min(1.0, count / total) if total else 1.0)


def edge_steps(steps: int) -> int:
    """The number of steps at each end of a run that are averaged: ten, or half of a short run's."""
    return max(1, min(EDGE_STEPS, steps // 2))


def first_steps(values: Sequence[float]) -> float:
    return fmean(values[: edge_steps(len(values))])


def last_steps(values: Sequence[float]) -> float:
    return fmean(values[-edge_steps(len(values)) :])


def union_seconds(intervals: Iterable[Interval]) -> float:
    """Length of the union of [start, end] intervals, which may overlap and come in any order."""
    total = 0.0
    covered_to = float("-inf")
    for start, end in sorted(intervals):
        assert start <= end, f"interval [{start}, {end}] ends before it starts"
        total += max(0.0, end - max(start, covered_to))
        covered_to = max(covered_to, end)
    return total


def overhead_ms(step_interval: Interval, task_intervals: Iterable[Interval]) -> float:
    """Milliseconds of the step outside the union of its tasks."""
    start, end = step_interval
    inside = [(max(start, first), min(end, last)) for first, last in task_intervals if first < end and last > start]
    return 1000.0 * (end - start - union_seconds(inside))


def summarise(history: History, overheads: Sequence[float]) -> dict[str, Any]:
    """The results of all steps of a run, None where nothing was measured.

    `reward_first10` and `reward_last10` are means of `reward_edge_steps` steps: ten, or half of a shorter run.
    `overheads` are milliseconds in which no task ran, of the steps of this process.
    """
    _, rewards = series(history, REWARD.name)
    _, heldout = series(history, HELDOUT.name)
    _, tmpe = series(history, TMPE.name)
    return {
        "steps": len(rewards),
        "reward_first10": first_steps(rewards) if rewards else None,
        "reward_last10": last_steps(rewards) if rewards else None,
        "reward_edge_steps": edge_steps(len(rewards)) if rewards else 0,
        "heldout_first": heldout[0] if heldout else None,
        "heldout_last": heldout[-1] if heldout else None,
        "tmpe_max": max(tmpe, default=None),
        "tokens_differing": int(sum(series(history, TOKENS_DIFFERING.name)[1])),
        "tokens_compared": compared_tokens(history).tokens,
        "steps_without_signal": series(history, SIGNAL.name)[1].count(0.0),
        "overhead_ms_per_step": {"median": median(overheads), "mean": fmean(overheads)} if overheads else None,
    }
