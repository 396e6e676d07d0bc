"""An evaluation as an MLflow run of its own, linked to the LoggedModel of the checkpoint that was evaluated."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelInput, Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

from fp8core.config.run import RunConfig
from fp8core.errors import UserError
from fp8core.evaluation.measure import Estimate
from fp8core.evaluation.result import EvaluationResult
from fp8core.report.evaluation import evaluation_text
from tasks.export import ORIGIN, find_model
from tasks.outage import Outage, store_errors
from tasks.tracking_record import read_record
from tasks.tracking_store import (
    client_of_existing_store,
    get_or_create_experiment,
    prepare_store,
    resolve_tracking_uri,
)

EVALUATION = "fp8_grpo.evaluation"
"""Tag of an MLflow run: what was evaluated."""


@dataclass(frozen=True)
class Place:
    """Where an evaluation is logged: store, experiment, and the model it is about, if MLflow knows it."""

    uri: str
    experiment_id: str
    model_id: str | None


def place_of_run(folder: Path, step: int) -> Place | None:
    """Beside the training's own MLflow run; None when it was never tracked. Raises MLflow's errors."""
    record = read_record(folder)
    if record is None:
        return None
    client = client_of_existing_store(record.uri)
    return Place(record.uri, record.experiment_id, find_model(client, record.run_id, step))


def place_of_folder(folder: Path, config: RunConfig) -> Place:
    """In the configured store; the model is the one that an export of ours names. Raises MLflow's errors, UserError."""
    uri = resolve_tracking_uri(config.tracking.uri, config.runs)
    prepare_store(uri, config.runs)
    client = MlflowClient(tracking_uri=uri)
    experiment = get_or_create_experiment(client, uri, config.tracking.experiment, config.runs)
    return Place(uri, experiment, _exported_model(client, folder))


def _exported_model(client: MlflowClient, folder: Path) -> str | None:
    origin = folder / ORIGIN
    model_id = json.loads(origin.read_text())["mlflow_model_id"] if origin.is_file() else None
    if model_id is None:
        return None
    try:
        return str(client.get_logged_model(model_id).model_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None  # Exported from a run of another store.


def log_evaluation(folder: Path, config: RunConfig, result: EvaluationResult, dataset: Dataset) -> str:
    """Log a result; returns a line that says where, or why not: MLflow may be away, and the result stands.

    Args:
        folder: of the run when the result has a step, else of the checkpoint.
        config: names the store of a checkpoint's evaluation.
        result: what is logged.
        dataset: the problems, as MLflow knows them.
    """
    try:
        with store_errors(config.tracking.uri or "of the run"):
            place = place_of_folder(folder, config) if result.step is None else place_of_run(folder, result.step)
            if place is None:
                return "the run was never tracked in MLflow: the evaluation is not logged"
            run_id = _log(place, result, dataset)
    except (Outage, UserError) as error:
        return f"the evaluation is not logged: {error}"
    linked = "" if place.model_id is None else f", linked to the model {place.model_id}"
    return f"logged as MLflow run {run_id} in {place.uri}{linked}"


def _log(place: Place, result: EvaluationResult, dataset: Dataset) -> str:
    client = MlflowClient(tracking_uri=place.uri)
    of = Path(result.target).name if result.step is None else f"{Path(result.target).name}-{result.step:05d}"
    run_id = str(client.create_run(place.experiment_id, None, {EVALUATION: of}, f"evaluate-{of}").info.run_id)
    models = [] if place.model_id is None else [LoggedModelInput(place.model_id)]
    client.log_inputs(run_id, [DatasetInput(dataset, [InputTag(MLFLOW_DATASET_CONTEXT, "evaluation")])], models)
    client.log_batch(run_id, _metrics(place, result, dataset), [Param(*item) for item in _params(result).items()])
    client.log_dict(run_id, result.model_dump(mode="json"), "evaluation.json")
    client.log_text(run_id, evaluation_text(result) + "\n", "evaluation.txt")
    client.set_terminated(run_id, "FINISHED")
    return run_id


def evaluation_metrics(result: EvaluationResult) -> dict[str, float]:
    """MLflow key -> value: `fp8/pass_at_1`, its `_low` and `_high`, and `fp8_minus_bf16/...`; MLflow allows no `@`."""
    first = next(iter(result.precisions))
    estimates = {name: done.estimates for name, done in result.precisions.items()}
    estimates |= {f"{name}_minus_{first}": by for name, by in result.differences.items()}
    values: dict[str, float] = {}
    for name, measured in estimates.items():
        for key, estimate in measured.items():
            values |= _ends(f"evaluation/{name}/{key.replace('@', '_at_')}", estimate)
    for name, done in result.precisions.items():
        total = sum(done.outcomes.values())
        values |= {f"evaluation/{name}/outcome_{key}": count / total for key, count in done.outcomes.items()}
        values[f"evaluation/{name}/length_mean"] = done.length_mean
    return values


def _ends(key: str, estimate: Estimate) -> dict[str, float]:
    return {key: estimate.value, f"{key}_low": estimate.low, f"{key}_high": estimate.high}


def _metrics(place: Place, result: EvaluationResult, dataset: Dataset) -> list[Metric]:
    now, step = time.time_ns() // 1_000_000, result.step or 0
    return [
        Metric(
            key,
            value,
            now,
            step,
            model_id=place.model_id,
            dataset_name=dataset.name,
            dataset_digest=dataset.digest,
        )
        for key, value in evaluation_metrics(result).items()
    ]


def _params(result: EvaluationResult) -> dict[str, str]:
    asked = ("step", "config", "data", "prompts", "samples", "temperature", "max_new_tokens", "seed", "confidence")
    params = {name: str(getattr(result, name)) for name in asked}
    return {**params, "verifier": str(result.verifier["verifier"]), "precisions": ", ".join(result.precisions)}
