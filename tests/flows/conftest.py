"""Real runs at reduced size: one Prefect server and one MLflow store for the session."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml
from mlflow import MlflowClient
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.context import refresh_global_settings_context

from flows.environment import PrefectServer
from flows.grpo import grpo
from flows.tracking.store import default_tracking_uri
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import LedgerView


@dataclass(frozen=True)
class Finished:
    name: str
    state: State[Any]
    runs: Path

    @property
    def folder(self) -> Path:
        return self.runs / self.name

    @property
    def summary(self) -> Any:
        return self.state.result()

    @property
    def ledger(self) -> LedgerView:
        return LedgerView.read(self.folder / LEDGER)

    @property
    def mlflow(self) -> MlflowClient:
        return MlflowClient(default_tracking_uri(self.runs))

    def mlflow_run(self) -> Any:
        experiment = self.mlflow.get_experiment_by_name("fp8-grpo")
        (found,) = self.mlflow.search_runs([experiment.experiment_id], f"attributes.run_name = '{self.name}'")
        return found


Launch = Callable[..., Finished]
Edges = dict[str, set[str]]


@pytest.fixture(scope="session")
def small_file(small: dict[str, Any]) -> Callable[..., Path]:
    """Write a user's small.yaml, and what they change of it: small_file(folder, steps=4)."""

    def write(folder: Path, **sections: Any) -> Path:
        path = folder / "small.yaml"
        settings = {"base": "tiny", "name": "small", **small, **sections}
        path.write_text(yaml.safe_dump(settings, sort_keys=False, default_flow_style=None))
        return path

    return write


@pytest.fixture(scope="session")
def prefect_server(prefect_home: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A server as trainings have it, until this process ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_HOME", str(prefect_home(tmp_path_factory.mktemp("prefect"))))
        server = PrefectServer()
        server.wait()
    with pytest.MonkeyPatch.context() as patch:
        # Of all threads, but not of processes that tests start.
        patch.setenv("PREFECT_API_URL", server.api)
        refresh_global_settings_context()
    yield
    refresh_global_settings_context()


@pytest.fixture
def graph_as(prefect_server: None) -> Callable[[UUID, Edges], Edges]:
    """graph_as(run, expected): predecessors of each completed node of a page's graph, by label, as Prefect's UI asks.

    It waits a while for what is expected: the server records tasks when it can.
    """

    def wait(run: UUID, expected: Edges) -> Edges:
        deadline, last = time.monotonic() + 30, dict[str, set[str]]()
        with get_client(sync_client=True) as client:
            while last != expected and time.monotonic() < deadline:
                answer = client.request("GET", "/flow_runs/{id}/graph-v2", path_params={"id": run})
                nodes = dict(answer.json()["nodes"])
                done = [node for node in nodes.values() if node["state_type"] == "COMPLETED"]
                last = {each["label"]: {nodes[up["id"]]["label"] for up in each["parents"]} for each in done}
                time.sleep(0.2)
        return last

    return wait


@pytest.fixture(scope="session")
def runs(mlflow_store: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mlflow_store(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def launch(prefect_server: None, runs: Path, small: dict[str, Any]) -> Launch:
    """Start the flow in this process: launch(name, steps=2, config="tiny", overrides={...})."""

    def run_flow(name: str, steps: int = 2, config: str = "tiny", **settings: Any) -> Finished:
        overrides = {**(small if config == "tiny" else {}), "runs": str(runs), **settings.pop("overrides", {})}
        state = grpo(config=config, run=name, steps=steps, overrides=overrides, return_state=True, **settings)
        return Finished(name, state, Path(overrides["runs"]))

    return run_flow


class Up:
    def __init__(self, command: list[str], ports: list[int], environment: Mapping[str, str], folder: Path) -> None:
        """Start `command` at two ports, with `folder` for --runs, and wait until it is ready."""
        self.prefect, self.mlflow = (f"http://127.0.0.1:{port}" for port in ports)
        self.folder, self._output = folder, folder / "said"
        options = ["--prefect-port", str(ports[0]), "--mlflow-port", str(ports[1]), "--runs", str(folder)]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen([*command, *options], env=dict(environment), stdout=output, stderr=output)
        deadline = time.monotonic() + 500
        while self.process.poll() is None and "\nready" not in self.said and time.monotonic() < deadline:
            time.sleep(0.2)
        assert f"\nready: Prefect {self.prefect}, MLflow {self.mlflow}\n" in self.said, self.said

    @property
    def said(self) -> str:
        return self._output.read_text()

    @property
    def variables(self) -> dict[str, str]:
        """What a shell has after the line for other terminals."""
        (line,) = (line for line in self.said.splitlines() if line.startswith("in other terminals: "))
        names = ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING")
        script = "\n".join([line.partition(": ")[2], *(f"echo ${name}" for name in names)])
        return dict(zip(names, subprocess.check_output(["sh", "-c", script], text=True).split(), strict=True))

    def client(self) -> SyncPrefectClient:
        api, login = self.variables.values()
        return SyncPrefectClient(api, auth_string=login)

    def stop(self) -> None:
        """Terminate twice: a training that a failed test left behind is not waited for."""
        for _ in range(2):
            self.process.terminate()
            time.sleep(1)
        self.process.wait(timeout=120)


@pytest.fixture(scope="module")
def start_up(
    readme_commands: list[str], tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]
) -> Iterator[Callable[..., Up]]:
    """The README's `fp8-grpo up`: start_up(environment). It is stopped with the module."""
    (command,) = (line for line in readme_commands if line.startswith("fp8-grpo up"))
    started: list[Up] = []

    def start(environment: Mapping[str, str]) -> Up:
        program, *options = command.split()
        # Else it looks once when the server starts, before there are deployments, and again after a minute.
        environment = {**environment, "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "2"}
        words = [str(Path(sys.executable).with_name(program)), *options]
        started.append(Up(words, [free_port(), free_port()], environment, tmp_path_factory.mktemp("up")))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.stop()
