"""A finished small training, and places to publish it: a store on sqlite, a server, a network that can fail."""

import io
import re
import shutil
import socket
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlflow
import pytest
import uvicorn
from mlflow import MlflowClient

from flows.environment import bound_mlflow_requests
from flows.tracking.publish import write_report
from flows.tracking.store import create_sqlite_store, default_tracking_uri, quiet_store_logs
from flows.tracking.tracker import Tracker
from fp8core.config.load import load_config
from fp8core.config.run import RunConfig
from fp8core.report.console import Console
from fp8core.report.summary import Summary
from fp8core.run.checks.settings import graph_of
from fp8core.run.loop import train
from fp8core.run.open import open_directory, open_run

# Two checkpoints; held-out accuracy at steps 0, 2 and 3.
STEPS = 3


class FreshStore(NamedTuple):
    runs: Path
    printed: str


@pytest.fixture(scope="session")
def fresh_store(tmp_path_factory: pytest.TempPathFactory) -> FreshStore:
    runs = tmp_path_factory.mktemp("runs")
    # As a kill in the middle of the schema's migrations leaves it.
    (runs / "mlflow.db.new").write_bytes(b"torn")
    printed = io.StringIO()
    quiet_store_logs()
    bound_mlflow_requests()
    with redirect_stdout(printed), redirect_stderr(printed):
        create_sqlite_store(runs / "mlflow.db")
    return FreshStore(runs, printed.getvalue())


@pytest.fixture(scope="session")
def runs(fresh_store: FreshStore) -> Path:
    return fresh_store.runs


@pytest.fixture
def open_tracker(runs: Path) -> Callable[..., Tracker]:
    """A new MLflow run, or that of a training which has one."""

    def open_it(training: str | None = None, experiment: str = "exp") -> Tracker:
        return Tracker.open(default_tracking_uri(runs), experiment, "tiny", runs, training or uuid.uuid4().hex)

    return open_it


@pytest.fixture
def tracker(open_tracker: Callable[..., Tracker]) -> Tracker:
    return open_tracker()


@pytest.fixture(scope="session")
def settings(small: dict[str, Any]) -> dict[str, Any]:
    return {**small, "steps": STEPS}


SUMMARY = Summary(
    run="tiny-run",
    mlflow_run_id="abc",
    chain_head=f"{STEPS}:{64 * 'e'}",
    weights_digest="def",
    steps=STEPS,
    reward_first10=0.5,
    reward_last10=0.5,
    reward_edge_steps=1,
    heldout_first=None,
    heldout_last=None,
    tmpe_max=1.0,
    tokens_differing=0,
    steps_without_signal=0,
    bounds="none",
    bounds_crossed=None,
    overhead_ms_per_step=None,
    seconds={"total": 1.0},
)


@pytest.fixture(scope="session")
def trained(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that was never published to MLflow."""
    config = load_config("tiny", {**settings, "runs": str(tmp_path_factory.mktemp("trained"))})
    console = Console(io.StringIO(), STEPS)
    with open_directory(config, "tiny-run") as directory, open_run(config, graph_of(config), directory, console) as run:
        train(run)
        (directory.path / "curves.png").write_bytes(b"a picture")
        (directory.path / "summary.json").write_text(SUMMARY.model_dump_json())
        write_report(run)
    return directory.path


class Copy(NamedTuple):
    """A copy of the finished training, and the configuration that publishes it to an experiment of its own."""

    config: RunConfig
    folder: Path


@pytest.fixture(scope="session")
def copy_of_trained(
    settings: dict[str, Any], trained: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Copy]:
    def make(uri: str) -> Copy:
        folder = tmp_path_factory.mktemp("copy") / trained.name
        shutil.copytree(trained, folder)
        places = {"runs": str(folder.parent), "tracking.uri": uri, "tracking.experiment": folder.parent.name}
        return Copy(load_config("tiny", {**settings, "run": trained.name, **places}), folder)

    return make


@pytest.fixture(scope="session")
def mlflow_server(fresh_store: FreshStore, free_port: Callable[[], int]) -> Iterator[str]:
    """The address of MLflow's own server application, in this process; it keeps artifacts itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("_MLFLOW_SERVER_FILE_STORE", default_tracking_uri(fresh_store.runs))
        patch.setenv("_MLFLOW_SERVER_ARTIFACT_ROOT", "mlflow-artifacts:/")
        patch.setenv("_MLFLOW_SERVER_SERVE_ARTIFACTS", "true")
        patch.setenv("_MLFLOW_SERVER_ARTIFACT_DESTINATION", str(fresh_store.runs / "served"))
        from mlflow.server.fastapi_app import app

        port = free_port()
        server = uvicorn.Server(
            uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", timeout_graceful_shutdown=1)
        )
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            thread.join(0.01)
        # The first request makes the server's store, which becomes the store of the whole process.
        MlflowClient(f"http://127.0.0.1:{port}").search_experiments()
        mlflow.set_tracking_uri(None)
        yield f"http://127.0.0.1:{port}"
        server.should_exit = True
        thread.join()


class Network:
    """A proxy between a training and its server: requests pass, or their answers are lost, or nothing answers.

    `lose(pattern, action, skip)` is for one request, "METHOD /path", after `skip` others that match. The request
    reaches the server, which answers. Then `action` is called, and the client is hung up on without the answer.
    `answer_for(pattern, status, body)` is for all of them, which do not reach the server until `pass_all`.
    """

    def __init__(self, server: str, port: int) -> None:
        """Before `server`, at a port of its own."""
        self._server = ("127.0.0.1", int(server.rpartition(":")[2]))
        self._port = port
        self._listener: socket.socket | None = None
        self._open: set[socket.socket] = set()
        self._faults: list[Fault] = []
        self._instead: tuple[re.Pattern[str], bytes] | None = None
        self.requests: list[str] = []
        self.plug_in()

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def plug_in(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self._port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def unplug(self) -> None:
        assert self._listener is not None
        # Closing alone would not wake the thread that accepts.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in list(self._open):
            _hang_up(connection)

    def lose(self, pattern: str, action: Callable[[], None] = lambda: None, skip: int = 0) -> None:
        self._faults.append(Fault(re.compile(pattern), action, skip))

    def answer_for(self, pattern: str, status: str, body: bytes) -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._instead = re.compile(pattern), head.encode() + body

    def pass_all(self) -> None:
        self._instead = None

    def lose_no_more(self) -> None:
        self._faults.clear()

    @property
    def faults_left(self) -> list[str]:
        return [fault.pattern.pattern for fault in self._faults]

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        self._open.add(client)
        try:
            with suppress(OSError), client:
                while request := _read_message(client):
                    answer = self._own_answer(request) or self._forward(request)
                    if (fault := self._fault(request)) is not None:
                        fault.action()
                        return _hang_up(client)
                    client.sendall(answer)
        finally:
            self._open.discard(client)

    def _forward(self, request: bytes) -> bytes:
        with socket.create_connection(self._server) as server:
            server.sendall(request)
            return _read_message(server)

    def _own_answer(self, request: bytes) -> bytes | None:
        line = request.partition(b" HTTP/")[0].decode()
        return self._instead[1] if self._instead is not None and self._instead[0].search(line) else None

    def _fault(self, request: bytes) -> "Fault | None":
        line = request.partition(b" HTTP/")[0].decode()
        self.requests.append(line)
        for fault in self._faults:
            if fault.pattern.search(line):
                fault.skip -= 1
                if fault.skip < 0:
                    self._faults.remove(fault)
                    return fault
        return None


@dataclass
class Fault:
    pattern: re.Pattern[str]
    action: Callable[[], None]
    skip: int


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _read_message(connection: socket.socket) -> bytes:
    """One HTTP message, whose length is in its head or which is chunked; empty at the end of the connection."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (part := connection.recv(65536)):
            return b""
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    chunked = re.search(rb"(?i)\r\ntransfer-encoding: *chunked", head)
    while (chunked and not body.endswith(b"0\r\n\r\n")) or (length and len(body) < int(length[1])):
        if not (part := connection.recv(65536)):
            break
        body += part
    return head + b"\r\n\r\n" + body


@pytest.fixture
def network(mlflow_server: str, free_port: Callable[[], int]) -> Iterator[Network]:
    between = Network(mlflow_server, free_port())
    yield between
    between.unplug()


class Shown(NamedTuple):
    """Everything that MLflow shows of an experiment, but for its own ids and times."""

    runs: list[dict[str, Any]]
    models: list[dict[str, Any]]


@pytest.fixture(scope="session")
def shown(runs: Path) -> Callable[[RunConfig], Shown]:
    return lambda config: what_mlflow_shows(config, runs / "mlflow.db")


def what_mlflow_shows(config: RunConfig, database: Path) -> Shown:
    client = MlflowClient(config.tracking.uri)
    experiment = client.get_experiment_by_name(config.tracking.experiment)
    if experiment is None:
        return Shown([], [])
    ids = [experiment.experiment_id]
    models = client.search_logged_models(ids, order_by=[{"field_name": "name", "ascending": True}])
    names = {model.model_id: model.name for model in models}
    return Shown(
        runs=[_run_content(client, run.info.run_id, names, database) for run in client.search_runs(ids)],
        models=[_model_content(model) for model in models],
    )


def _run_content(client: MlflowClient, run_id: str, models: dict[str, str], database: Path) -> dict[str, Any]:
    run = client.get_run(run_id)
    files = [file.path for folder in ("", *(file.path for file in client.list_artifacts(run_id) if file.is_dir))
             for file in client.list_artifacts(run_id, folder) if not file.is_dir]  # fmt: skip
    return {
        "status": run.info.status,
        "params": {key: value for key, value in run.data.params.items() if not key.startswith(("runs", "tracking"))},
        "tags": {key: value for key, value in run.data.tags.items() if key != "run_directory"},
        "metrics": _metric_rows(database, run_id),
        "datasets": sorted((each.dataset.name, each.dataset.digest) for each in run.inputs.dataset_inputs),
        "outputs": sorted((models[each.model_id], each.step) for each in run.outputs.model_outputs),
        "files": sorted(files),
    }


def _metric_rows(database: Path, run_id: str) -> dict[str, list[tuple[int, float]]]:
    """Every row, as the store has it: a client answers key by key, which takes seconds."""
    query = "select key, step, value from metrics where run_uuid = ? and key not like 'system/%' order by key, step"
    rows: dict[str, list[tuple[int, float]]] = {}
    with sqlite3.connect(database) as connection:
        for key, step, value in connection.execute(query, (run_id,)):
            rows.setdefault(key, []).append((step, value))
    return rows


def _model_content(model: Any) -> dict[str, Any]:
    metrics = [(each.key, each.step, each.value, each.dataset_name, each.dataset_digest) for each in model.metrics]
    tags = {key: value for key, value in model.tags.items() if key != "checkpoint"}
    fields = {"name": model.name, "status": str(model.status), "type": model.model_type, "params": model.params}
    return {**fields, "tags": tags, "metrics": sorted(metrics)}
