"""What MLflow shows of a training, made from its ledger and artifacts alone. Publishing twice changes nothing."""

from collections.abc import Callable
from pathlib import Path

from fp8core.config.run import public_dump
from fp8core.report.graph import pipeline_mermaid, pipeline_text
from fp8core.report.run_data import read_runs
from fp8core.report.run_report import report_html
from fp8core.store.ledger import START, BoundEntry
from fp8core.workers.live import LiveRun
from tasks.commit import step_metrics
from tasks.logged_datasets import log_datasets
from tasks.repair import committed_step, stored_manifest
from tasks.tracking import Table, Tracker

REPORT = "report.html"
SAMPLE_COLUMNS = ("step", "prompt", "completion", "reference", "reward", "outcome")
BOUND_CROSSED = "bound_crossed"
ARTIFACT_COLUMNS = ("step", "task", "artifact", "kind", "digest", "bytes", "path")


def publish_description(run: LiveRun, tracker: Tracker) -> None:
    """What is known before the first step: parameters, the configuration, the graph and the data."""
    tracker.log_params(flat(public_dump(run.config)))
    tracker.log_dict(public_dump(run.config), "config.yaml")
    tracker.log_text(pipeline_text(run.plan), "graph.txt")
    tracker.log_text(f"```mermaid\n{pipeline_mermaid(run.plan)}\n```\n", "graph.md")
    tracker.set_tags({"code_version": run.code_version, "run_directory": str(run.directory.path)})
    log_datasets(tracker, run.config, run.source)


def publish_exactness(run: LiveRun, tracker: Tracker) -> None:
    """A tag on a run of which an update, redone after a stop, gave another policy than before."""
    if run.directory.ledger.inexact_steps():
        tracker.set_tags({"inexact": "true"})


def publish_bound(tracker: Tracker, crossed: BoundEntry) -> None:
    """A tag that names the bound of `alignment.stop` that was crossed last, and what was done about it."""
    tracker.set_tags({BOUND_CROSSED: f"{crossed.reason}; {crossed.action} after step {crossed.step}"})


def publish_step(run: LiveRun, tracker: Tracker, index: int) -> None:
    """A committed iteration: its metrics, its manifest and, where they are due, its tables."""
    manifest = stored_manifest(run, index)
    seconds = manifest.observed.timings
    total = sum(seconds.values())
    timings = {f"time/{task}_seconds": value for task, value in seconds.items()}
    shares = {f"time/{task}_share": value / total for task, value in seconds.items() if total > 0}
    committed = committed_step(run, index).committed_ms
    tracker.log_step(index, {**step_metrics(run, index), **timings, **shares}, committed)
    tracker.log_text(manifest.model_dump_json(indent=2) + "\n", f"manifests/{index:05d}.json")
    if tables_due(run, index):
        tables = {f"artifacts/step_{index:06d}.json": artifact_table(run, index)}
        if run.config.tracking.sample_completions:
            tables[f"samples/step_{index:06d}.json"] = sample_table(run, index)
        tracker.log_tables(tables)


def publish_result(run: LiveRun, tracker: Tracker) -> None:
    """The picture, the summary and the report of a training that came to its end."""
    tracker.log_file(run.directory.path / "curves.png", "pictures")
    for name in ("summary.json", REPORT):
        tracker.log_file(run.directory.path / name, None)


def publish_report(run: LiveRun, tracker: Tracker, on_step: Callable[[], None]) -> None:
    """The report of a training that failed or was paused, as far as it came (`on_step`: `write_report`)."""
    if run.directory.ledger.last_step() is not None:
        tracker.log_file(write_report(run, on_step), None)


def write_report(run: LiveRun, on_step: Callable[[], None] = lambda: None) -> Path:
    """Write the report of all that is committed into the run's folder, and return its path. Raises UserError.

    `on_step` is called for each step that is read, and may raise when that takes too long.
    """
    return run.directory.write_text(REPORT, report_html(read_runs([run.directory.path], on_step)))


def sample_table(run: LiveRun, index: int) -> Table:
    """The first completion of each of the first `tracking.sample_completions` prompts."""
    by_kind = {ref.kind: ref for ref in run.directory.ledger.artifacts(index).values()}
    store = run.directory.store
    # Only these columns become Python objects: a step's tokens are millions.
    prompts = store.get_table(by_kind["prompts"], ["group", "text", "reference"]).to_pylist()
    rollouts = store.get_table(by_kind["rollouts"], ["group", "sample", "text"])
    rewards = store.get_table(by_kind["rewards"], ["reward", "outcome"])
    asked = {row["group"]: row for row in prompts}
    rows = [
        (
            index,
            asked[completion["group"]]["text"],
            completion["text"],
            asked[completion["group"]]["reference"],
            verdict["reward"],
            verdict["outcome"],
        )
        for completion, verdict in zip(rollouts.to_pylist(), rewards.to_pylist(), strict=True)
        if completion["sample"] == 0
    ]
    return SAMPLE_COLUMNS, rows[: run.config.tracking.sample_completions]


def artifact_table(run: LiveRun, index: int) -> Table:
    """The step's artifacts, which stay in the run's folder: what they are, how large, and where."""
    root = run.directory.path
    rows = [
        (index, task, name, ref.kind, ref.digest, ref.size, str(root / ref.uri))
        for task, entry in run.directory.ledger.tasks(index).items()
        for name, ref in entry.outputs.items()
    ]
    return ARTIFACT_COLUMNS, rows


def tables_due(run: LiveRun, index: int) -> bool:
    """The first step, every `tracking.sample_every`, and the last."""
    chosen = index == START + 1 or index % run.config.tracking.sample_every == 0 or index == run.config.steps
    return index > START and chosen


def flat(value: dict[str, object], prefix: str = "") -> dict[str, object]:
    """Nested settings as dotted keys; the pipeline stays one value."""
    leaves: dict[str, object] = {}
    for key, item in value.items():
        if isinstance(item, dict) and key != "pipeline":
            leaves |= flat(item, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = item
    return leaves
