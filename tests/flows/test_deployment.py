"""`fp8-grpo up`, and the README's deployment commands against the servers and the worker it starts."""

import base64
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterName,
    FlowRunFilter,
    FlowRunFilterName,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from waiting import wait_for

from fp8core.store.layout import LEDGER
from fp8core.store.ledger import LedgerView

REPOSITORY = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def environment(prefect_home: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")},
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PREFECT_HOME": str(prefect_home(tmp_path_factory.mktemp("prefect"))),
    }


def run(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def scheduled(environment: dict[str, str], start_up: Any) -> tuple[Any, set[str]]:
    """`up`, and the times of day for which the scheduler made nightly runs there.

    Then the nightly deployment is paused, which removes its runs: at 02:00 one would take the pool.
    """
    running = start_up(environment)
    nightly = DeploymentFilter(name=DeploymentFilterName(any_=["nightly"]))
    with running.client() as client:

        def due() -> list[FlowRun]:
            return client.read_flow_runs(deployment_filter=nightly)

        wait_for(lambda: bool(due()), "the scheduler")
        times = {f"{run.expected_start_time:%H:%M:%S}" for run in due()}
        for deployment in client.read_deployments(deployment_filter=nightly):
            client.pause_deployment(deployment.id)
        wait_for(lambda: not due(), "the end of nightly runs")
    return running, times


@pytest.fixture(scope="module")
def up(environment: dict[str, str], scheduled: tuple[Any, set[str]]) -> Any:
    running, _ = scheduled
    environment |= running.variables
    return running


@pytest.fixture
def run_deployment(environment: dict[str, str], up: Any, readme_commands: list[str]) -> Run:
    """The README's `prefect deployment run`, with other parameters."""
    (command,) = (line for line in readme_commands if line.startswith("prefect deployment run"))
    start = command.partition(" --param")[0].split()
    return lambda *parameters: run(environment, *start, *(f for p in parameters for f in ("--param", p)))


# --- who is answered ---


def status(url: str, headers: Mapping[str, str], method: str = "GET") -> int:
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def authorised(login: str) -> dict[str, str]:
    return {"Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"}


@pytest.mark.slow
def test_prefect_answers_only_those_with_its_password_and_pages_of_its_own(up: Any) -> None:
    api, login = up.variables.values()
    port = api.split(":")[2].partition("/")[0]
    assert status(f"{api}/admin/version", {}) == 401
    assert status(f"{api}/admin/version", authorised("admin:guessed")) == 401
    assert status(f"{api}/flow_runs/", {}, "POST") == 401
    assert status(f"{api}/admin/version", authorised(login)) == 200
    assert status(f"{up.mlflow}/api/2.0/mlflow/experiments/search?max_results=1", {"Host": "evil.example"}) == 403
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    answers = [
        status(f"{api}/flow_runs/", {**asked, "Origin": origin}, "OPTIONS")
        for origin in (
            up.prefect,
            f"http://localhost:{port}",
            "http://evil.example",
            f"http://evil.example:{port}",
            "null",
        )
    ]
    assert answers == [200, 200, 400, 400, 400]


@pytest.mark.slow
def test_the_nightly_schedule_makes_runs(scheduled: tuple[Any, set[str]]) -> None:
    """Runs that Prefect's scheduler cannot store are only a line in the server's log."""
    _, times = scheduled
    assert times == {"02:00:00"}


# --- runs ---


def test_a_deployed_run_completes_with_a_verifier_of_the_users_own(
    run_deployment: Run, up: Any, environment: dict[str, str], small: dict[str, Any], tmp_path: Path
) -> None:
    """Whose process finds Python's own modules: no folder of ours is on its path. The password is in no log."""
    verifier = tmp_path / "mine.py"
    verifier.write_text("def score(prompt, completion, reference, finish):\n    return len(completion) % 2 == 0\n")
    overrides = json.dumps({**small, "runs": str(tmp_path), "reward.verifier": f"{verifier}:score"})
    finished = run_deployment("steps=2", "run=deployed", f"overrides={overrides}")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    summary = json.loads((tmp_path / "deployed" / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["tmpe_max"] == 1.0
    secret = up.variables["PREFECT_API_AUTH_STRING"].rpartition(":")[2].encode()
    written = [
        path
        for folder in (tmp_path, up.folder, Path(environment["PREFECT_HOME"]))
        for path in folder.rglob("*")
        if path.is_file() and secret in path.read_bytes()
    ]
    assert [path.name for path in written] == ["fp8-grpo-auth"]


# --- stopped from outside ---


@pytest.mark.slow
def test_a_wrong_override_makes_no_run(run_deployment: Run, up: Any) -> None:
    refused = run_deployment('overrides={"training.lerning_rate": 1e-4}')
    assert refused.returncode == 1
    assert "training.lerning_rate" in refused.stdout
    with up.client() as client:
        assert not [one for one in client.read_flow_runs() if "training.lerning_rate" in str(one.parameters)]


@pytest.fixture
def begin_run(readme_commands: list[str], small: dict[str, Any], tmp_path: Path) -> Callable[..., "LongRun"]:
    """Start a deployed run of many steps and return when its second step is committed."""
    (command,) = (line for line in readme_commands if line.startswith("prefect deployment run"))
    start = command.partition(" --watch")[0].split()

    def begin(environment: dict[str, str], up: Any, name: str, steps: int = 500) -> LongRun:
        overrides = json.dumps({**small, "runs": str(tmp_path), "checkpoint.every": 1000})
        parameters = (f"steps={steps}", f"run={name}", f"overrides={overrides}")
        flags = ["--flow-run-name", name, *(flag for value in parameters for flag in ("--param", value))]
        started = run(environment, *start, *flags)
        assert started.returncode == 0, started.stdout + started.stderr
        going = LongRun(up, name, tmp_path / name)
        wait_for(lambda: going.last_step() >= 2, "the second step")
        return going

    return begin


@pytest.fixture
def long_run(environment: dict[str, str], up: Any, begin_run: Callable[..., "LongRun"]) -> Callable[..., "LongRun"]:
    """Such a run of the service that the tests share."""
    return partial(begin_run, environment, up)


@dataclass(frozen=True)
class LongRun:
    up: Any
    name: str
    folder: Path

    def last_step(self) -> int:
        ledger = self.folder / LEDGER
        return (LedgerView.read(ledger).last_step() or 0) if ledger.exists() else 0

    def flow_run(self) -> FlowRun:
        """Prefect's clients ask again when the server says that it is busy."""
        with self.up.client() as client:
            (found,) = client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[self.name])))
        return found

    @property
    def state(self) -> State[Any]:
        found = self.flow_run().state
        assert found is not None
        return found

    def ended_as(self) -> str:
        """The type of its final state in Prefect."""
        seen: list[State[Any]] = []

        def ended() -> bool:
            seen.append(self.state)
            return seen[-1].is_final()

        wait_for(ended, "the end")
        return seen[-1].type.value

    def send(self, number: signal.Signals) -> None:
        """Signal the process that trains."""
        os.kill(LedgerView.read(self.folder / LEDGER).segments()[-1].pid, number)

    def mlflow_status(self) -> str:
        tracking = json.loads((self.folder / "tracking.json").read_text())
        return str(MlflowClient(tracking["uri"]).get_run(tracking["run_id"]).info.status)

    def assert_stopped_in_good_order(self) -> None:
        """The step it was in is committed, a checkpoint holds its policy, and MLflow says that it was stopped."""
        ledger = LedgerView.read(self.folder / LEDGER)
        last = ledger.last_step()
        assert ledger.checkpoints()[-1].step == last
        assert not ledger.tasks(last + 1)
        assert self.mlflow_status() == "KILLED"


@pytest.mark.slow
def test_a_cancelled_run_ends_with_its_step_committed(long_run: Any, environment: dict[str, str]) -> None:
    going = long_run("to-cancel")
    cancelled = run(environment, "prefect", "flow-run", "cancel", str(going.flow_run().id))
    assert cancelled.returncode == 0, cancelled.stdout + cancelled.stderr
    assert going.ended_as() == "CANCELLED"
    going.assert_stopped_in_good_order()


@pytest.mark.slow
def test_the_next_run_begins_when_the_process_of_a_cancelled_one_has_ended(
    long_run: Any, environment: dict[str, str], up: Any
) -> None:
    """The run that is due first, of whichever deployment; a frozen process takes long to end."""
    going = long_run("to-cancel-slowly")
    refused = (("fp8-grpo/tiny", {"config": "no.yaml"}), ("fp8-evaluate/tiny", {"target": "none"}))
    with up.client() as client:
        waiting = [
            client.create_flow_run_from_deployment(client.read_deployment_by_name(name).id, parameters=parameters).id
            for name, parameters in refused
        ]
        going.send(signal.SIGSTOP)
        try:
            cancelled = run(environment, "prefect", "flow-run", "cancel", str(going.flow_run().id))
            assert cancelled.returncode == 0, cancelled.stdout + cancelled.stderr
            wait_for(lambda: going.state.type == StateType.CANCELLING, "the cancellation", 20)
            # A worker looks for runs every two seconds, and kills what does not end within thirty.
            time.sleep(12)
            assert going.state.type == StateType.CANCELLING
            assert [client.read_flow_run(each).state_type for each in waiting] == [StateType.SCHEDULED] * 2
        finally:
            going.send(signal.SIGCONT)
        assert going.ended_as() == "CANCELLED"
        wait_for(lambda: all(client.read_flow_run(each).end_time for each in waiting), "the end of the others")
        ended = [client.read_flow_run(each) for each in waiting]
        assert ended[0].end_time <= ended[1].start_time


@pytest.mark.slow
def test_a_run_under_a_service_that_is_stopped_is_crashed_and_retried_by_the_next_service(
    begin_run: Callable[..., LongRun],
    environment: dict[str, str],
    start_up: Any,
    prefect_home: Callable[[Path], Path],
    tmp_path: Path,
) -> None:
    own = {key: value for key, value in environment.items() if not key.startswith("PREFECT_")}
    own["PREFECT_HOME"] = str(prefect_home(tmp_path / "prefect"))
    first = start_up(own)
    going = begin_run({**own, **first.variables}, first, "to-stop")
    with first.client() as client:
        nightly = client.read_deployment_by_name("fp8-parity/nightly")
        client.update_deployment_schedule(nightly.id, nightly.schedules[0].id, active=False)
    first.process.terminate()
    assert first.process.wait(timeout=120) == 128 + signal.SIGTERM
    second = start_up(own)
    going = LongRun(second, "to-stop", going.folder)
    assert going.state.type == StateType.CRASHED
    with second.client() as client:
        assert [each.active for each in client.read_deployment(nightly.id).schedules] == [False]
    retried = run({**own, **second.variables}, "prefect", "flow-run", "retry", str(going.flow_run().id))
    assert retried.returncode == 0, retried.stdout + retried.stderr
    # It does not train: this service has another MLflow.
    wait_for(lambda: going.flow_run().run_count > 1, "a place in the pool")
    second.stop()


@pytest.mark.slow
def test_a_killed_run_is_crashed_and_a_retry_finishes_it_as_if_nothing_had_happened(
    long_run: Any, environment: dict[str, str], launch: Any
) -> None:
    going = long_run("to-kill", steps=12)
    going.send(signal.SIGKILL)
    assert going.ended_as() == "CRASHED"
    killed_at = going.last_step()
    assert killed_at < 12
    retried = run(environment, "prefect", "flow-run", "retry", str(going.flow_run().id))
    assert retried.returncode == 0, retried.stdout + retried.stderr
    wait_for(lambda: going.last_step() > killed_at, "the retry")
    assert going.ended_as() == "COMPLETED"
    assert going.mlflow_status() == "FINISHED"
    summary = json.loads((going.folder / "summary.json").read_text())
    whole = launch("never-killed", steps=12, overrides={"checkpoint.every": 1000})
    assert summary["weights_digest"] == whole.summary["weights_digest"]


@pytest.mark.slow
def test_a_run_that_a_bound_suspended_is_resumed_from_the_api(
    run_deployment: Run, up: Any, environment: dict[str, str], small: dict[str, Any], tmp_path: Path
) -> None:
    bounds = {"alignment.stop.error": 1.0, "alignment.stop.patience": 2, "alignment.stop.action": "pause"}
    overrides = {**small, **bounds, "precision.training.linear": "bf16", "runs": str(tmp_path)}
    parameters = ("steps=3", "run=suspended", f"overrides={json.dumps(overrides)}")
    flags = [flag for value in parameters for flag in ("--param", value)]
    started = run(environment, "prefect", "deployment", "run", "fp8-grpo/tiny", "--flow-run-name", "suspended", *flags)
    assert started.returncode == 0, started.stdout + started.stderr
    going = LongRun(up, "suspended", tmp_path / "suspended")
    wait_for(lambda: going.state.name == "Suspended", "the pause")
    assert "alignment.stop.error=1: above it for 2 steps" in str(going.state.message)
    # The worker has seen the process end, and lets the state be.
    wait_for(lambda: not psutil.pid_exists(LedgerView.read(going.folder / LEDGER).segments()[-1].pid), "the end")
    with going.up.client() as client:
        client.resume_flow_run(going.flow_run().id)
    assert going.ended_as() == "COMPLETED"
