"""A parity run as an MLflow run: its verdict, its numbers, its report."""

import time
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from fp8core.config.run import RunConfig
from fp8core.errors import UserError
from fp8core.parity.night import Night
from tasks.outage import Outage, store_errors
from tasks.tracking_store import get_or_create_experiment, prepare_store, resolve_tracking_uri

PARITY = "fp8_grpo.parity"
"""Tag of an MLflow run: the parity run that it shows. `fp8_grpo.verdict` is its outcome."""


def log_parity(night: Night, config: RunConfig, files: list[Path]) -> str:
    """Log a verdict with its files; returns a line that says where, or why not: the files stay, whatever MLflow does.

    A parity run that is judged again, after more of its trainings, continues its MLflow run.
    """
    uri = resolve_tracking_uri(config.tracking.uri, config.runs)
    try:
        with store_errors(uri):
            prepare_store(uri, config.runs)
            client = MlflowClient(tracking_uri=uri)
            experiment = get_or_create_experiment(client, uri, config.tracking.experiment, config.runs)
            run_id = _run_of(client, experiment, night)
            client.log_batch(run_id, _metrics(night))
            for path in files:
                client.log_artifact(run_id, str(path))
            client.set_tag(run_id, "fp8_grpo.verdict", night.outcome)
            client.set_tag(run_id, "mlflow.note.content", night.headline)
            client.set_terminated(run_id, "FAILED" if night.outcome == "FAIL" else "FINISHED")
    except (Outage, UserError) as error:
        return f"the verdict is not logged: {error}"
    return f"logged as MLflow run {run_id} in {uri}"


def _run_of(client: MlflowClient, experiment: str, night: Night) -> str:
    found = client.search_runs([experiment], f"tags.`{PARITY}` = '{night.name}'", max_results=1)
    if found:
        return str(found[0].info.run_id)
    run_id = str(client.create_run(experiment, None, {PARITY: night.name}, f"parity-{night.name}").info.run_id)
    params = {"config": night.config, "variants": ", ".join(night.variants), "seeds": ", ".join(map(str, night.seeds))}
    client.log_batch(run_id, params=[Param(*item) for item in params.items()])
    return run_id


def _metrics(night: Night) -> list[Metric]:
    now = time.time_ns() // 1_000_000
    return [
        Metric(f"parity/{check.variant}/{check.name.replace(',', '').replace(chr(39), '')}", check.number, now, 0)
        for check in night.checks
        if check.number is not None
    ]
