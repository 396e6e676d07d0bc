"""`fp8-grpo up`, and the README's deployment commands against the servers and the worker it starts."""

import base64
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName, FlowRunFilter, FlowRunFilterName
from prefect.client.schemas.objects import FlowRun, StateType
from waiting import wait_for

from fp8core.store.layout import LEDGER
from fp8core.store.ledger import LedgerView

REPOSITORY = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def environment(prefect_home: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")},
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PREFECT_HOME": str(prefect_home(tmp_path_factory.mktemp("prefect"))),
    }


def run(environment: Mapping[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def up(environment: dict[str, str], start_up: Any) -> Any:
    """`up`, whose nightly deployment the scheduler has made runs of; paused, it takes no place in the pool."""
    running = start_up(environment)
    nightly = DeploymentFilter(name=DeploymentFilterName(any_=["nightly"]))
    with running.client() as client:

        def due() -> list[FlowRun]:
            return client.read_flow_runs(deployment_filter=nightly)

        wait_for(lambda: bool(due()), "the scheduler")
        assert {f"{run.expected_start_time:%H:%M:%S}" for run in due()} == {"02:00:00"}
        for deployment in client.read_deployments(deployment_filter=nightly):
            client.pause_deployment(deployment.id)
        wait_for(lambda: not due(), "the end of nightly runs")
    environment |= running.variables
    return running


def status(url: str, headers: Mapping[str, str], method: str = "GET") -> int:
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.slow
def test_prefect_answers_only_those_with_its_password_and_pages_of_its_own(up: Any) -> None:
    api, login = up.variables.values()
    assert status(f"{api}/admin/version", {}) == 401
    authorised = {"Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"}
    assert status(f"{api}/admin/version", authorised) == 200
    assert status(f"{up.mlflow}/api/2.0/mlflow/experiments/search?max_results=1", {"Host": "evil.example"}) == 403
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    origins = (up.prefect, "http://evil.example")
    answers = [status(f"{api}/flow_runs/", {**asked, "Origin": origin}, "OPTIONS") for origin in origins]
    assert answers == [200, 400]


@dataclass(frozen=True)
class Deployed:
    """A run of the README's deployment: its servers, its flow run in Prefect and its folder."""

    up: Any
    name: str
    folder: Path

    def last_step(self) -> int:
        ledger = self.folder / LEDGER
        return (LedgerView.read(ledger).last_step() or 0) if ledger.exists() else 0

    def pid(self) -> int:
        return LedgerView.read(self.folder / LEDGER).segments()[-1].pid

    def flow_run(self) -> Any:
        with self.up.client() as client:
            (found,) = client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[self.name])))
        return found

    def ended_as(self) -> str:
        wait_for(lambda: self.flow_run().state.is_final(), "the end")
        return str(self.flow_run().state_type.value)

    def mlflow_status(self) -> str:
        tracking = json.loads((self.folder / "tracking.json").read_text())["services"]["mlflow"]
        return str(MlflowClient(tracking["uri"]).get_run(tracking["run_id"]).info.status)


@pytest.fixture
def deploy(readme_commands: list[str], small: dict[str, Any], tmp_path: Path) -> Callable[..., Deployed]:
    """The README's `prefect deployment run`, by default without a wait: deploy(environment, up, name, steps, ...)."""
    (command,) = (line for line in readme_commands if line.startswith("prefect deployment run"))

    def begin(environment: dict[str, str], up: Any, name: str, steps: int, *options: str, **settings: Any) -> Deployed:
        overrides = json.dumps({**small, "runs": str(tmp_path), "checkpoint.every": 1000, **settings})
        parameters = (f"steps={steps}", f"run={name}", f"overrides={overrides}")
        flags = ["--flow-run-name", name, *(flag for value in parameters for flag in ("--param", value))]
        run(environment, *command.partition(" --watch")[0].split(), *options, *flags)
        return Deployed(up, name, tmp_path / name)

    return begin


def test_a_deployed_run_completes_with_a_verifier_of_the_users_own(
    deploy: Callable[..., Deployed], up: Any, environment: dict[str, str], tmp_path: Path
) -> None:
    """Whose process finds Python's own modules: no folder of ours is on its path. The password is in no log."""
    verifier = tmp_path / "mine.py"
    verifier.write_text("def score(prompt, completion, answer, finish):\n    return len(completion) % 2 == 0\n")
    done = deploy(environment, up, "deployed", 2, "--watch", **{"reward.verifier": f"{verifier}:score"})
    summary = json.loads((done.folder / "summary.json").read_text())
    assert (summary["steps"], summary["tmpe_max"]) == (2, 1.0)
    secret = up.variables["PREFECT_API_AUTH_STRING"].rpartition(":")[2].encode()
    places = (tmp_path, up.folder, Path(environment["PREFECT_HOME"]))
    files = [path for folder in places for path in folder.rglob("*") if path.is_file()]
    assert [path.name for path in files if secret in path.read_bytes()] == ["fp8-grpo-auth"]


@pytest.mark.slow
def test_a_cancelled_run_ends_with_its_step_committed(
    deploy: Callable[..., Deployed], up: Any, environment: dict[str, str]
) -> None:
    going = deploy(environment, up, "to-cancel", 500)
    wait_for(lambda: going.last_step() >= 2, "the second step")
    run(environment, "prefect", "flow-run", "cancel", str(going.flow_run().id))
    assert going.ended_as() == "CANCELLED"
    ledger = LedgerView.read(going.folder / LEDGER)
    assert ledger.checkpoints()[-1].step == going.last_step()
    assert not ledger.tasks(going.last_step() + 1)
    assert going.mlflow_status() == "KILLED"


@pytest.mark.slow
def test_a_run_under_a_service_that_is_stopped_is_crashed_and_retried_by_the_next_service(
    deploy: Callable[..., Deployed],
    environment: dict[str, str],
    start_up: Any,
    prefect_home: Callable[[Path], Path],
    tmp_path: Path,
) -> None:
    own = {key: value for key, value in environment.items() if not key.startswith("PREFECT_")}
    own["PREFECT_HOME"] = str(prefect_home(tmp_path / "prefect"))
    first = start_up(own)
    going = deploy({**own, **first.variables}, first, "to-stop", 500)
    wait_for(lambda: going.last_step() >= 2, "the second step")
    with first.client() as client:
        nightly = client.read_deployment_by_name("fp8-parity/nightly")
        client.update_deployment_schedule(nightly.id, nightly.schedules[0].id, active=False)
    first.process.terminate()
    assert first.process.wait(timeout=120) == 128 + signal.SIGTERM
    second = start_up(own)
    going = Deployed(second, "to-stop", going.folder)
    assert going.flow_run().state_type == StateType.CRASHED
    with second.client() as client:
        assert [each.active for each in client.read_deployment(nightly.id).schedules] == [False]
    run({**own, **second.variables}, "prefect", "flow-run", "retry", str(going.flow_run().id))
    # It does not train: this service has another MLflow.
    wait_for(lambda: going.flow_run().run_count > 1, "a place in the pool")
    second.stop()


@pytest.mark.slow
def test_a_killed_run_is_crashed_and_a_retry_finishes_it_as_if_nothing_had_happened(
    deploy: Callable[..., Deployed], up: Any, environment: dict[str, str], launch: Any
) -> None:
    going = deploy(environment, up, "to-kill", 12)
    wait_for(lambda: going.last_step() >= 2, "the second step")
    os.kill(going.pid(), signal.SIGKILL)
    assert going.ended_as() == "CRASHED"
    killed_at = going.last_step()
    assert killed_at < 12
    run(environment, "prefect", "flow-run", "retry", str(going.flow_run().id))
    wait_for(lambda: going.last_step() > killed_at, "the retry")
    assert (going.ended_as(), going.mlflow_status()) == ("COMPLETED", "FINISHED")
    summary = json.loads((going.folder / "summary.json").read_text())
    whole = launch("never-killed", steps=12, overrides={"checkpoint.every": 1000})
    assert summary["weights_digest"] == whole.summary["weights_digest"]


@pytest.mark.slow
def test_a_run_that_a_bound_suspended_is_resumed_from_the_api(
    deploy: Callable[..., Deployed], up: Any, environment: dict[str, str]
) -> None:
    bounds = {"alignment.stop.error": 1.0, "alignment.stop.patience": 2, "alignment.stop.action": "pause"}
    going = deploy(environment, up, "suspended", 3, **bounds, **{"precision.training.linear": "bf16"})
    wait_for(lambda: going.flow_run().state.name == "Suspended", "the pause")
    assert "alignment.stop.error=1: above it for 2 steps" in str(going.flow_run().state.message)
    # The worker has seen the process end, and lets the state be.
    wait_for(lambda: not psutil.pid_exists(going.pid()), "the end")
    with up.client() as client:
        client.resume_flow_run(going.flow_run().id)
    assert going.ended_as() == "COMPLETED"
