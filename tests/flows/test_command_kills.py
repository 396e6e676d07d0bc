"""`fp8-grpo run` killed with SIGKILL at random instants and called again, with real Prefect and MLflow."""

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

from flows.tracking.backlog import CORE, DETAIL
from flows.tracking.store import default_tracking_uri
from fp8core.metrics.time import METRICS
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import LedgerView
from fp8core.store.run_directory import read_description

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory, small_file, mlflow_store):
    folder = tmp_path_factory.mktemp("workplace")
    mlflow_store(folder / "runs")
    small_file(folder, steps=12, checkpoint={"every": 3})
    return folder


@pytest.fixture(scope="module")
def train(workplace, prefect_server):
    """Call `fp8-grpo run` for the run `name`, killed after these seconds of processor time; returns what it used."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
    places = {"PYTHONPATH": str(REPOSITORY), "PREFECT_HOME": str(workplace / "prefect")}
    environment = {**inherited, **places, "PREFECT_API_URL": PREFECT_API_URL.value()}

    def call(name, seconds=float("inf")):
        words = [sys.executable, "-m", "flows.cli", "run", "small.yaml", "--set", f"run={name}"]
        with (workplace / f"{name}.out").open("a") as output:
            process = subprocess.Popen(
                words, cwd=workplace, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        begun, used, own = None, 0.0, psutil.Process(process.pid)
        while used < seconds and process.poll() is None:
            if begun is None and (workplace / "runs" / name / LEDGER).exists():
                begun = sum(own.cpu_times()[:2])
            used = 0.0 if begun is None else sum(own.cpu_times()[:2]) - begun
            time.sleep(0.005)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() in (0, -signal.SIGKILL), (workplace / f"{name}.out").read_text()
        return used

    return call


# Two equal trainings need not share these.
CLOCK_METRICS = (*(f"{CORE}{each.headline}" for each in METRICS if each.headline), f"{DETAIL}time/", "system/")


def records(folder):
    store, steps = ArtifactStore(folder), LedgerView.read(folder / LEDGER).steps()
    return [store.get_json(steps[index].manifest)["record"] for index in sorted(steps)]


def shown_in_mlflow(runs, name):
    """Status, metrics by (key, step), but those of the clock, and steps of models; each was written once."""
    client = MlflowClient(default_tracking_uri(runs))
    experiment = client.get_experiment_by_name("fp8-grpo")
    (run,) = client.search_runs([experiment.experiment_id], f"attributes.run_name = '{name}'")
    keys = [key for key in run.data.metrics if not key.startswith(CLOCK_METRICS)]
    written = [metric for key in keys for metric in client.get_metric_history(run.info.run_id, key)]
    assert Counter((metric.key, metric.step) for metric in written).most_common(1)[0][1] == 1
    models = client.search_logged_models([run.info.experiment_id], f"source_run_id = '{run.info.run_id}'")
    assert all(model.status == LoggedModelStatus.READY for model in models)
    values = {(metric.key, metric.step): metric.value for metric in written}
    return run.info.status, values, sorted(int(model.tags["step"]) for model in models)


def step_runs(runs, name):
    """Names and states of the flow runs that the steps of a training have in Prefect."""
    tag = f"run-{read_description(runs / name).id}"
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=[tag])))
    return {(run.name, run.state_type.value) for run in found}


def test_kills_leave_the_weights_the_records_and_the_metrics_of_an_uninterrupted_run(workplace, train):
    runs, instants = workplace / "runs", random.Random(10)
    work = train("whole")
    for _ in range(2):
        print(train("killed", instants.uniform(0, work / 4)))
    train("killed")
    assert records(runs / "killed") == records(runs / "whole")
    assert shown_in_mlflow(runs, "killed") == shown_in_mlflow(runs, "whole")
    assert shown_in_mlflow(runs, "killed")[::2] == ("FINISHED", [3, 6, 9, 12])
    found = step_runs(runs, "killed")
    assert {step for step, _ in found} == {f"step {index}" for index in range(1, 13)}
    # A kill between the commit of a step and its last request leaves a step that crashed, and is not repeated.
    assert {state for _, state in found} <= {"COMPLETED", "CRASHED"}, "what a kill left is settled"
    assert ("step 12", "COMPLETED") in found
