"""A finished small training, and places to publish it: a store on sqlite, and MLflow's server."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from mlflow import MlflowClient
from published_copy import Copy

from flows.environment import answers, bound_mlflow_requests
from flows.tracking.backlog import write_report
from flows.tracking.mlflow_tracker import MlflowTracker
from flows.tracking.store import default_tracking_uri
from flows.tracking.tracker import Training
from fp8core.config.load import load_config
from fp8core.config.run import RunConfig

# Two checkpoints; held-out accuracy at steps 0, 2 and 3.
STEPS = 3


@pytest.fixture(scope="session", autouse=True)
def bounded() -> None:
    bound_mlflow_requests()


@pytest.fixture(scope="session")
def runs(mlflow_store: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mlflow_store(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def open_tracker(runs: Path, tmp_path: Path) -> Callable[..., MlflowTracker]:
    """The MLflow run of a training, by default of a new one: open_tracker(training)."""

    def open_it(training: str | None = None, known: str | None = None) -> MlflowTracker:
        config = load_config("tiny", {"runs": str(runs), "tracking.experiment": "exp"})
        uri = default_tracking_uri(runs)
        return MlflowTracker.open(Training(config, "tiny", training or uuid.uuid4().hex, tmp_path), uri, known)

    return open_it


@pytest.fixture
def tracker(open_tracker: Callable[..., MlflowTracker]) -> MlflowTracker:
    return open_tracker()


@pytest.fixture(scope="session")
def settings(small: dict[str, Any]) -> dict[str, Any]:
    return {**small, "steps": STEPS, "tracking.system_metrics": False}


@pytest.fixture(scope="session")
def trained(settings: dict[str, Any], loop_run: Callable[..., Any]) -> Path:
    """The folder of a training that was never published to MLflow."""
    made = loop_run("tiny-run", **settings)
    with made.opened() as run:
        (made.folder / "curves.png").write_bytes(b"a picture")
        (made.folder / "summary.json").write_text('{"diagnosis": null}')
        write_report(run)
    folder: Path = made.folder
    return folder


@pytest.fixture(scope="session")
def copy_of_trained(
    settings: dict[str, Any], trained: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Copy]:
    def make(uri: str, services: tuple[str, ...] = ("mlflow",)) -> Copy:
        folder = tmp_path_factory.mktemp("copy") / trained.name
        shutil.copytree(trained, folder)
        places = {"runs": str(folder.parent), "tracking.uri": uri, "tracking.experiment": folder.parent.name}
        places |= {"tracking.services": [*services]}
        return Copy(load_config("tiny", {**settings, "run": trained.name, **places}), folder)

    return make


class Server:
    """`mlflow server` on the store in `root`, always on the same port, until it is killed."""

    def __init__(self, root: Path, port: int) -> None:
        self.root, self._port = root, port
        self.start()

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self._port)]
        places = ["--backend-store-uri", default_tracking_uri(self.root), "--artifacts-destination", str(self.root)]
        self._process = subprocess.Popen(
            [*command, *places, "--workers", "1"],
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + 180
        while not answers(f"{self.uri}/health"):
            assert self._process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture(scope="session")
def server(
    mlflow_store: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]
) -> Iterator[Server]:
    server = Server(mlflow_store(tmp_path_factory.mktemp("server")), free_port())
    yield server
    server.kill()


class Shown(NamedTuple):
    """Everything that MLflow shows of an experiment, but for its own ids and times."""

    runs: list[dict[str, Any]]
    models: list[dict[str, Any]]


@pytest.fixture(scope="session")
def shown(runs: Path) -> Callable[..., Shown]:
    def show(config: RunConfig, root: Path = runs) -> Shown:
        client = MlflowClient(config.tracking.uri)
        experiment = client.get_experiment_by_name(config.tracking.experiment)
        assert experiment is not None
        ids = [experiment.experiment_id]
        models = client.search_logged_models(ids, order_by=[{"field_name": "name", "ascending": True}])
        found = [_run_content(client, run.info.run_id, root / "mlflow.db") for run in client.search_runs(ids)]
        return Shown(found, [_model_content(model) for model in models])

    return show


def _run_content(client: MlflowClient, run_id: str, database: Path) -> dict[str, Any]:
    run = client.get_run(run_id)
    folders = ["", *(file.path for file in client.list_artifacts(run_id) if file.is_dir)]
    files = [file for folder in folders for file in client.list_artifacts(run_id, folder)]
    # Every row, as the store has it: a client answers key by key, which takes seconds.
    query = "select key, step, value from metrics where run_uuid = ? and key not like 'system/%' order by key, step"
    rows: dict[str, list[tuple[int, float]]] = {}
    with sqlite3.connect(database) as connection:
        for key, step, value in connection.execute(query, (run_id,)):
            rows.setdefault(key, []).append((step, value))
    return {
        "status": run.info.status,
        "params": {key: value for key, value in run.data.params.items() if not key.startswith(("runs", "tracking"))},
        "tags": {key: value for key, value in run.data.tags.items() if key != "run_directory"},
        "metrics": rows,
        "outputs": sorted(each.step for each in run.outputs.model_outputs),
        "files": sorted(file.path for file in files if not file.is_dir),
    }


def _model_content(model: Any) -> dict[str, Any]:
    metrics = sorted((each.key, each.step, each.value) for each in model.metrics)
    tags = {key: value for key, value in model.tags.items() if key != "checkpoint"}
    fields = {"name": model.name, "status": str(model.status), "type": model.model_type, "params": model.params}
    return {**fields, "tags": tags, "metrics": metrics}
