"""The Prefect server of a training: it goes with it, and a training goes on and ends well without it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from waiting import wait_for

from flows.environment import answers

pytestmark = pytest.mark.slow


@pytest.fixture
def command(
    small_file: Callable[..., Path],
    prefect_home: Callable[[Path], Path],
    mlflow_store: Callable[[Path], Path],
    tmp_path: Path,
) -> Callable[..., "subprocess.Popen[str]"]:
    """Begin `fp8-grpo run` of four steps, named "one": command(VARIABLE=...)."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
    home = prefect_home(tmp_path / "prefect")
    mlflow_store(tmp_path / "runs")
    file = small_file(tmp_path, steps=4)

    def begin(**variables: str) -> "subprocess.Popen[str]":
        environment = {**inherited, "PREFECT_HOME": str(home), "PYTHONUNBUFFERED": "1", **variables}
        environment["PYTHONPATH"] = str(Path(__file__).parents[2])
        words = [sys.executable, "-m", "flows.cli", "run", str(file), "--set", "run=one", "--json", "summary.json"]
        return subprocess.Popen(
            words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    return begin


def test_it_ends_when_its_training_is_killed(command: Callable[..., "subprocess.Popen[str]"]) -> None:
    with command() as training:
        assert training.stdout is not None
        assert any(line.strip().startswith("1/4 ") for line in training.stdout)
        servers = [each for each in psutil.Process(training.pid).children() if "server" in each.cmdline()]
        assert len(servers) == 1
        training.kill()
    wait_for(lambda: not psutil.pid_exists(servers[0].pid), "the end of the server")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_training_whose_server_goes_loses_nothing(
    number: signal.Signals,
    command: Callable[..., "subprocess.Popen[str]"],
    tmp_path: Path,
    prefect_home: Callable[[Path], Path],
    free_port: Callable[[], int],
) -> None:
    """Its server refuses, or never answers, from the second step on."""
    port = free_port()
    serve = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port), "--no-ui"]
    environment = {**os.environ, "PREFECT_HOME": str(prefect_home(tmp_path / "server"))}
    server = subprocess.Popen(serve, env=environment, start_new_session=True, stdout=subprocess.DEVNULL)
    api = f"http://127.0.0.1:{port}/api"
    try:
        wait_for(lambda: answers(f"{api}/health"), "the server")
        training, said = command(PREFECT_API_URL=api), list[str]()
        assert training.stdout is not None
        for line in training.stdout:
            said.append(line)
            if line.strip().startswith("1/4 "):
                os.killpg(server.pid, number)
            if line.strip().startswith("chain "):
                ended = time.monotonic()
        assert training.wait(timeout=60) == 0, said
        assert time.monotonic() - ended < 150
        assert "Prefect does not answer: its UI lacks the end of this run, which is complete\n" in said
        assert not any("Traceback" in line for line in said)
        assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 4
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
