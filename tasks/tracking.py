"""One training is one MLflow run; this module alone writes to MLflow.

Everything written is idempotent, so after a crash the ledger's last steps may simply be logged again: the primary
key of MLflow's metric rows is (key, timestamp, step, run, value, is_nan), hence a step logged twice with the
ledger's commit time and values leaves one row; parameters are written once; tables and pictures are replaced.
`MlflowClient` only: no active run and no tracking URI is set for the process.
"""

import fcntl
import json
import logging
import math
import os
import shlex
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS
from mlflow.utils.validation import (
    MAX_METRICS_PER_BATCH,
    MAX_PARAM_VAL_LENGTH,
    MAX_PARAMS_TAGS_PER_BATCH,
    MAX_TAG_VAL_LENGTH,
)
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from fp8core.errors import UserError
from fp8core.report.summary import REWARD

Row = TypeVar("Row")
RunOutcome = Literal["FINISHED", "FAILED", "KILLED"]
SERVER_TIMEOUT_SECONDS = 10.0
UI_ADDRESS = "http://127.0.0.1:5000"
ERROR = "error"
SAMPLE_COLUMNS = ("step", "prompt", "completion", "reference", "reward", "outcome")


class Sample(NamedTuple):
    """A completion shown to people; `outcome` is the verifier's word (right, wrong, unparsed, timeout, crashed)."""

    prompt: str
    completion: str
    reference: str
    reward: float
    outcome: str


def quiet_store_logs() -> None:
    """Show warnings and errors only of MLflow and of its schema migrations (alembic), which log each table change."""
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)


def default_tracking_uri(runs: Path) -> str:
    """The sqlite store beside the run folders.

    Raises:
        UserError: the path has a character that MLflow and SQLAlchemy read differently in a URI.
    """
    path = runs.absolute() / "mlflow.db"
    if set("%?") & set(str(path)):
        raise UserError(f"runs {runs.absolute()}: the sqlite store cannot be below a folder with % or ? in its name")
    return f"sqlite:///{path}"


def resolve_tracking_uri(configured: str | None, runs: Path) -> str:
    """The configured URI, else the one MLflow was given (MLFLOW_TRACKING_URI), else `default_tracking_uri`."""
    if configured is not None:
        return configured
    return mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else default_tracking_uri(runs)


def is_missing(uri: str) -> bool:
    """Whether the file of a sqlite store is gone; a server's word is not asked for."""
    database = make_url(uri).database if uri.startswith("sqlite") else None
    return database is not None and not Path(database).exists()


def ui_command(uri: str) -> str:
    """The shell command that opens the MLflow UI on the store at `uri`."""
    if _is_server(uri):
        return f"{shlex.quote(sys.executable)} -m webbrowser {shlex.quote(uri)}"
    beside_python = Path(sys.executable).with_name("mlflow")
    on_path = shutil.which("mlflow")
    program = "mlflow" if on_path is not None and Path(on_path) == beside_python else str(beside_python)
    return f"{shlex.quote(program)} ui --backend-store-uri {shlex.quote(uri)}"


@dataclass(frozen=True)
class Tracker:
    """The MLflow run of one training."""

    client: MlflowClient
    uri: str
    experiment_id: str
    run_id: str

    @classmethod
    def open(cls, uri: str, experiment: str, run_name: str, runs: Path, resume_run_id: str | None) -> "Tracker":
        """Start a run, or continue `resume_run_id`, whose status becomes RUNNING again.

        A missing store or experiment is created; several processes may do so at once. `runs` takes the artifacts
        of a new experiment (`mlartifacts`), unless `uri` is a server, which keeps them itself.

        Raises:
            UserError: the store cannot be reached or written, or the experiment or run is deleted or unknown.
        """
        try:
            _prepare_store(uri, runs)
            client = MlflowClient(tracking_uri=uri)
            experiment_id = _get_or_create_experiment(client, uri, experiment, runs)
            if resume_run_id is None:
                run = client.create_run(experiment_id, run_name=run_name)
            else:
                run = _reopen(client, uri, resume_run_id)
        except (MlflowException, SQLAlchemyError, OSError) as error:
            raise UserError(f"tracking.uri {uri}: {_first_line(error)}") from error
        return cls(client, uri, run.info.experiment_id, run.info.run_id)

    @property
    def page(self) -> str:
        """Address of the run's charts, once the UI runs; without its last word the UI shows its pages for agents."""
        server = self.uri.rstrip("/") if _is_server(self.uri) else UI_ADDRESS
        run = f"{server}/#/experiments/{self.experiment_id}/runs/{self.run_id}"
        return f"{run}/model-metrics?workflowType=machine_learning"

    def log_params(self, config: Mapping[str, Any]) -> None:
        """Write the flat configuration, values as JSON, cut at MLflow's limit; what is already there stays.

        An MLflow parameter cannot change. A value that differs on a continued run (`steps` that grew) becomes a tag
        of the same name.
        """
        known = self.client.get_run(self.run_id).data.params
        values = {key: _param_text(value) for key, value in config.items()}
        new = [Param(key, text) for key, text in values.items() if key not in known]
        for batch in _batches(new, MAX_PARAMS_TAGS_PER_BATCH):
            self.client.log_batch(self.run_id, params=batch)
        self.set_tags({key: text for key, text in values.items() if key in known and known[key] != text})

    def log_step(self, step: int, metrics: Mapping[str, float], timestamp_ms: int) -> None:
        """Write one step's metrics in one transaction; a second call with equal arguments changes nothing.

        Args:
            step: the step of every metric.
            metrics: MLflow key -> finite value. Beyond MLflow's 1000 a batch, `reward/mean` is in the last batch,
                so that `logged_steps` only counts whole steps.
            timestamp_ms: the ledger's commit time of this step, milliseconds since the epoch; never the present.

        Raises:
            UserError: a value is NaN or infinite; nothing of the step is written.
        """
        for key, value in metrics.items():
            if not math.isfinite(value):
                raise UserError(f"step {step}: metric {key} is {value}")
        reward_last = sorted(metrics, key=lambda key: key == REWARD)
        rows = [Metric(key, float(metrics[key]), timestamp_ms, step) for key in reward_last]
        for batch in _batches(rows, MAX_METRICS_PER_BATCH):
            self.client.log_batch(self.run_id, metrics=batch)

    def logged_steps(self) -> set[int]:
        """Steps whose metrics are in the store (those with `reward/mean`)."""
        return {metric.step for metric in self.client.get_metric_history(self.run_id, REWARD)}

    def last_logged_step(self) -> int | None:
        """The last of `logged_steps`, from which the ledger is written on; None when there is none."""
        return max(self.logged_steps(), default=None)

    def log_text(self, text: str, artifact_file: str) -> None:
        """Write or replace a text artifact; the suffix decides how the UI shows it."""
        self.client.log_text(self.run_id, text, artifact_file)

    def log_dict(self, value: Mapping[str, Any], artifact_file: str) -> None:
        """Write or replace a .json or .yaml artifact."""
        self.client.log_dict(self.run_id, dict(value), artifact_file)

    def log_figure_file(self, path: Path, folder: str) -> None:
        """Copy a picture into the artifact folder, replacing one of the same name."""
        self.client.log_artifact(self.run_id, str(path), folder)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write the sample completions of one step as `samples/step_NNNNNN.json`, columns `SAMPLE_COLUMNS`."""
        self.log_table(SAMPLE_COLUMNS, [(step, *sample) for sample in samples], f"samples/step_{step:06d}.json")

    def log_table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], artifact_file: str) -> None:
        """Write or replace a table that the UI previews, in the JSON format of `MlflowClient.log_table`.

        That method itself appends to a file that exists, and breaks when the tag that lists a run's tables exceeds
        a tag's length; here the tag keeps the newest tables that fit, older ones stay as plain JSON.
        """
        table = {"columns": list(columns), "data": [list(row) for row in rows]}
        self.client.log_text(self.run_id, json.dumps(table, allow_nan=False), artifact_file)
        entry = {"path": artifact_file, "type": "table"}
        listed = json.loads(self.client.get_run(self.run_id).data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]"))
        if entry in listed:
            return
        listed.append(entry)
        while len(json.dumps(listed)) > MAX_TAG_VAL_LENGTH:
            del listed[0]
        self.set_tags({MLFLOW_LOGGED_ARTIFACTS: json.dumps(listed)})

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set or replace tags of the run."""
        rows = [RunTag(key, value) for key, value in tags.items()]
        for batch in _batches(rows, MAX_PARAMS_TAGS_PER_BATCH):
            self.client.log_batch(self.run_id, tags=batch)

    def log_error(self, reason: str) -> None:
        """Tag the run with why it failed, cut at MLflow's limit; continuing it removes the tag."""
        self.set_tags({ERROR: reason[:MAX_TAG_VAL_LENGTH]})

    def finish(self, status: RunOutcome) -> None:
        """End the run with the outcome it had."""
        self.client.set_terminated(self.run_id, status)


def create_sqlite_store(database: Path) -> None:
    """Create MLflow's schema at `database` unless the file exists.

    The schema is made in a file of its own and renamed: a kill in the middle, or a second process, never meets a
    half-migrated store (MLflow's own creation is neither locked nor atomic).
    """
    database.parent.mkdir(parents=True, exist_ok=True)
    with database.with_name(f"{database.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if database.exists():
            return
        fresh = database.with_name(f"{database.name}.new")
        fresh.unlink(missing_ok=True)
        SqlAlchemyStore(f"sqlite:///{fresh}", _artifact_root(database.parent)).engine.dispose()
        os.replace(fresh, database)


def _prepare_store(uri: str, runs: Path) -> None:
    """Create a missing sqlite store; ask a server for a sign of life, as MLflow's own retries take minutes."""
    if _is_server(uri):
        try:
            urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=SERVER_TIMEOUT_SECONDS).close()
        except urllib.error.HTTPError:
            return  # Something answers: whether it is MLflow, and lets us in, is said by the first request.
    elif uri.startswith("sqlite"):
        database = make_url(uri).database
        if not database or database == ":memory:":
            raise UserError(f"tracking.uri {uri}: name a file, as in {default_tracking_uri(runs)}")
        create_sqlite_store(Path(database))


def _get_or_create_experiment(client: MlflowClient, uri: str, name: str, runs: Path) -> str:
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return client.create_experiment(name, artifact_location=None if _is_server(uri) else _artifact_root(runs))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        experiment = client.get_experiment_by_name(name)
        assert experiment is not None, f"experiment {name} exists and cannot be found"
    if experiment.lifecycle_stage != "active":
        raise UserError(f"tracking.experiment {name} is deleted in {uri}: restore it or set another name")
    return experiment.experiment_id


def _reopen(client: MlflowClient, uri: str, run_id: str) -> Run:
    run = client.get_run(run_id)
    if run.info.lifecycle_stage != "active":
        raise UserError(f"MLflow run {run_id} is deleted in {uri}: restore it or start a run of another name")
    client.update_run(run_id, status="RUNNING")
    if ERROR in run.data.tags:
        client.delete_tag(run_id, ERROR)
    return run


def _is_server(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


def _artifact_root(runs: Path) -> str:
    return (runs.absolute() / "mlartifacts").as_uri()


def _param_text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_PARAM_VAL_LENGTH else text[: MAX_PARAM_VAL_LENGTH - 1] + "…"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _batches(items: Sequence[Row], size: int) -> list[Sequence[Row]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
