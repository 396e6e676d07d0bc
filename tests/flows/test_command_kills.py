"""`fp8-grpo run` killed with SIGKILL at random instants and called again, with real Prefect and MLflow."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient
from mlflow.entities import LoggedModelStatus
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.settings import PREFECT_API_URL

from flows.tracking.metric_names import TIMED
from flows.tracking.store import default_tracking_uri
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import LedgerView
from fp8core.store.run_directory import read_description

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
SCRIPT = Path(sys.executable).with_name("fp8-grpo")
COMMAND = [str(SCRIPT)] if SCRIPT.exists() else [sys.executable, "-m", "flows.cli"]
KILLS = 2
"""One of a whole process group, one of the process alone."""


class Command:
    """`fp8-grpo run small.yaml --set run=NAME`, in a process group of its own."""

    def __init__(self, workplace: Path, environment: dict[str, str], name: str) -> None:
        self._output = workplace / f"{name}-{time.monotonic_ns()}.out"
        self._begun = f"fp8-grpo run {name}\n"
        with self._output.open("w") as output:
            command = [*COMMAND, "run", "small.yaml", "--set", f"run={name}"]
            self.process = subprocess.Popen(
                command, cwd=workplace, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        self._child = psutil.Process(self.process.pid)
        self._start_up: float | None = None

    @property
    def output(self) -> str:
        return self._output.read_text()

    def work(self, seconds: float = float("inf")) -> float:
        """Wait until it has used that much processor time on its run, or has ended; returns what it has used."""
        used = 0.0
        while used < seconds and self.process.poll() is None:
            if self._start_up is None and self._begun in self.output:
                self._start_up = self._used()
            if self._start_up is not None:
                used = self._used() - self._start_up
            time.sleep(0.005)
        return used

    def _used(self) -> float:
        return sum(self._child.cpu_times()[:2])

    def killed(self, group: bool) -> bool:
        """SIGKILL to the process alone or to its group, unless it has ended by itself."""
        if self.process.poll() is None:
            (os.killpg if group else os.kill)(self.process.pid, signal.SIGKILL)
        return self.process.wait() == -signal.SIGKILL


@pytest.fixture(scope="module")
def workplace(tmp_path_factory, small_file, mlflow_store):
    folder = tmp_path_factory.mktemp("workplace")
    mlflow_store(folder / "runs")
    small_file(folder, steps=12, checkpoint={"every": 3})
    return folder


@pytest.fixture(scope="module")
def environment(workplace, prefect_server):
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
    return {
        **inherited,
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONUNBUFFERED": "1",
        "PREFECT_HOME": str(workplace / "prefect"),
        "PREFECT_API_URL": PREFECT_API_URL.value(),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }


def records(folder):
    store, steps = ArtifactStore(folder), LedgerView.read(folder / LEDGER).steps()
    return [store.get_json(steps[index].manifest)["record"] for index in sorted(steps)]


def mlflow_run(runs, name):
    """The one MLflow run of a training."""
    client = MlflowClient(default_tracking_uri(runs))
    experiment = client.get_experiment_by_name("fp8-grpo")
    (found,) = client.search_runs([experiment.experiment_id], f"attributes.run_name = '{name}'")
    return client, found


def metrics(runs, name):
    """(key, step) -> value of all metrics but those of the clock and the machine; each was written once."""
    client, run = mlflow_run(runs, name)
    keys = [key for key in run.data.metrics if not key.startswith(TIMED)]
    written = [metric for key in keys for metric in client.get_metric_history(run.info.run_id, key)]
    assert Counter((metric.key, metric.step) for metric in written).most_common(1)[0][1] == 1
    return {(metric.key, metric.step): metric.value for metric in written}


def models(runs, name):
    """Steps of the LoggedModels of a training; each was written once and to its end."""
    client, run = mlflow_run(runs, name)
    found = client.search_logged_models([run.info.experiment_id], f"source_run_id = '{run.info.run_id}'")
    assert all(model.status == LoggedModelStatus.READY for model in found)
    return sorted(int(model.tags["step"]) for model in found)


def step_runs(runs, name):
    """Names and states of the flow runs that the steps of a training have in Prefect."""
    description = read_description(runs / name)
    assert description is not None
    tag = f"run-{description.id}"
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=[tag])))
    return {(run.name, run.state_type.value) for run in found}


def test_kills_leave_the_weights_the_records_and_the_metrics_of_an_uninterrupted_run(workplace, environment):
    runs, instants = workplace / "runs", random.Random(10)
    whole = Command(workplace, environment, "whole")
    work = whole.work()
    assert whole.process.returncode == 0, whole.output
    kills, names = 0, []
    while kills < KILLS:
        names.append(f"killed-{len(names)}")
        finished = False
        while not finished:
            command = Command(workplace, environment, names[-1])
            used = command.work(instants.uniform(0, work / 4) if kills < KILLS else 10 * work)
            finished = not command.killed(group=kills % 2 == 0)
            kills += not finished
            step = LedgerView.read(runs / names[-1] / LEDGER).last_step()
            print(f"{names[-1]}: {used:.1f} of {work:.1f} s, {kills} kills, step {step} committed")
        assert command.process.returncode == 0, command.output
    for name in names:
        assert records(runs / name) == records(runs / "whole")
        summary, expected = (json.loads((runs / each / "summary.json").read_text()) for each in (name, "whole"))
        assert summary["weights_digest"] == expected["weights_digest"]
        assert mlflow_run(runs, name)[1].info.status == "FINISHED"
        assert metrics(runs, name) == metrics(runs, "whole")
        assert models(runs, name) == models(runs, "whole") == [3, 6, 9, 12]
        found = step_runs(runs, name)
        assert {step for step, _ in found} == {f"step {index}" for index in range(1, 13)}
        # A kill between the commit of a step and its last request leaves a step that crashed, and is not repeated.
        assert {state for _, state in found} <= {"COMPLETED", "CRASHED"}, "what a kill left is settled"
        assert ("step 12", "COMPLETED") in found
