"""What a training cannot do once it is killed: MLflow says so, and nothing of it stays behind."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient
from waiting import wait_for

from flows.tracking.record import Guardian, TrackingRecord, read_record, write_record
from flows.tracking.store import default_tracking_uri
from flows.tracking.tracker import Tracker
from fp8core.store.run_directory import RunDirectory

REPOSITORY = Path(__file__).parents[2]

TRAINING = """\
import sys, time
from pathlib import Path
from flows.tracking.record import Guardian
with Guardian(Path(sys.argv[1])):
    print("training", flush=True)
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def store(mlflow_store: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with an MLflow store."""
    return mlflow_store(tmp_path_factory.mktemp("guarded"))


@pytest.fixture
def run(store: Path, request: pytest.FixtureRequest) -> tuple[Path, Callable[[], str]]:
    """The folder of a run that MLflow takes for running, and what MLflow says of it."""
    name = request.node.name
    tracker = Tracker.open(default_tracking_uri(store), "fp8-grpo", name, store, name)
    folder = store / name
    RunDirectory.create_or_open(folder).close()
    write_record(folder, TrackingRecord.begun(tracker.uri, tracker.experiment_id, tracker.run_id))
    return folder, lambda: str(tracker.client.get_run(tracker.run_id).info.status)


def guardians(folder: Path) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if str(folder) in (process.info["cmdline"] or [])]


def test_a_killed_training_is_marked_and_the_guardian_leaves(run) -> None:
    folder, status = run
    # A project of the user's own may have `flows` as well.
    own = folder / "flows"
    own.mkdir()
    (own / "__init__.py").touch()
    training = subprocess.Popen(
        [sys.executable, "-P", "-c", TRAINING, str(folder)], cwd=folder, stdout=subprocess.PIPE, text=True
    )
    assert training.stdout is not None
    assert training.stdout.readline() == "training\n"
    assert status() == "RUNNING"
    training.kill()
    assert training.stdout.read() == "", "nobody holds its output open"
    training.wait()
    wait_for(lambda: status() == "KILLED", "the mark")
    wait_for(lambda: not guardians(folder), "the guardian's end")


def test_a_training_that_ends_by_itself_is_left_alone(run) -> None:
    folder, status = run
    with Guardian(folder):
        # A process that has just begun may show no command yet.
        wait_for(lambda: len(guardians(folder)) == 1, "the guardian's beginning")
    assert not guardians(folder)
    assert status() == "RUNNING"


def test_a_guardian_of_a_settled_run_ends_at_once(run) -> None:
    """The training ended, and was killed before its last message."""
    folder, _ = run
    ended = read_record(folder).ended("FINISHED", None, 1).changed(told=True)
    write_record(folder, ended)
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "flows.tracking.record", str(folder)], cwd=REPOSITORY, check=True)
    assert time.monotonic() - began < 8


def test_waiting_is_cheap(tmp_path: Path) -> None:
    """It sleeps, without what Python could import: little more than a Python that does nothing."""

    def seconds_of(run: Callable[[], object]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)

    def guarded() -> None:
        with Guardian(tmp_path):
            pass

    def nothing() -> None:
        subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True)

    assert min(seconds_of(guarded) for _ in range(3)) < 5 * min(seconds_of(nothing) for _ in range(3))


@pytest.mark.slow
def test_a_killed_command_leaves_nothing_behind(
    small_file: Callable[..., Path],
    prefect_home: Callable[[Path], Path],
    mlflow_store: Callable[[Path], Path],
    tmp_path: Path,
) -> None:
    """With a Prefect server of its own, and its output read through a pipe, as by `tee`."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
    home = prefect_home(tmp_path / "prefect")
    environment = {**inherited, "PYTHONPATH": str(REPOSITORY), "PREFECT_HOME": str(home)}
    mlflow_store(tmp_path / "runs")
    training = subprocess.Popen(
        [sys.executable, "-u", "-m", "flows.cli", "run", str(small_file(tmp_path)), "--set", "run=killed"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert training.stdout is not None
    try:
        before = []
        for line in training.stdout:
            before.append(line)
            if line.strip().startswith("2/80 "):
                break
        children = psutil.Process(training.pid).children(recursive=True)
        assert len(children) == 2, before
    finally:
        os.killpg(training.pid, signal.SIGKILL)
    training.stdout.read()
    training.wait()
    wait_for(lambda: not any(child.is_running() for child in children), "the end of server and guardian")
    record = read_record(tmp_path / "runs" / "killed")
    assert MlflowClient(record.uri).get_run(record.run_id).info.status == "KILLED"
