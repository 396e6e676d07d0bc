"""The part of a training that a tracking service has not got yet: the ledger beyond the cursor in tracking.json."""

import json
import re
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path

import yaml

from flows.tracking.record import RecordFile
from flows.tracking.tracker import CHAIN_TIP, RUN_DIRECTORY, TRAINING, Checkpoint, Table, Tracker
from fp8core.alignment.bounds import stop_bounds
from fp8core.config.layers import leaves
from fp8core.config.run import RunConfig, public_dump
from fp8core.metrics.drafts import draft_metrics
from fp8core.metrics.registry import METRICS, find_metric
from fp8core.metrics.rollout import TOKENS
from fp8core.metrics.time import OVERHEAD, SECONDS, TOKENS_PER_SECOND
from fp8core.report.completions import Row, largest_difference, pick_completions
from fp8core.report.console import shows_sample
from fp8core.report.pages import report_html
from fp8core.report.run_data import CURVES, REPORT, compared_artifacts, overhead_ms, read_run
from fp8core.report.text import pipeline_text
from fp8core.run.context import RunContext
from fp8core.run.execute import committed_step, step_metrics, stored_manifest
from fp8core.store.layout import POLICY, SUMMARY, manifest_place
from fp8core.store.ledger import START, BoundEntry, CheckpointEntry
from fp8core.store.manifest import ChainTip
from fp8core.store.run_view import RunView
from fp8core.store.tables import key_of

COMPLETIONS = "completions.json"
_SAMPLE_ROWS = 8
SAMPLE_COLUMNS = ("step", "prompt", "completion", "reference", "reward", "outcome")
# As wide as MLflow shows them, the first six fit beside its list of files.
COMPLETION_COLUMNS = (
    *("prompt", "completion", "reward", "advantage", "mismatch", "step", "group", "sample"),
    *("outcome", "detail"),
)


class Backlog:
    """`service`: its name in tracking.json, which holds what it has got."""

    def __init__(self, run: RunContext, service: str, tracker: Tracker, file: RecordFile) -> None:
        self._run, self.tracker = run, tracker
        self._service, self._file = service, file
        self._has_description = self._readable = self._has_result = False
        self._report: Path | None = None
        self._published_state: tuple[BoundEntry | None, bool] = (None, False)

    @property
    def published(self) -> int:
        """The last step up to which the service holds all; -1: none."""
        return self._file.record.services[self._service].published

    def follow_ledger(self) -> None:
        """The files of committed steps can be read from now on."""
        self._readable = True

    def add_report(self, report: Path) -> None:
        """A report of what is committed was written: it follows, with completions."""
        self._report = report

    def add_result(self) -> None:
        """Picture, summary and report are in the run's folder, and nothing more will be committed."""
        self._has_result = True

    def publish(self) -> Iterator[None]:
        """Publish what is missing, in order; yields after each piece. Raises as `Tracker`."""
        try:
            yield from self._pieces()
        except Exception:
            self._has_description = False  # What a service did not get, or lost, at the start.
            raise

    def _pieces(self) -> Iterator[None]:
        run, tracker = self._run, self.tracker
        if not self._has_description:
            publish_description(run, tracker)
            self._has_description = True
            yield
        if self._readable:
            yield from self._publish_committed()
        if self._has_result:
            publish_result(run, tracker)
            self._has_result = False
        if self._report is not None:
            report, self._report = self._report, None
            tracker.log_artifact(REPORT, report)
            publish_completions(run, tracker)

    def _note(self, **cursor: int) -> None:
        self._file.change_service(self._service, **cursor)

    def _publish_committed(self) -> Iterator[None]:
        ledger = self._run.directory.ledger
        while ledger.step(step := self.published + 1) is not None:
            publish_step(self._run, self.tracker, step)
            self._note(published=step)
            yield
        # A redo may come at any time: what a later step reads was damaged.
        if (state := (ledger.last_bound(), bool(ledger.inexact_steps()))) != self._published_state:
            publish_state(self.tracker, *state)
            self._published_state = state
            yield
        models = self._file.record.services[self._service].models
        newest = takewhile(lambda entry: entry.step > models, ledger.last_checkpoints())
        for entry in reversed(list(newest)):
            self.tracker.log_checkpoint(checkpoint_of(self._run, entry))
            self._note(models=entry.step)
            yield


def publish_description(run: RunContext, tracker: Tracker) -> None:
    bounds, config = stop_bounds(run.config), public_dump(run.config)
    tracker.start(leaves(config) | bounds.description())
    tags = {
        "alignment_contract": bounds.contract,
        "alignment_bounds": bounds.summary,
        "config": run.config.name,
        "precision": precision(run.config),
        "code_version": run.code_version,
        "data_digest": run.source.training_digest(),
        RUN_DIRECTORY: str(run.directory.path),
    }
    tracker.set_tags(tags, _note(run))
    tracker.log_artifact("config.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    tracker.log_artifact("graph.txt", pipeline_text(run.graph) + "\n")


def publish_state(tracker: Tracker, crossing: BoundEntry | None, inexact: bool) -> None:
    """Tags of a bound that was crossed, and of a run that went on from another policy than before a stop."""
    tags = {"inexact": "true"} if inexact else {}
    if crossing is not None:
        tags |= {
            "bounds": "crossed",
            "bound_crossed": f"{crossing.reason}; {crossing.action} after step {crossing.step}",
        }
    tracker.set_tags(tags)


def step_speed(run: RunContext, index: int) -> dict[str, float]:
    """Seconds of a step from its first task to its commit, its tokens a second, and milliseconds outside of tasks.

    Empty for step 0, and for a step that was cut: no process ran for a part of it.
    """
    if index == START or run.directory.ledger.was_cut(index):
        return {}
    ran = [(task.started, task.started + task.seconds) for task in run.directory.ledger.tasks(index).values()]
    commit_time, tokens = committed_step(run, index).committed_ms / 1000, step_metrics(run, index).get(TOKENS.name)
    began, ended = min(start for start, _ in ran), max(commit_time, *(end for _, end in ran))
    seconds = ended - began
    rate = {TOKENS_PER_SECOND.name: tokens / seconds} if tokens is not None and seconds > 0 else {}
    return {SECONDS.name: seconds, OVERHEAD.name: overhead_ms((began, ended), ran), **rate}


def publish_step(run: RunContext, tracker: Tracker, index: int) -> None:
    manifest, entry = stored_manifest(run, index), committed_step(run, index)
    seconds, answers = manifest.observed.timings, manifest.observed.environment
    total = sum(seconds.values())
    times = {f"time/{task}_share": value / total for task, value in seconds.items() if total > 0}
    times |= {f"time/environment_{name}": answers[name] for name in ("p50", "p95", "max") if name in answers}
    times |= {f"time/{task}_seconds": value for task, value in seconds.items()}
    drafts = draft_metrics(manifest.observed.drafts)
    shown = shown_metrics({**step_metrics(run, index), **drafts, **times, **step_speed(run, index)})
    tracker.log_step(index, shown, entry.committed_ms, {CHAIN_TIP: str(ChainTip.of(manifest))})
    tracker.log_artifact(manifest_place(index), manifest.model_dump_json(indent=2) + "\n")
    if shows_sample(index, run.config.steps) and (samples := sample_table(run, index)) is not None:
        tracker.log_artifact(f"samples/step_{index:06d}.json", samples)


def checkpoint_of(run: RunContext, entry: CheckpointEntry) -> Checkpoint:
    """Tag `checkpoint` names the folder that `transformers` loads."""
    description, folder = run.directory.description(), run.directory.path
    assert description is not None, "an open run has its run.json"
    return Checkpoint(
        entry.step,
        # Without characters that MLflow allows in no model's name.
        re.sub(r"""[/:.%"']""", "-", f"{folder.name}-{entry.step:05d}"),
        committed_step(run, entry.step).committed_ms,
        tags={
            TRAINING: description.id,
            "run": folder.name,
            "config": run.config.name,
            "precision": precision(run.config),
            "step": str(entry.step),
            "weights_digest": entry.weights_digest,
            "checkpoint": str(folder / entry.uri / POLICY),
            "code_version": run.code_version,
        },
        metrics=model_metrics(step_metrics(run, entry.step)),
    )


def publish_completions(run: RunContext, tracker: Tracker) -> None:
    if (completions := completion_groups(run)) is not None:
        tracker.log_artifact(COMPLETIONS, completions)


def publish_result(run: RunContext, tracker: Tracker) -> None:
    folder = run.directory.path
    for place in (f"pictures/{CURVES}", SUMMARY, REPORT):
        tracker.log_artifact(place, folder / Path(place).name)
    publish_completions(run, tracker)
    contract_state = "kept" if stop_bounds(run.config).limits else "not judged"
    bounds = contract_state if run.directory.ledger.last_bound() is None else "crossed"
    diagnosis = json.loads((folder / SUMMARY).read_bytes())["diagnosis"]
    note = "\n\n".join(filter(None, [_note(run), diagnosis]))
    tracker.set_tags({"bounds": bounds, "diagnosis": diagnosis or "none"}, note)


def write_report(run: RunContext, error: str | None = None) -> Path:
    """Write the report of all that is committed into the run's folder. `error` is what the training fails with."""
    page = report_html([read_run(run.directory.path, run.directory.path.name, error)])
    return run.directory.write_text(REPORT, page)


def precision(config: RunConfig) -> str:
    """Formats of linears and cache: `fp8_block+fp8`, or those of rollout and training where they differ."""
    sides = [f"{side.linear}+{side.kv_cache}" for side in (config.precision.rollout, config.precision.training)]
    return sides[0] if sides[0] == sides[1] else f"{sides[0]} / {sides[1]}"


def _note(run: RunContext) -> str:
    config = run.config
    what = f"**GRPO, `{config.name}`**: {config.steps} steps, seed {config.seed}, data `{config.data_title}`."
    return f"{what}\n\nPrecision: `{precision(config)}`. Report: artifact `{REPORT}`."


def sample_table(run: RunContext, index: int) -> Table | None:
    """The first completion of each of the first eight prompts of a step; None where gc removed them."""
    store = run.store
    by_kind = {ref.kind: ref for ref in run.directory.ledger.artifacts(index).values() if store.path(ref).exists()}
    if not by_kind.keys() >= {"prompts", "rollouts", "rewards"}:
        return None
    # Only these columns become Python objects: a step's tokens are millions.
    prompts = store.get_table(by_kind["prompts"], ["group", "text", "reference"]).to_pylist()
    rollouts = store.get_table(by_kind["rollouts"], ["group", "sample", "text"]).to_pylist()
    rewards = store.get_table(by_kind["rewards"], ["reward", "outcome"]).to_pylist()
    prompt_texts = {row["group"]: (row["text"], row["reference"]) for row in prompts}
    rows = []
    for completion, reward in zip(rollouts, rewards, strict=True):
        if completion["sample"] == 0:
            prompt, reference = prompt_texts[completion["group"]]
            rows.append((index, prompt, completion["text"], reference, reward["reward"], reward["outcome"]))
    return Table(SAMPLE_COLUMNS, rows[:_SAMPLE_ROWS])


def completion_groups(run: RunContext) -> Table | None:
    """Whole groups of the prompts that the report shows, early and late; None where no step has its completions.

    `mismatch` is the largest |log p - log g| of a token, None for a completion that was not compared. A step that gc
    thinned out, or that another task trained, has no advantages.
    """
    view = RunView.read(run.directory.path)
    # The report names the unreadable files.
    picked = pick_completions(view, compared_artifacts(view), [])
    if not picked:
        return None
    rows = [row for group in picked for row in group]
    prompts = {step: _prompts(run, step) for step in {row["step"] for row in rows}}
    return Table(COMPLETION_COLUMNS, [_cells(row, prompts[row["step"]]) for row in rows])


def _cells(row: Row, prompts: dict[str, str]) -> tuple[object, ...]:
    numbers = (row["reward"], row["advantage"], largest_difference(row))
    shown = (None if number is None else float(f"{number:.4g}") for number in numbers)
    prompt = prompts.get(row["prompt_id"], row["prompt_id"])
    return prompt, row["text"], *shown, row["step"], *key_of(row), row["outcome"], row["detail"]


def _prompts(run: RunContext, index: int) -> dict[str, str]:
    refs = [ref for ref in run.directory.ledger.artifacts(index).values() if ref.kind == "prompts"]
    store = run.store
    tables = [store.get_table(ref, ["prompt_id", "text"]).to_pylist() for ref in refs if store.path(ref).exists()]
    return {row["prompt_id"]: row["text"] for rows in tables for row in rows}


CORE = "core/"
DETAIL = "detail/"


def shown_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """A step's metrics by MLflow's names; some become their distance from the ideal."""
    return {shown_name(name): find_metric(name).headline_value(value) for name, value in metrics.items()}


def shown_name(name: str) -> str:
    headline = find_metric(name).headline
    return f"{CORE}{headline}" if headline else f"{DETAIL}{name}"


def model_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a checkpoint, from those of its step, by the names of the run's own."""
    names = [metric.name for metric in METRICS if metric.of_checkpoint]
    return shown_metrics({name: metrics[name] for name in names if name in metrics})
