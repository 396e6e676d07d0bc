"""Evaluations in MLflow; that of a run is linked to the LoggedModel of its checkpoint."""

import time
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import LoggedModelInput, Metric, Param

from flows.tracking import store
from flows.tracking.record import read_record
from flows.tracking.tracker import Outage
from fp8core.config.run import RunConfig
from fp8core.errors import UserError, without_passwords
from fp8core.evaluation.measure import EvaluationResult
from fp8core.report.text import evaluation_text

EVALUATION = "fp8_grpo.evaluation"
"""Tag of an MLflow run: what was evaluated."""


def log_evaluation(folder: Path, config: RunConfig, result: EvaluationResult) -> str:
    """Log a result; returns a line with the place, or the reason why not: MLflow may be away, and the result stands.

    `folder` is of the run when the result has a step, else of a checkpoint, whose store `config` names.
    """
    model_id = None
    try:
        if result.step is None:
            uri = store.resolve_tracking_uri(config.tracking.uri, config.runs)
            with store.store_errors(uri):
                client = store.prepare_store(uri, config.runs)
                experiment = store.get_or_create_experiment(client, uri, config.tracking.experiment, config.runs)
        else:
            record = read_record(folder)
            if record is None or (service := record.mlflow) is None:
                return "the run was never tracked in MLflow: the evaluation is not logged"
            uri, experiment = store.store_of_folder(service.uri, folder, config.tracking.uri), service.experiment_id
            with store.store_errors(uri):
                client = store.existing_store(uri)
                own = f"source_run_id = '{service.run_id}' AND tags.step = '{result.step}'"
                models = client.search_logged_models([experiment], own, max_results=1)
                model_id = models[0].model_id if models else None
        with store.store_errors(uri):
            run_id = _log(client, uri, experiment, model_id, result, config.tracking.uri)
    except (Outage, UserError) as error:
        return f"the evaluation is not logged: {error}"
    model_text = "" if model_id is None else f", linked to the model {model_id}"
    return f"logged as MLflow run {run_id} in {without_passwords(uri)}{model_text}"


def _log(
    client: MlflowClient,
    uri: str,
    experiment: str,
    model_id: str | None,
    result: EvaluationResult,
    configured_uri: str | None,
) -> str:
    of = result.name if result.step is None else f"{result.name}-{result.step:05d}"
    run = client.create_run(experiment, None, {EVALUATION: of}, f"evaluate-{of}")
    run_id, status = str(run.info.run_id), "FAILED"
    try:
        store.check_artifact_place(uri, run, configured_uri)
        if model_id is not None:
            client.log_inputs(run_id, models=[LoggedModelInput(model_id)])
        params, now = [Param(*item) for item in _params(result).items()], time.time_ns() // 1_000_000
        values = evaluation_metrics(result)
        metrics = [Metric(key, value, now, result.step or 0, model_id=model_id) for key, value in values.items()]
        client.log_batch(run_id, metrics, params)
        client.log_dict(run_id, result.model_dump(mode="json"), "evaluation.json")
        client.log_text(run_id, evaluation_text(result) + "\n", "evaluation.txt")
        status = "FINISHED"
    finally:
        client.set_terminated(run_id, status)
    return run_id


def evaluation_metrics(result: EvaluationResult) -> dict[str, float]:
    """MLflow key -> value: `fp8/pass_at_1`, its `_low` and `_high`, `fp8/SOURCE/...`, and `fp8_minus_bf16/...`.

    MLflow allows no `@`."""
    first = next(iter(result.precisions))
    estimates = {name: measurement.estimates for name, measurement in result.precisions.items()}
    for name, measurement in result.precisions.items():
        estimates |= {f"{name}/{source}": by for source, by in measurement.sources.items()}
    estimates |= {f"{name}_minus_{first}": by for name, by in result.differences.items()}
    values: dict[str, float] = {}
    for name, estimate in estimates.items():
        for key, each in estimate.items():
            metric = f"evaluation/{name}/{key.replace('@', '_at_')}"
            values |= {metric: each.value, f"{metric}_low": each.low, f"{metric}_high": each.high}
    for name, measurement in result.precisions.items():
        total = sum(measurement.outcomes.values())
        values |= {f"evaluation/{name}/outcome_{key}": count / total for key, count in measurement.outcomes.items()}
        values[f"evaluation/{name}/length_mean"] = measurement.length_mean
    values |= {f"evaluation/{name}/answer_logprob": value for name, value in result.answer_logprobs.items()}
    for name, costs in result.parts.items():
        for part, cost in costs.parts.items():
            numbers = {key: value for key, value in vars(cost).items() if value is not None}
            values |= {f"evaluation/{name}/part_{part}_{key}": value for key, value in numbers.items()}
    return values


def _params(result: EvaluationResult) -> dict[str, str]:
    fields = {"step", "config", "data", "data_digest", "prompts", "samples", "temperature", "max_new_tokens", "seed"}
    params = {name: str(value) for name, value in result.model_dump(include=fields).items()}
    return {**params, "verifier": str(result.verifier["verifier"]), "precisions": ", ".join(result.precisions)}
