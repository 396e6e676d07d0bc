"""One training is one MLflow run (`tracker.Tracker`).

The primary key of MLflow's metric rows is (key, timestamp, step, run, value, is_nan). So a step logged twice with the
ledger's commit time and values leaves one row. Parameters are written once; files are replaced. No active run and no
tracking URI is set for the process: the steps of several trainings may run in it.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from mlflow import MlflowClient
from mlflow.entities import LoggedModel, LoggedModelOutput, LoggedModelStatus, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

from flows.tracking import store
from flows.tracking.record import RunOutcome, ServiceRecord, mark_dead
from flows.tracking.tracker import RUN_DIRECTORY, TRAINING, Checkpoint, Outage, Table, Tracker, TrackerEntry, Training
from fp8core.errors import UserError, printable_lines, without_passwords

ERROR = "error"
MODEL_TYPE = "policy"
NOTE = "mlflow.note.content"
UI_ADDRESS = "http://127.0.0.1:5000"
# MLflow's limits: metrics of a request, parameters or tags of one, characters of a parameter (of a tag 8000).
_METRICS, _PARAMS, _LONGEST = 1000, 100, 6000
# Tag with the tables that the UI previews. It takes 8000 characters, which are 145 of ours.
_TABLES, _MAX_TABLES = "mlflow.loggedArtifacts", 100
R = TypeVar("R")


class MlflowTracker(Tracker):
    title = "MLflow"

    def __init__(self, training: Training, uri: str, experiment_id: str, run_id: str) -> None:
        self.uri, self.experiment_id, self.run_id = uri, experiment_id, run_id
        self._training = training
        self._monitor: SystemMetricsMonitor | None = None

    @classmethod
    def open(cls, training: Training, uri: str, run_id: str | None) -> "MlflowTracker":
        """The MLflow run `run_id`, else the one that a killed process left, else a new one with the training's name.

        A missing store or experiment is created; several processes may do so at once. Raises Outage; UserError: the
        store is not to be used.
        """
        config = training.config
        with store.store_errors(uri):
            client = store.prepare_store(uri, config.runs)
            run = None if run_id is None else _find_run(client, run_id)
            if run is None:
                experiment = store.get_or_create_experiment(client, uri, config.tracking.experiment, config.runs)
                tags = {TRAINING: training.id, RUN_DIRECTORY: str(training.folder)}
                run = _run_with_tags(client, experiment, tags) or client.create_run(
                    experiment, None, tags, training.name
                )
            store.check_artifact_place(uri, run, config.tracking.uri)
            client.update_run(run.info.run_id, "RUNNING")  # A deleted run is refused.
        return cls(training, uri, run.info.experiment_id, run.info.run_id)

    @cached_property
    def client(self) -> MlflowClient:
        """Made when it is first needed: MLflow connects to a database at once."""
        return MlflowClient(tracking_uri=self.uri)

    @property
    def page(self) -> str:
        """Address of the run's charts; without its last word the UI shows its pages for agents."""
        server = store.public_address(self.uri) if store.is_server(self.uri) else UI_ADDRESS
        run = f"{server}/#/experiments/{self.experiment_id}/runs/{self.run_id}"
        return f"{run}/model-metrics?workflowType=machine_learning"

    def links(self) -> Mapping[str, str]:
        ui = store.ui_command(self.uri)
        return {self.title: self.page} if ui is None else {"MLflow UI": ui, "MLflow run": self.page}

    def start(self, settings: Mapping[str, object]) -> None:
        with store.store_errors(self.uri):
            run = self.client.get_run(self.run_id)
            self.client.update_run(self.run_id, status="RUNNING")
            if ERROR in run.data.tags:
                self.client.delete_tag(self.run_id, ERROR)
            params, texts = run.data.params, {name: _text(value) for name, value in settings.items()}
            new = [Param(name, text) for name, text in texts.items() if name not in params]
            for batch in _batches(new, _PARAMS):
                self.client.log_batch(self.run_id, params=batch)
            # A parameter cannot change.
            self.set_tags({name: text for name, text in texts.items() if params.get(name, text) != text})
            self._watch_load()
        mark_dead(self._training.folder.parent, self.uri)

    def _watch_load(self) -> None:
        """Begin or go on with MLflow's own samples of the load: an outage ends its thread."""
        if self._monitor is not None:
            self._monitor.finish()
        if self._training.config.tracking.system_metrics:
            self._monitor = SystemMetricsMonitor(self.run_id, resume_logging=True, tracking_uri=self.uri)
            self._monitor.start()

    def set_tags(self, tags: Mapping[str, str], note: str | None = None) -> None:
        with store.store_errors(self.uri):
            rows = [RunTag(name, printable_lines(text)[:_LONGEST]) for name, text in tags.items()]
            rows += [] if note is None else [RunTag(NOTE, note)]
            for batch in _batches(rows, _PARAMS):
                self.client.log_batch(self.run_id, tags=batch)

    def log_step(self, step: int, metrics: Mapping[str, float], committed_ms: int, tags: Mapping[str, str]) -> None:
        with store.store_errors(self.uri):
            rows = [Metric(name, float(value), committed_ms, step) for name, value in metrics.items()]
            for batch in _batches(rows, _METRICS):
                self.client.log_batch(self.run_id, batch, tags=[RunTag(name, text) for name, text in tags.items()])

    def log_artifact(self, place: str, content: str | Path | Table) -> None:
        with store.store_errors(self.uri):
            match content:
                case Path():
                    self.client.log_artifact(self.run_id, str(content), place.rpartition("/")[0] or None)
                case str():
                    text = content if place.endswith(".json") else printable_lines(content)
                    self.client.log_text(self.run_id, text, place)
                case Table():
                    self._log_table(place, content)

    def _log_table(self, place: str, table: Table) -> None:
        """As MLflow's `log_table`, which appends to a table that is there, and fails when a run has many."""
        cells = [[printable_lines(cell) if isinstance(cell, str) else cell for cell in row] for row in table.rows]
        self.client.log_text(self.run_id, json.dumps({"columns": list(table.columns), "data": cells}), place)
        tables = json.loads(self.client.get_run(self.run_id).data.tags.get(_TABLES, "[]"))
        entry = {"path": place, "type": "table"}
        if entry not in tables:
            self.client.set_tag(self.run_id, _TABLES, json.dumps([*tables, entry][-_MAX_TABLES:]))

    def log_checkpoint(self, checkpoint: Checkpoint) -> None:
        """As a READY model; one that a kill left PENDING is completed. The files stay where they are."""
        with store.store_errors(self.uri):
            model = self._model(checkpoint)
            outputs = self.client.get_run(self.run_id).outputs
            assert outputs is not None, "MLflow's stores give a run's outputs"
            if model.model_id not in {output.model_id for output in outputs.model_outputs}:
                self.client.log_outputs(self.run_id, [LoggedModelOutput(model.model_id, checkpoint.step)])
            rows = [
                Metric(name, value, checkpoint.committed_ms, checkpoint.step, model_id=model.model_id)
                for name, value in checkpoint.metrics.items()
            ]
            self.client.log_batch(self.run_id, rows)
            if model.status != LoggedModelStatus.READY:
                self.client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)

    def _model(self, checkpoint: Checkpoint) -> LoggedModel:
        own = f"source_run_id = '{self.run_id}' AND name = '{checkpoint.name}'"
        models = self.client.search_logged_models([self.experiment_id], own, max_results=1)
        if models:
            return models[0]
        about: dict[str, Any] = {"source_run_id": self.run_id, "tags": dict(checkpoint.tags), "model_type": MODEL_TYPE}
        return self.client.create_logged_model(self.experiment_id, checkpoint.name, **about)

    def end(self, outcome: RunOutcome, error: str | None, ended_ms: int) -> None:
        with store.store_errors(self.uri):
            if self._monitor is not None:
                self._monitor.finish()
            if error is not None:
                self.set_tags({ERROR: error})
            self.client.set_terminated(self.run_id, outcome, ended_ms)


def open_tracker(training: Training, service: ServiceRecord | None) -> MlflowTracker:
    """The MLflow run that the folder names, else a new one, in the configured store, else the folder's own."""
    config, stored_uri = training.config, training.begun_uri if service is None else service.uri
    if config.tracking.uri is not None:
        uri = store.resolve_tracking_uri(config.tracking.uri, config.runs)
    else:
        uri = store.store_of_folder(stored_uri, training.folder)
    try:
        return MlflowTracker.open(training, uri, None if service is None else service.run_id)
    except Outage as error:
        if service is None or service.uri != without_passwords(uri):
            raise UserError(str(error)) from error
        # The publisher goes on when it is over.
        return MlflowTracker(training, uri, service.experiment_id, service.run_id)


TRACKER = TrackerEntry(open_tracker, lambda config: store.check_server(config.tracking.uri))


def _find_run(client: MlflowClient, run_id: str) -> Run | None:
    """None: the store was made anew, or the run was deleted for good."""
    try:
        return client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None


def _run_with_tags(client: MlflowClient, experiment: str, tags: Mapping[str, str]) -> Run | None:
    runs = client.search_runs([experiment], f"tags.`{TRAINING}` = '{tags[TRAINING]}'")
    return next((run for run in runs if tags.items() <= run.data.tags.items()), None)


def _text(value: object) -> str:
    text = printable_lines(value) if isinstance(value, str) else json.dumps(value)
    return text[:_LONGEST]


def _batches(items: Sequence[R], size: int) -> list[Sequence[R]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
