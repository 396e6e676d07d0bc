"""`fp8-grpo up` with both servers on a real PostgreSQL."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

pytest.importorskip("psycopg2", reason="MLflow needs psycopg2 for PostgreSQL (the extra postgres)")

INITDB, PG_CTL, CREATEDB = (shutil.which(program) for program in ("initdb", "pg_ctl", "createdb"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(None in (INITDB, PG_CTL, CREATEDB), reason="PostgreSQL (initdb, pg_ctl, createdb) is missing"),
]


@pytest.fixture(scope="module")
def postgresql(free_port: Callable[[], int]) -> Iterator[str]:
    """host:port of a server of its own, with the databases prefect and mlflow."""
    # PostgreSQL refuses to run as root.
    user = {"user": "nobody"} if os.geteuid() == 0 else {}
    port = free_port()
    # Not below pytest's folders, which nobody else can enter.
    with tempfile.TemporaryDirectory() as folder:
        if user:
            shutil.chown(folder, "nobody")
        data = str(Path(folder) / "data")

        def run(*command: str | None) -> None:
            subprocess.run([str(word) for word in command], cwd=folder, check=True, stdout=subprocess.DEVNULL, **user)

        run(INITDB, "-D", data, "-U", "postgres", "--auth", "trust", "--no-sync")
        listening = f"-c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories={folder} -c fsync=off"
        run(PG_CTL, "-D", data, "-w", "-o", listening, "-l", f"{folder}/log", "start")
        try:
            for name in ("prefect", "mlflow"):
                run(CREATEDB, "-h", "127.0.0.1", "-p", str(port), "-U", "postgres", name)
            yield f"127.0.0.1:{port}"
        finally:
            run(PG_CTL, "-D", data, "-m", "fast", "stop")


def test_both_servers_keep_everything_in_postgresql(
    postgresql: str, start_up: Any, small: dict[str, Any], tmp_path: Path
) -> None:
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")},
        "PREFECT_HOME": str(tmp_path / "home"),
        # At 02:00 a nightly run would take the pool.
        "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false",
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"postgresql+asyncpg://postgres@{postgresql}/prefect",
        "MLFLOW_BACKEND_STORE_URI": f"postgresql://postgres@{postgresql}/mlflow",
    }
    running = start_up(environment)
    prefect = Path(sys.executable).with_name("prefect")
    parameters = ["steps=1", "run=in-postgresql", f"overrides={json.dumps({**small, 'runs': str(tmp_path)})}"]
    finished = subprocess.run(
        [prefect, "deployment", "run", "fp8-grpo/tiny", "--watch", *(f for p in parameters for f in ("--param", p))],
        env={**environment, **running.variables},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    client = MlflowClient(running.mlflow)
    (known,) = client.search_runs([client.get_experiment_by_name("fp8-grpo").experiment_id])
    assert known.info.status == "FINISHED"
    assert client.get_metric_history(known.info.run_id, "core/error_minus_1")[0].value == 0.0
    running.stop()
    assert not [*tmp_path.rglob("*.db"), *running.folder.rglob("*.db")]
