"""`fp8-grpo up` of this interpreter, and deployments run against it, without any command of the environment."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.trainings import ROOT
from flows.lifeline import installed
from flows.pools import GPU

_START_SECONDS, _END_SECONDS, _POLL_SECONDS = 300.0, 60.0, 0.5


@dataclass(frozen=True)
class Deployments:
    """What is served: the environment of its clients, the folder of their logs, and the log of the worker."""

    environment: Mapping[str, str]
    logs: Path
    worker: Path

    def run(self, deployment: str, name: str, parameters: Mapping[str, Any], end: float) -> int:
        """`prefect deployment run --watch` until the run of this name ends, or `end` (time.monotonic); returns its exit
        code."""
        flags = [flag for key, value in parameters.items() for flag in ("--param", f"{key}={json.dumps(value)}")]
        command = [*_prefect("deployment", "run", f"fp8-grpo/{deployment}", "--watch", "--flow-run-name", name), *flags]
        with (self.logs / f"{name}.log").open("wb") as output:
            process = subprocess.Popen(command, cwd=ROOT, env=self.environment, stdout=output, stderr=output)
            try:
                return process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                return process.wait()

    def last_state(self, name: str) -> Mapping[str, Any]:
        """Type and message of the state of the newest flow run of that name."""
        query = {"flow_runs": {"name": {"any_": [name]}}, "sort": "EXPECTED_START_TIME_DESC", "limit": 1}
        request = urllib.request.Request(
            f"{self.environment['PREFECT_API_URL']}/flow_runs/filter",
            json.dumps(query).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            runs = json.load(answer)
        state: Mapping[str, Any] = runs[0]["state"] if runs else {"type": None, "message": "it was not made"}
        return state

    def said(self, name: str) -> str:
        """What the command that started a deployment said, and the worker."""
        return "\n".join(log.read_text(errors="replace") for log in (self.logs / f"{name}.log", self.worker))


@contextmanager
def serving(work: Path, logs: Path, device: str) -> Iterator[Deployments]:
    """Prefect, MLflow, the deployments and a worker for those that need a GPU, while the block lasts.

    Args:
        work: folder for their data, and for runs.
        logs: folder for what they say.
        device: `cpu` where there is no GPU.

    Raises:
        RuntimeError: `fp8-grpo up` did not become ready; the message holds what it said.
    """
    # A run that an earlier call left unfinished would hold the GPU's pool until it is found dead.
    shutil.rmtree(work / "prefect", ignore_errors=True)
    ports, runs, worker = [str(port) for port in _free_ports(2)], work / "runs", f"worker-of-{GPU}.log"
    environment = {
        "PREFECT_HOME": str(work / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # The nightly training may fall due, and would compute beside what is timed.
        "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false",
        **{key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"},
    }
    options = ["--prefect-port", ports[0], "--mlflow-port", ports[1], "--runs", str(runs)]
    command = [sys.executable, "-m", "flows.cli", "up", *options]
    clients = environment | {"PREFECT_API_URL": f"http://127.0.0.1:{ports[0]}/api"}
    began = time.monotonic()
    with _process(command, environment, logs / "up.log") as up:
        _wait_until_ready(up, logs / "up.log")
        print(f"up: {time.monotonic() - began:.0f} s", flush=True)
        try:
            if device == "cuda":
                yield Deployments(clients, logs, runs / "logs" / worker)
            else:
                # Where there is no GPU `up` starts no worker for them.
                tracked = clients | {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{ports[1]}"}
                with _process(_prefect("worker", "start", "--pool", GPU), tracked, logs / worker):
                    yield Deployments(clients, logs, logs / worker)
        finally:
            shutil.copytree(runs / "logs", logs, dirs_exist_ok=True)


def _prefect(*arguments: str) -> list[str]:
    return [sys.executable, *installed("prefect"), *arguments]


@contextmanager
def _process(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Twice asked, it does not wait for a training."""
    deadline = time.monotonic() + _END_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(5.0)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait_until_ready(up: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while "\nready: " not in log.read_text():
        if up.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"fp8-grpo up is not ready: {log.read_text()}")
        time.sleep(_POLL_SECONDS)


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(server.getsockname()[1]) for server in held]
    for server in held:
        server.close()
    return ports
