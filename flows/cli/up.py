"""`fp8-grpo up`: Prefect server, work pools, deployments, workers and MLflow server on this machine, in the foreground.

It prints `ready` when all of them answer, and waits. Ctrl-C or SIGTERM takes everything down, and so does the death of
one of them. A running training commits its step first; a second signal ends it at once.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import psutil
import yaml

from flows.environment import (
    answers,
    make_prefect_home,
    mlflow_has_database,
    prefect_login,
    reach_this_machine,
    refuse_malformed_settings,
    service_environment,
)
from flows.launch import say, stopped
from flows.termination import ExitCode
from fp8core.durable import PRIVATE, make_folder
from fp8core.errors import UserError, first_line, last_words
from fp8core.processes.end_with_parent import installed

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

ROOT = Path(__file__).parents[2]
CPU, GPU = "fp8-grpo-cpu", "fp8-grpo-gpu"
"""Work pools: trainings that need no GPU, and those that do. Each runs one flow run at a time; the others queue."""
_HERE = ("--host", "127.0.0.1", "--port")
_START_SECONDS = 300.0
# Longest time for a server, and for a training with a step to commit, to end.
_SERVER_SECONDS, _STEP_SECONDS = 15.0, 600.0
_POLL_SECONDS, _LOOK_SECONDS = 0.2, 3.0


class ServiceError(Exception):
    """A service did not start, or ended."""


class Stopped(Exception):
    """A signal to end this process arrived; `args` holds its number."""


class Service:
    """A child with a process group and a log of its own: neither Ctrl-C nor a signal to our group reaches it."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name, self._log = name, log
        with log.open("ab") as output:
            self._begin = output.tell()
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def death(self) -> ServiceError:
        with self._log.open("rb") as log:
            log.seek(self._begin)
            reason = last_words(log.read().decode(errors="replace"))
        return ServiceError(f"{self.name} ended with {self.exit_code}: {reason} (log: {self._log})")

    def stop_children(self, hurried: Callable[[], bool]) -> None:
        """Request the end of a worker's trainings, and wait for them: the worker reports it, and starts no other."""
        if self.exit_code is not None:
            return
        trainings = psutil.Process(self._process.pid).children()
        for training in trainings:
            with contextlib.suppress(psutil.NoSuchProcess):
                training.terminate()
        deadline = time.monotonic() + _STEP_SECONDS
        while psutil.wait_procs(trainings, timeout=_POLL_SECONDS)[1]:
            if hurried() or time.monotonic() > deadline:
                return

    def stop(self, hurried: Callable[[], bool]) -> None:
        """End it, and then what is left of its process group."""
        self._process.terminate()
        deadline = time.monotonic() + _SERVER_SECONDS
        while self.exit_code is None and not hurried() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Services:
    """The services of this process; leaving the block ends them, the last one started first.

    A signal is only recorded, and raised by `check`, so that every service that starts is registered here.
    """

    def __init__(self, environment: Mapping[str, str], logs: Path) -> None:
        self._environment, self._logs = environment, logs
        self._servers, self._workers = list[Service](), list[Service]()
        self._signals: list[int] = []
        self.pause_pools: Callable[[], None] = lambda: None
        """Called before the trainings of workers are ended, so that no other begins."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._workers:
            self.pause_pools()
        for worker in self._workers:
            worker.stop_children(self._hurried)
        for service in reversed([*self._servers, *self._workers]):
            service.stop(self._hurried)

    def _hurried(self) -> bool:
        return len(self._signals) > 1

    def note_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: the first one requests the end, a second one the end at once."""
        self._signals.append(number)

    def start_server(self, name: str, arguments: Sequence[str], url: str) -> None:
        """Start our Python with `arguments`, and wait until it answers at `url`."""
        self._servers.append(self._launch(name, arguments))
        self._wait_until(partial(answers, url), name)

    def start_worker(self, name: str, arguments: Sequence[str], polls: Callable[[], bool]) -> None:
        self._workers.append(self._launch(name, arguments))
        self._wait_until(polls, name)

    def carry_out(self, name: str, arguments: Sequence[str]) -> None:
        """Run our Python with `arguments` to its end. Raises ServiceError when it fails."""
        service = self._launch(name, arguments)
        try:
            self._wait_until(lambda: service.exit_code is not None, name)
        finally:
            service.stop(self._hurried)
        if service.exit_code != 0:
            raise service.death()

    def _launch(self, name: str, arguments: Sequence[str]) -> Service:
        log = self._logs / f"{name.replace(' ', '-')}.log"
        return Service(name, [sys.executable, *arguments], self._environment, log)

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        say(f"waiting for: {what}")
        deadline = time.monotonic() + _START_SECONDS
        while not condition():
            self.check()
            if time.monotonic() > deadline:
                raise ServiceError(f"{what}: not within {_START_SECONDS:.0f} s (logs: {self._logs})")
            time.sleep(_POLL_SECONDS)

    def check(self) -> None:
        """Raises Stopped after a signal, and ServiceError when a service has ended."""
        if self._signals:
            raise Stopped(self._signals[0])
        for service in (*self._servers, *self._workers):
            if service.exit_code is not None:
                raise service.death()


def add_command(commands: Any) -> None:
    parser = commands.add_parser("up", help="start Prefect, MLflow, deployments and workers here, from a checkout")
    parser.add_argument("--prefect-port", type=int, default=4200, metavar="PORT", help="default 4200")
    parser.add_argument("--mlflow-port", type=int, default=5000, metavar="PORT", help="default 5000")
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "runs", metavar="DIR", help="for MLflow's store and the logs; default runs"
    )
    parser.set_defaults(command=up)


def up(options: argparse.Namespace) -> int:
    """Start everything and wait; returns the exit code (1: a service died), raises UserError before it starts."""
    _refuse_taken({"--prefect-port": options.prefect_port, "--mlflow-port": options.mlflow_port})
    if not (ROOT / "prefect.yaml").is_file():
        raise UserError(f"{ROOT} has no prefect.yaml: `fp8-grpo up` needs a checkout of the repository")
    runs = options.runs.absolute()
    make_folder(runs / "logs", PRIVATE)
    make_prefect_home()
    refuse_malformed_settings()
    reach_this_machine()
    prefect, mlflow = (f"http://127.0.0.1:{port}" for port in (options.prefect_port, options.mlflow_port))
    login, word = prefect_login()
    services = Services(service_environment(options.prefect_port, options.mlflow_port, login), runs / "logs")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, services.note_signal)
    try:
        with services:
            server = [*installed("prefect"), "server", "start", *_HERE, str(options.prefect_port)]
            services.start_server("Prefect server", server, f"{prefect}/api/health")
            services.start_server("MLflow server", _mlflow_server(options.mlflow_port, runs), f"{mlflow}/health")
            waiting = _serve(services, f"{prefect}/api", login)
            # Not the password itself: this output may be kept in a log.
            say(
                f"ready: Prefect {prefect}, MLflow {mlflow}\n"
                f"in other terminals: export PREFECT_API_URL={prefect}/api PREFECT_API_AUTH_STRING={word} "
                f"MLFLOW_TRACKING_URI={mlflow}\n"
                "the password of Prefect's UI, there: echo $PREFECT_API_AUTH_STRING"
            )
            if waiting:
                say(_elsewhere(waiting, prefect, mlflow))
            wait(services, partial(_mark_dead, runs, mlflow))
    except ServiceError as error:
        return stopped(str(error), ExitCode.FAILED)
    except Stopped as stop:
        return 128 + int(stop.args[0])


def wait(services: Services, look: Callable[[], None]) -> NoReturn:
    """Until a signal comes or a service ends (errors: `Services.check`); meanwhile `look` every few seconds."""
    due = time.monotonic()
    try:
        while True:
            services.check()
            if time.monotonic() >= due:
                look()
                due = time.monotonic() + _LOOK_SECONDS
            time.sleep(_POLL_SECONDS)
    except Stopped:
        say("stops; a training at work commits its step first, a second signal ends it at once")
        raise


def _mark_dead(runs: Path, mlflow: str) -> None:
    """Show trainings of this folder that were killed as such in MLflow."""
    from flows.tracking.record import mark_dead
    from flows.tracking.store import default_tracking_uri

    for store in (mlflow, default_tracking_uri(runs)):
        mark_dead(runs, store)


def _refuse_taken(ports: Mapping[str, int]) -> None:
    if len({*ports.values()}) < len(ports):
        raise UserError(f"{' and '.join(ports)} are the same port; choose another for one")
    for option, port in ports.items():
        if port < 1:
            raise UserError(f"{option} {port}: choose a port from 1 on")
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except (OSError, OverflowError) as error:
            raise UserError(f"{option} {port} cannot be had ({error}); choose another") from error


def _mlflow_server(port: int, runs: Path) -> list[str]:
    """Arguments of Python for MLflow's server, whose store is made first."""
    from flows.tracking.store import artifact_root, default_tracking_uri, prepare_store, quiet_store_logs

    quiet_store_logs()
    # Artifacts lie where a training without a server puts them: a run may go on with a server or without.
    places = ["--default-artifact-root", artifact_root(runs), "--no-serve-artifacts"]
    if not mlflow_has_database():
        store = default_tracking_uri(runs)
        prepare_store(store, runs)
        places += ["--backend-store-uri", store]
    return [*installed("mlflow"), "server", *places, "--workers", "1", *_HERE, str(port)]


def _serve(services: Services, api: str, login: str) -> list[str]:
    """Make the pools, deploy, and start a worker for each pool that this machine can serve.

    Returns the deployments whose runs wait for a worker elsewhere.
    """
    import torch
    from prefect.client.orchestration import SyncPrefectClient

    with SyncPrefectClient(api, auth_string=login) as client:
        served = [CPU, GPU] if torch.cuda.is_available() else [CPU]
        for pool in (CPU, GPU):
            _make_pool(client, pool)
        _deploy(services, client)
        services.pause_pools = partial(_pause, api, login, served)
        worker = f"{socket.gethostname()}-{os.getpid()}"
        for pool in served:
            _end_lost_runs(client, pool)
            arguments = [*installed("prefect"), *worker_start(pool), "--name", worker]
            services.start_worker(f"worker of {pool}", arguments, lambda pool=pool: worker in _online(client, pool))  # type: ignore[misc]
        flows = {flow.id: flow.name for flow in client.read_flows()}
        found = [each for each in client.read_deployments() if each.work_pool_name not in served]
    return sorted(f"{flows[deployment.flow_id]}/{deployment.name}" for deployment in found)


def worker_start(pool: str) -> list[str]:
    """Arguments of `prefect` for a worker of a pool; it begins the next run when the process of one has ended."""
    return ["worker", "start", "--pool", pool, "--limit", "1", "--type", "process"]


def _make_pool(client: "SyncPrefectClient", pool: str) -> None:
    from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
    from prefect.exceptions import ObjectAlreadyExists

    with contextlib.suppress(ObjectAlreadyExists):
        client.create_work_pool(WorkPoolCreate(name=pool, type="process", concurrency_limit=1))
    client.update_work_pool(pool, WorkPoolUpdate(is_paused=False, concurrency_limit=1))


def _pause(api: str, login: str, pools: Sequence[str]) -> None:
    import httpx
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.actions import WorkPoolUpdate
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    try:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 2}), SyncPrefectClient(api, auth_string=login) as client:
            for pool in pools:
                client.update_work_pool(pool, WorkPoolUpdate(is_paused=True))
    except httpx.HTTPError as error:
        say(f"Prefect's server does not answer, and a run that waits may begin: {first_line(error)}")


def _deploy(services: Services, client: "SyncPrefectClient") -> None:
    """Deploy prefect.yaml; a deployment that the server has keeps its schedules, and its pause.

    `prefect deploy` would put declared schedules in place of those that a user has paused, changed or deleted since.
    """
    declared = yaml.safe_load((ROOT / "prefect.yaml").read_text("utf-8"))
    known = {(each.entrypoint, each.name): each for each in client.read_deployments()}
    for deployment in declared["deployments"]:
        if (had := known.get((deployment["entrypoint"], deployment["name"]))) is not None:
            deployment.pop("schedules", None)
            deployment["paused"] = had.paused
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "prefect.yaml")
        file.write_text(yaml.safe_dump(declared, sort_keys=False), "utf-8")
        command = [*installed("prefect"), "--no-prompt", "deploy", "--all", "--prefect-file", str(file)]
        services.carry_out("prefect deploy", command)


def _end_lost_runs(client: "SyncPrefectClient", pool: str) -> None:
    """Runs that hold the place of a pool without any worker have crashed: their machine, or their worker, is gone."""
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateType,
        WorkPoolFilter,
        WorkPoolFilterName,
    )
    from prefect.client.schemas.objects import StateType
    from prefect.states import Crashed

    if _online(client, pool):
        return
    begun = FlowRunFilterStateType(any_=[StateType.PENDING, StateType.RUNNING, StateType.CANCELLING])
    of_pool = WorkPoolFilter(name=WorkPoolFilterName(any_=[pool]))
    for run in client.read_flow_runs(
        flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=begun)), work_pool_filter=of_pool
    ):
        client.set_flow_run_state(run.id, Crashed(message="its worker is gone; a retry continues the run"), force=True)


def _online(client: "SyncPrefectClient", pool: str) -> set[str]:
    found = client.read_workers_for_work_pool(pool)
    return {worker.name for worker in found if worker.status is not None and worker.status.value == "ONLINE"}


def _elsewhere(waiting: Sequence[str], prefect: str, mlflow: str) -> str:
    ports = " ".join(f"-L {port}:127.0.0.1:{port}" for port in (url.rpartition(":")[2] for url in (prefect, mlflow)))
    return (
        f"this machine has no GPU for {', '.join(waiting)}: their runs wait in {GPU} for a worker\n"
        f"a worker, on a machine that has: ssh -N {ports} {socket.gethostname()} &\n"
        f"  PREFECT_API_URL={prefect}/api PREFECT_API_AUTH_STRING=... MLFLOW_TRACKING_URI={mlflow} "
        f"prefect {' '.join(worker_start(GPU))}"
    )
