"""The README's deployment commands against a real server and a real worker."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SMALL = {
    "warm_start.steps": 3,
    "warm_start.batch_size": 16,
    "rollout.prompts_per_step": 4,
    "evaluation.prompts": 8,
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    home = tmp_path_factory.mktemp("prefect")
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")},
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_WORKER_QUERY_SECONDS": "2",
    }


def prefect(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["prefect", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300)


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} took more than {seconds} s"
        time.sleep(0.5)


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.fixture(scope="module")
def worker(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    logs = tmp_path_factory.mktemp("logs")
    started = []

    def start(name: str, *arguments: str) -> None:
        with (logs / name).open("wb") as log:
            started.append(
                subprocess.Popen(["prefect", *arguments], cwd=REPOSITORY, env=environment, stdout=log, stderr=log)
            )

    try:
        start("server", "server", "start")
        wait_for(lambda: healthy(environment["PREFECT_API_URL"]), "the server")
        created = prefect(environment, "work-pool", "create", "fp8-grpo", "--type", "process")
        assert created.returncode == 0, created.stdout + created.stderr
        deployed = prefect(environment, "--no-prompt", "deploy", "--all")
        assert deployed.returncode == 0, deployed.stdout + deployed.stderr
        start("worker", "worker", "start", "--pool", "fp8-grpo")
        yield
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(timeout=60)


def run_deployment(environment: dict[str, str], *parameters: str) -> subprocess.CompletedProcess[str]:
    flags = [flag for parameter in parameters for flag in ("--param", parameter)]
    return prefect(environment, "deployment", "run", "fp8-grpo/tiny", "--watch", *flags)


def message_of_the_failed_run(url: str) -> str:
    """What the UI shows as the reason."""
    query = json.dumps({"flow_runs": {"state": {"type": {"any_": ["FAILED"]}}}}).encode()
    request = urllib.request.Request(f"{url}/flow_runs/filter", query, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        (run,) = json.load(answer)
    return str(run["state"]["message"])


def test_a_deployed_run_completes(environment: dict[str, str], worker: None, tmp_path: Path) -> None:
    overrides = json.dumps({**SMALL, "runs": str(tmp_path)})
    finished = run_deployment(environment, "steps=2", "run=deployed", f"overrides={overrides}")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    summary = json.loads((tmp_path / "deployed" / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["tmpe_max"] == 1.0


def test_a_failing_run_exits_with_one_and_its_reason(environment: dict[str, str], worker: None, tmp_path: Path) -> None:
    overrides = json.dumps({**SMALL, "runs": str(tmp_path), "training.learning_rat": 1})
    finished = run_deployment(environment, "steps=2", f"overrides={overrides}")
    assert finished.returncode == 1
    assert "did you mean learning_rate?" in message_of_the_failed_run(environment["PREFECT_API_URL"])


def test_a_parameter_out_of_bounds_is_refused_at_submission(environment: dict[str, str], worker: None) -> None:
    refused = run_deployment(environment, "steps=-1")
    assert refused.returncode == 1
    assert "steps" in refused.stdout + refused.stderr
