"""Costs of publishing to MLflow: in the publisher's thread, in the training's, and in bytes.

    python -m benchmarks.publishing_costs

Trains the tiny configuration for a few steps without MLflow, with its store on sqlite, and with `mlflow server`, and
prints the seconds of a step. Then it times each piece that is published, by the wall clock and in processor time of its
thread. The server shares the processors. Run it on an idle machine; it takes some three minutes on two cores.
"""

import io
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from flows.environment import bound_mlflow_requests
from flows.tracking.mlflow_backlog import MlflowBacklog
from flows.tracking.publish import publish_checkpoint, publish_description, publish_step, tables_due
from flows.tracking.publisher import publishing
from flows.tracking.record import TrackingFile, TrackingRecord
from flows.tracking.store import create_sqlite_store, default_tracking_uri, quiet_store_logs
from flows.tracking.tracker import Tracker
from fp8core.config.load import load_config
from fp8core.config.run import RunConfig
from fp8core.report.console import Console
from fp8core.run.checkpoint import checkpoint_due, save_state
from fp8core.run.context import RunContext, live_run
from fp8core.run.execute import carried
from fp8core.run.loop import begin, iterate, next_step
from fp8core.run.open import open_directory, open_run, plan_of

SETTINGS = {"steps": 30, "warm_start.steps": 30, "checkpoint.every": 10, "tracking.sample_every": 5}
PORT = 5099


def main() -> None:
    bound_mlflow_requests()
    quiet_store_logs()
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        create_sqlite_store(runs / "mlflow.db")
        config = load_config("tiny", {**SETTINGS, "runs": folder})
        store = default_tracking_uri(runs)
        print("| training | step, median | processor time a step | `wake()`, median | end of the run |")
        print("| --- | --- | --- | --- | --- |")
        print(row("no MLflow", train(config, "alone", None)))
        print(row("sqlite", train(config, "sqlite", store)))
        with server(runs) as uri:
            print(row("server", train(config, "server", uri)))
            print("\n| piece | wall clock | processor time of the thread |\n| --- | --- | --- |")
            for name, place in (("sqlite", store), ("server", uri)):
                for piece, (wall, busy) in pieces(config, place, runs).items():
                    print(f"| {piece}, {name} | {1000 * wall:.0f} ms | {1000 * busy:.0f} ms |")


@dataclass
class Course:
    """Seconds of each step, of each `wake()`, from the last step to the end, and of all threads in the steps."""

    steps: list[float]
    wakes: list[float]
    end: float
    busy: float


def row(name: str, course: Course) -> str:
    step, wake = statistics.median(course.steps), statistics.median(course.wakes)
    busy = course.busy / len(course.steps)
    return f"| {name} | {1e3 * step:.0f} ms | {1e3 * busy:.0f} ms | {1e6 * wake:.0f} us | {course.end:.2f} s |"


@contextmanager
def opened(config: RunConfig, name: str) -> Iterator[RunContext]:
    console = Console(io.StringIO(), config.steps)
    with open_directory(config, name) as directory, open_run(config, plan_of(config), directory, console):
        yield live_run(directory.path)


def train(config: RunConfig, name: str, uri: str | None) -> Course:
    with opened(config, name) as run:
        begin(run)
        if uri is None:
            return loop(run, lambda: None)
        tracker, file = tracked(run, uri, name)
        backlog = MlflowBacklog(run, tracker, file)
        backlog.follow_ledger()
        with publishing(run.console, backlog) as publisher:
            course = loop(run, publisher.wake)
            began = time.perf_counter()
        assert file.record.published == config.steps
        return replace(course, end=time.perf_counter() - began)


def loop(run: RunContext, wake: Callable[[], None]) -> Course:
    steps, wakes, busy = [], [], time.process_time()
    for index in range(next_step(run), run.config.steps + 1):
        began = time.perf_counter()
        iterate(run, index, carried(run, index))
        if checkpoint_due(run, index):
            save_state(run, index)
        woken = time.perf_counter()
        wake()
        wakes.append(time.perf_counter() - woken)
        steps.append(time.perf_counter() - began)
    return Course(steps, wakes, 0.0, time.process_time() - busy)


def tracked(run: RunContext, uri: str, experiment: str) -> tuple[Tracker, TrackingFile]:
    tracker = Tracker.open(uri, experiment, experiment, run.config.runs, experiment)
    record = TrackingRecord.begun(uri, tracker.experiment_id, tracker.run_id).changed(told=True)
    return tracker, TrackingFile(run.directory.path, record)


def pieces(config: RunConfig, uri: str, runs: Path) -> dict[str, tuple[float, float]]:
    """Median seconds (wall clock, processor) to publish each kind of piece of a finished run once more."""
    with opened(config, "alone") as run:
        tracker, _ = tracked(run, uri, f"pieces of {uri.partition(':')[0]}")
        publish_description(run, tracker)
        plain = [step for step in range(1, config.steps) if not tables_due(run, step)]
        sampled = [step for step in range(1, config.steps + 1) if tables_due(run, step)]
        before, files = (runs / "mlflow.db").stat().st_size, artifact_bytes(runs)
        costs = {"step": median_cost([lambda step=step: publish_step(run, tracker, step) for step in plain])}
        grown = (runs / "mlflow.db").stat().st_size - before
        manifest = (artifact_bytes(runs) - files) / len(plain)
        costs["step with tables"] = median_cost(
            [lambda step=step: publish_step(run, tracker, step) for step in sampled]
        )
        checkpoints = run.directory.ledger.checkpoints()
        costs["checkpoint"] = median_cost(
            [lambda entry=entry: publish_checkpoint(run, tracker, entry) for entry in checkpoints]
        )
        costs["start of a session"] = median_cost([lambda: publish_description(run, tracker)] * 3)
        print(f"| bytes a step: {grown / len(plain):.0f} in the database, {manifest:.0f} of artifacts | | |")
    return costs


def median_cost(calls: list[Callable[[], None]]) -> tuple[float, float]:
    wall, busy = [], []
    for call in calls:
        began, worked = time.perf_counter(), time.thread_time()
        call()
        wall.append(time.perf_counter() - began)
        busy.append(time.thread_time() - worked)
    return statistics.median(wall), statistics.median(busy)


def artifact_bytes(runs: Path) -> int:
    folders = (runs / "mlartifacts", runs / "served")
    return sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())


@contextmanager
def server(runs: Path) -> Iterator[str]:
    """`mlflow server` on the same store, without its job runners."""
    uri = f"http://127.0.0.1:{PORT}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(PORT), "--workers", "1"]
    places = ["--backend-store-uri", default_tracking_uri(runs), "--artifacts-destination", str(runs / "served")]
    process = subprocess.Popen(
        [*command, *places],
        env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while not answers(uri):
            time.sleep(0.2)
        yield uri
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(uri: str) -> bool:
    try:
        urllib.request.urlopen(f"{uri}/health", timeout=5).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
