"""A training's MLflow run: description, metrics, bounds, report, datasets, and checkpoints as LoggedModels."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModel, LoggedModelOutput, LoggedModelStatus, Metric
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT, MLFLOW_RUN_NOTE

from flows.tracking.metric_names import (
    ACCURACY,
    COMPILED,
    CORE,
    ERROR,
    K3,
    MEAN_REWARD,
    model_metrics,
    seconds_name,
    shown_metrics,
    speed,
)
from flows.tracking.tables import (
    artifact_table,
    completion_table,
    episode_turns,
    heldout_table,
    sample_table,
    samples_due,
    tables_due,
)
from flows.tracking.traces import log_traces
from flows.tracking.tracker import CHAIN_HEAD, RUN_DIRECTORY, TRAINING, Tracker
from fp8core.alignment.bounds import stop_bounds
from fp8core.config.data import DataConfig
from fp8core.config.run import RunConfig, public_dump
from fp8core.data.prompt import PromptSource, problems_digest
from fp8core.data.source import SUFFIXES
from fp8core.report.pages import report_html
from fp8core.report.run_data import read_runs
from fp8core.report.summary import CURVES, REPORT, ComparedTokens, Summary
from fp8core.report.text import pipeline_mermaid, pipeline_text
from fp8core.run.commit import committed_step, step_metrics, stored_manifest
from fp8core.run.context import RunContext
from fp8core.store.layout import POLICY, SUMMARY, manifest_place
from fp8core.store.ledger import START, BoundEntry, CheckpointEntry
from fp8core.store.manifest import Head

COMPLETIONS, HELDOUT_COMPLETIONS = "completions.json", "heldout.json"
BOUND_CROSSED = "bound_crossed"
BOUNDS = "bounds"
DIAGNOSIS = "diagnosis"
SIGNED_BY = "signed_by"
MODEL_TYPE = "policy"
# MLflow's columns are text: the question, and the reference that the verifier compares with.
_SCHEMA = {"mlflow_colspec": [{"name": name, "type": "string", "required": True} for name in ("question", "reference")]}
# MLflow prints the digest in every place that names the data, and allows 36 characters.
_DIGEST_DIGITS = 12


def publish_description(run: RunContext, tracker: Tracker) -> None:
    bounds = stop_bounds(run.config)
    tracker.log_params(flat(public_dump(run.config)) | bounds.described())
    tracker.set_tags({"alignment_contract": bounds.contract, "alignment_bounds": bounds.summary})
    tracker.set_tags({"config": run.config.name, "precision": precision(run.config), MLFLOW_RUN_NOTE: _note(run)})
    tracker.log_dict(public_dump(run.config), "config.yaml")
    tracker.log_text(pipeline_text(run.graph), "graph.txt")
    tracker.log_text(f"```mermaid\n{pipeline_mermaid(run.graph)}\n```\n", "graph.md")
    tags = {"code_version": run.code_version, RUN_DIRECTORY: str(run.directory.path)}
    tracker.set_tags(tags if run.signing_key is None else {**tags, SIGNED_BY: run.signing_key.fingerprint})
    log_datasets(tracker, run.config, run.source)


def publish_inexact(tracker: Tracker) -> None:
    """A tag on a run that went on after a stop from another policy than before, or with completions begun anew."""
    tracker.set_tags({"inexact": "true"})


def publish_bound(tracker: Tracker, crossed: BoundEntry) -> None:
    tracker.set_tags(
        {BOUNDS: "crossed", BOUND_CROSSED: f"{crossed.reason}; {crossed.action} after step {crossed.step}"}
    )


def step_speed(run: RunContext, index: int) -> dict[str, float]:
    """`speed` of a committed step; empty for step 0, and for a step that was cut: no process ran for a part of it."""
    if index == START or run.directory.ledger.was_cut(index):
        return {}
    ran = [(task.started, task.started + task.seconds) for task in run.directory.ledger.tasks(index).values()]
    return speed(ran, committed_step(run, index).committed_ms / 1000, step_metrics(run, index))


def publish_step(run: RunContext, tracker: Tracker, index: int) -> None:
    manifest = stored_manifest(run, index)
    seconds = manifest.observed.timings
    total = sum(seconds.values())
    timings = {seconds_name(task): value for task, value in seconds.items()}
    shares = {f"time/{task}_share": value / total for task, value in seconds.items() if total > 0}
    answers = manifest.observed.environment
    shares |= {f"time/environment_{name}": answers[name] for name in ("p50", "p95", "max") if name in answers}
    entry, metrics = committed_step(run, index), step_metrics(run, index)
    quick = step_speed(run, index)
    if entry.compiled is not None:
        quick[COMPILED] = entry.compiled
    head = {CHAIN_HEAD: str(Head.of(manifest))}
    tracker.log_step(index, {**shown_metrics({**metrics, **shares}), **timings, **quick}, entry.committed_ms, head)
    tracker.log_text(manifest.model_dump_json(indent=2) + "\n", manifest_place(index))
    if tables_due(run, index):
        tables = {f"artifacts/step_{index:06d}.json": artifact_table(run, index)}
        if samples_due(run, index):
            tables[f"samples/step_{index:06d}.json"] = sample_table(run, index)
        tracker.log_tables(tables)


def publish_result(run: RunContext, tracker: Tracker) -> None:
    tracker.log_file(run.directory.path / CURVES, "pictures")
    for name in (SUMMARY, REPORT):
        tracker.log_file(run.directory.path / name, None)
    if (heldout := heldout_table(run)) is not None:
        tracker.log_tables({HELDOUT_COMPLETIONS: heldout})
    if (completions := completion_table(run)) is not None:
        tracker.log_tables({COMPLETIONS: completions})
        steps = run.directory.ledger.steps()
        times = {number: entry.committed_ms for number, entry in steps.items()}
        log_traces(tracker, completions, times, episode_turns(run))
    judged = "kept" if stop_bounds(run.config).limits else "not judged"
    bounds = judged if run.directory.ledger.last_bound() is None else "crossed"
    summary = Summary.model_validate_json((run.directory.path / SUMMARY).read_bytes())
    compared = ComparedTokens(summary.tokens_compared, summary.tokens_compared_share)
    note = [_note(run), _headline(run), f"`{ERROR.removeprefix(CORE)}` is over {compared.words}."]
    note += [] if summary.diagnosis is None else [summary.diagnosis]
    tags = {BOUNDS: bounds, DIAGNOSIS: summary.diagnosis or "none", MLFLOW_RUN_NOTE: "\n\n".join(note)}
    tracker.set_tags(tags)


def precision(config: RunConfig) -> str:
    """Formats of linears and cache: `fp8_block+fp8`, or those of rollout and training where they differ."""
    sides = [f"{side.linear}+{side.kv_cache}" for side in (config.precision.rollout, config.precision.training)]
    return sides[0] if sides[0] == sides[1] else f"{sides[0]} / {sides[1]}"


def _note(run: RunContext) -> str:
    config = run.config
    what = f"**GRPO, `{config.name}`**: {config.steps} steps, seed {config.seed}, data `{config.data.source}`."
    return f"{what}\n\nPrecision: `{precision(config)}`. Report: artifact `{REPORT}`."


def _headline(run: RunContext) -> str:
    steps = range(START, (run.directory.ledger.last_step() or START) + 1)
    rows = [(step, shown_metrics(step_metrics(run, step))) for step in (*steps[:2], steps[-1])]
    lines = ["| metric | first | last |", "| --- | --- | --- |"]
    for name in (MEAN_REWARD, ACCURACY, ERROR, K3):
        measured = [f"{metrics[name]:.4g} (step {step})" for step, metrics in rows if name in metrics]
        if measured:
            lines.append(f"| {name.removeprefix(CORE)} | {measured[0]} | {measured[-1]} |")
    return "\n".join(lines)


def publish_report(run: RunContext, tracker: Tracker, on_step: Callable[[], None], error: str) -> None:
    """The report of a training that failed or was paused, as far as it came (arguments: `write_report`)."""
    if run.directory.ledger.last_step() is not None:
        tracker.log_file(write_report(run, on_step, error), None)


def write_report(run: RunContext, on_step: Callable[[], None] = lambda: None, error: str | None = None) -> Path:
    """Write the report of all that is committed into the run's folder, and return its path. Raises UserError.

    `on_step` is called for each step that is read, and may raise when that takes too long. `error` is what the
    training fails with.
    """
    return run.directory.write_text(
        REPORT, report_html(read_runs([run.directory.path], on_step, error_of=lambda _: error))
    )


def flat(value: dict[str, object], prefix: str = "") -> dict[str, object]:
    """Nested settings as dotted keys; the pipeline stays one value."""
    leaves: dict[str, object] = {}
    for key, item in value.items():
        if isinstance(item, dict) and key != "pipeline":
            leaves |= flat(item, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = item
    return leaves


def publish_checkpoint(run: RunContext, tracker: Tracker, entry: CheckpointEntry) -> None:
    """A checkpoint as a READY model with the metrics of its step; a second call changes nothing.

    A model that a kill left PENDING is completed. That of a policy which a redo replaced gets the new one's tags. The
    files stay where they are: tag `checkpoint` names the folder that `transformers` loads.
    """
    model = _find(run, tracker, entry) or _create(run, tracker, entry)
    if model.tags.get("weights_digest") != entry.weights_digest:
        tracker.client.set_logged_model_tags(model.model_id, _tags(run, entry))
    linked = _linked_models(tracker)
    if model.model_id not in {output.model_id for output in linked}:
        tracker.client.log_outputs(tracker.run_id, [LoggedModelOutput(model.model_id, entry.step)])
    tracker.log_metrics(_metric_rows(run, model, entry.step))
    if model.status != LoggedModelStatus.READY:
        tracker.client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)


def _linked_models(tracker: Tracker) -> list[LoggedModelOutput]:
    outputs = tracker.client.get_run(tracker.run_id).outputs
    assert outputs is not None, "MLflow's stores give a run's outputs"
    linked: list[LoggedModelOutput] = outputs.model_outputs
    return linked


def model_name(run: RunContext, step: int) -> str:
    """Run and step, without characters that MLflow allows in no model's name: a folder may have been renamed."""
    return re.sub(r"""[/:.%"']""", "-", f"{run.directory.path.name}-{step:05d}")


def held_models(run: RunContext, tracker: Tracker) -> dict[int, str | None]:
    """Digests of the weights by step, of checkpoints that MLflow holds as complete models; None: a user deleted it."""

    def complete(model: LoggedModel) -> bool:
        measured = model.metrics or not model_metrics(step_metrics(run, int(model.tags["step"])))
        return bool(model.status == LoggedModelStatus.READY and measured)

    own = f"source_run_id = '{tracker.run_id}'"
    models, token = list[LoggedModel](), None
    while token is None or token:
        page = tracker.client.search_logged_models([tracker.experiment_id], own, page_token=token)
        models += page
        token = page.token or ""
    found = {model.model_id for model in models}
    linked = _linked_models(tracker)
    ours = [model for model in models if TRAINING in model.tags]
    deleted = dict.fromkeys(output.step for output in linked if output.model_id not in found)
    return deleted | {int(model.tags["step"]): model.tags["weights_digest"] for model in ours if complete(model)}


def _find(run: RunContext, tracker: Tracker, entry: CheckpointEntry) -> LoggedModel | None:
    own = f"source_run_id = '{tracker.run_id}' AND name = '{model_name(run, entry.step)}'"
    found = tracker.client.search_logged_models([tracker.experiment_id], own, max_results=1)
    return found[0] if found else None


def _tags(run: RunContext, entry: CheckpointEntry) -> dict[str, str]:
    description = run.directory.description()
    assert description is not None, "an open run has its run.json"
    return {
        TRAINING: description.id,
        "run": run.directory.path.name,
        "step": str(entry.step),
        "weights_digest": entry.weights_digest,
        "checkpoint": str(run.directory.path / entry.uri / POLICY),
        "code_version": run.code_version,
    }


def _create(run: RunContext, tracker: Tracker, entry: CheckpointEntry) -> LoggedModel:
    return tracker.client.create_logged_model(
        tracker.experiment_id,
        name=model_name(run, entry.step),
        source_run_id=tracker.run_id,
        tags=_tags(run, entry),
        params=_params(run.config, entry.step),
        model_type=MODEL_TYPE,
    )


def _params(config: RunConfig, step: int) -> dict[str, str]:
    contract = config.precision
    return {
        "config": config.name,
        "seed": str(config.seed),
        "step": str(step),
        "rollout.linear": contract.rollout.linear,
        "rollout.kv_cache": contract.rollout.kv_cache,
        "training.linear": contract.training.linear,
        "training.kv_cache": contract.training.kv_cache,
        "scale_rule": contract.scale_rule,
    }


def _metric_rows(run: RunContext, model: LoggedModel, step: int) -> list[Metric]:
    training, heldout = training_prompts(run.config, run.source), heldout_prompts(run.config, run.source)
    committed = committed_step(run, step).committed_ms
    return [
        Metric(
            key,
            value,
            committed,
            step,
            model_id=model.model_id,
            dataset_name=dataset.name,
            dataset_digest=dataset.digest,
        )
        for key, value in model_metrics(step_metrics(run, step)).items()
        for dataset in [heldout if key == ACCURACY else training]
    ]


def training_prompts(config: RunConfig, source: PromptSource) -> Dataset:
    training = source.training_set()
    kind, place = _place(config.data)
    rows = "generated" if training.rows is None else training.rows
    profile = {"num_rows": rows, "prompts_per_step": config.rollout.drawn_prompts}
    return _dataset(f"{_name(config.data)}-training", training.digest, kind, place, profile)


def heldout_prompts(config: RunConfig, source: PromptSource) -> Dataset:
    problems = source.heldout(config.evaluation.prompts)
    own_file = config.evaluation.source
    kind, place = _place(config.data) if own_file is None else _file(own_file)
    digest, profile = problems_digest(problems), {"num_rows": len(problems)}
    return _dataset(f"{_name(config.data)}-heldout", digest, kind, place, profile)


def evaluated_prompts(config: RunConfig, digest: str, count: int, *, heldout: bool) -> Dataset:
    """Problems of an evaluation: held-out ones of the configuration, or the rows of its `data.source`."""
    if heldout:
        source = config.evaluation.source
        kind, place = _place(config.data) if source is None else _file(source)
    else:
        kind, place = _place(config.data)
    name = f"{_name(config.data)}-{'heldout' if heldout else 'rows'}"
    return _dataset(name, digest, kind, place, {"num_rows": count})


def log_datasets(tracker: Tracker, config: RunConfig, source: PromptSource) -> None:
    """Enter both as inputs of the run; MLflow skips entries that exist."""
    inputs = [
        DatasetInput(dataset, [InputTag(MLFLOW_DATASET_CONTEXT, context)])
        for dataset, context in (
            (training_prompts(config, source), "training"),
            (heldout_prompts(config, source), "evaluation"),
        )
    ]
    try:
        tracker.client.log_inputs(tracker.run_id, inputs)
    except MlflowException as error:
        # Two runs that enter new data at once: one violates the uniqueness of the row that the other wrote.
        if error.error_code != "BAD_REQUEST":
            raise
        tracker.client.log_inputs(tracker.run_id, inputs)


def _dataset(name: str, digest: str, kind: str, place: dict[str, Any], profile: dict[str, Any]) -> Dataset:
    return Dataset(
        name=name,
        digest=digest[:_DIGEST_DIGITS],
        source_type=kind,
        source=json.dumps(place),
        schema=json.dumps(_SCHEMA),
        profile=json.dumps(profile),
    )


def _name(data: DataConfig) -> str:
    """`chain`; `problems` of data/problems.jsonl; `openai-gsm8k` of a hub dataset."""
    if not _is_file(data):
        return data.source.strip("/").replace("/", "-")
    return Path(data.source).name.partition(".")[0]


def _place(data: DataConfig) -> tuple[str, dict[str, Any]]:
    if data.source == "chain":
        return "generated", {"generator": "fp8core.data.chain", **data.chain.model_dump()}
    if _is_file(data):
        return _file(data.source)
    place = {"path": data.source, "config_name": data.subset, "split": data.split, "revision": data.revision}
    return "hugging_face", place


def _file(path: str) -> tuple[str, dict[str, Any]]:
    return "local", {"uri": str(Path(path).absolute())}


def _is_file(data: DataConfig) -> bool:
    return data.source.endswith(SUFFIXES) or Path(data.source).is_file()
