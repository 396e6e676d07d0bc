"""The flow against `mlflow server`, a process of its own that is killed and comes back."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
from mlflow import MlflowClient

from flows.tracking.metric_names import TIMED
from flows.tracking.record import read_record

STEPS = 6
AWAY = "MLflow does not answer; metrics stay in the ledger and follow"


class Server:
    """`mlflow server` on sqlite, with an artifact root of its own, always on the same port."""

    def __init__(self, root: Path, port: int) -> None:
        """`root` holds a store that is called mlflow.db."""
        self.database = root / "mlflow.db"
        self._artifacts = root / "artifacts"
        self._port = port
        self.start()

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self._port)]
        places = ["--backend-store-uri", f"sqlite:///{self.database}", "--artifacts-destination", str(self._artifacts)]
        self._process = subprocess.Popen(
            [*command, *places, "--workers", "1"],
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + 180
        while not self._answers():
            assert self._process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.uri}/health", timeout=5).close()
        except OSError:
            return False
        return True


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, mlflow_store, free_port):
    server = Server(mlflow_store(tmp_path_factory.mktemp("server")), free_port())
    yield server
    server.kill()


@pytest.fixture(scope="module")
def undisturbed(launch):
    """The same training, published to sqlite."""
    return launch("undisturbed", steps=STEPS)


def metric_rows(database: Path, run_id: str) -> dict[tuple[str, int], float]:
    """Every metric that is no measurement of time or load; each (key, step) must be there once."""
    query = "select key, step, value from metrics where run_uuid = ?"
    with sqlite3.connect(database) as connection:
        rows = [row for row in connection.execute(query, (run_id,)) if not row[0].startswith(TIMED)]
    twice = [place for place, count in Counter((key, step) for key, step, _ in rows).items() if count > 1]
    assert twice == []
    return {(key, step): value for key, step, value in rows}


def assert_all_arrived(server: Server, finished, undisturbed) -> None:
    client = MlflowClient(server.uri)
    run_id = read_record(finished.folder).run_id
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    expected = metric_rows(undisturbed.runs / "mlflow.db", undisturbed.mlflow_run().info.run_id)
    assert metric_rows(server.database, run_id) == expected
    manifests = {file.path for file in client.list_artifacts(run_id, "manifests")}
    assert manifests == {f"manifests/{step:05d}.json" for step in range(STEPS + 1)}
    models = client.search_logged_models([run.info.experiment_id], f"source_run_id = '{run_id}'")
    assert sorted(int(model.tags["step"]) for model in models) == list(range(2, STEPS + 1, 2))
    assert {str(model.status) for model in models} == {"READY"}


@pytest.mark.slow
def test_a_server_that_is_killed_and_comes_back_has_everything(server, undisturbed, launch, runs, capsys) -> None:
    name = "outage"

    def break_the_server() -> None:
        while (record := read_record(runs / name)) is None or record.published < 2:
            time.sleep(0.01)
        server.kill()
        time.sleep(2)
        server.start()

    breaker = threading.Thread(target=break_the_server)
    breaker.start()
    finished = launch(name, steps=STEPS, overrides={"tracking.uri": server.uri})
    breaker.join()
    assert finished.state.is_completed(), finished.state.message
    out = capsys.readouterr().out
    assert out.count(AWAY) == 1
    if "will follow" in out:
        # The machine was too busy to start the server within the patience of the run's end.
        launch(name, steps=STEPS, overrides={"tracking.uri": server.uri})
    assert_all_arrived(server, finished, undisturbed)


@pytest.mark.slow
def test_a_run_ends_without_its_server_and_a_resume_delivers(
    server, undisturbed, launch, runs, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("flows.tracking.mlflow_backlog.OUTAGE_PATIENCE_SECONDS", 1.0)
    # Known to the server, then continued without it.
    assert launch("late", steps=2, overrides={"tracking.uri": server.uri}).state.is_completed()
    server.kill()
    finished = launch("late", steps=STEPS, overrides={"tracking.uri": server.uri})
    assert finished.state.is_completed(), finished.state.message
    out = capsys.readouterr().out
    assert out.count(AWAY) == 1
    follows = f"MLflow does not answer, steps 3 to {STEPS} will follow: fp8-grpo resume {runs / 'late'}"
    assert out.rstrip().endswith(f"{follows} --set tracking.uri={server.uri}")
    server.start()
    assert launch("late", steps=STEPS, overrides={"tracking.uri": server.uri}).state.is_completed()
    assert "will follow" not in capsys.readouterr().out
    assert read_record(runs / "late").published == STEPS
    assert MlflowClient(server.uri).get_run(read_record(runs / "late").run_id).info.status == "FINISHED"
