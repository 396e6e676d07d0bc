"""`fp8-grpo up`: Prefect server, pools, deployments, workers and MLflow server on this machine, in the foreground."""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, NoReturn, Self

import psutil
import yaml

from flows.environment import answers, is_set, make_prefect_home, prefect_login, reach_this_machine, service_environment
from flows.launch import exit_with, say
from flows.termination import ExitCode
from fp8core.durable import PRIVATE, make_folder
from fp8core.errors import UserError, first_line, last_words
from fp8core.processes.end_with_parent import module_arguments

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

ROOT = Path(__file__).parents[2]
CPU = "fp8-grpo-cpu"
GPU = "fp8-grpo-gpu"
"""Work pools: trainings that need no GPU, and those that do. Each runs one flow run at a time; the others queue."""
_HERE = ("--host", "127.0.0.1", "--port")
_START_SECONDS = 300.0
# Longest time for a server, and for a training with a step to commit, to end.
_SERVER_SECONDS = 15.0
_STEP_SECONDS = 600.0
_POLL_SECONDS = 0.2


class ServiceError(Exception):
    """A service did not start, or ended."""


class StopSignal(Exception):
    """A signal to end this process arrived; `args` holds its number."""


class Service:
    """A child with a process group and a log of its own: neither Ctrl-C nor a signal to our group reaches it."""

    def __init__(self, name: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._name = name
        self._log = log
        with log.open("wb") as output:
            self._process = _start(arguments, environment, output)

    def check(self) -> None:
        """Raises ServiceError: it has ended."""
        if (code := self._process.poll()) is not None:
            reason = last_words(self._log.read_text("utf-8", errors="replace"))
            raise ServiceError(f"{self._name} ended with {code}: {reason} (log: {self._log})")

    def stop_children(self) -> None:
        """Request the end of a worker's trainings, and wait for them: the worker reports it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            trainings = psutil.Process(self._process.pid).children()
            for training in trainings:
                training.terminate()
            psutil.wait_procs(trainings, timeout=_STEP_SECONDS)

    def stop(self) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_SERVER_SECONDS)
        self.kill()
        self._process.wait()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _start(
    arguments: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | int
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=dict(environment),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


class Services:
    """The services of this process; leaving the block ends them, the last one started first.

    The first signal is only recorded, and raised by `check`.
    """

    def __init__(self, environment: Mapping[str, str], logs: Path) -> None:
        self._environment = environment
        self._logs = logs
        self._services = list[Service]()
        self.workers = list[Service]()
        self._signals: list[int] = []
        self.pause_pools: Callable[[], None] = lambda: None
        """Called before the trainings of workers are ended, so that no other begins."""
        self.await_reports: Callable[[], None] = lambda: None
        """Called when they have ended, before their workers do."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.workers:
            self.pause_pools()
        for worker in self.workers:
            worker.stop_children()
        self.await_reports()
        for service in reversed(self._services):
            service.stop()

    def note_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal requests the end, a second one kills everything."""
        self._signals.append(number)
        if len(self._signals) > 1:
            for service in self._services:
                service.kill()

    def start(self, name: str, arguments: Sequence[str], is_ready: Callable[[], bool]) -> Service:
        log = self._logs / f"{name.replace(' ', '-')}.log"
        service = Service(name, arguments, self._environment, log)
        self._services.append(service)
        say(f"waiting for: {name}")
        deadline = time.monotonic() + _START_SECONDS
        while not is_ready():
            self.check()
            if time.monotonic() > deadline:
                raise ServiceError(f"{name}: not within {_START_SECONDS:.0f} s (logs: {self._logs})")
            time.sleep(_POLL_SECONDS)
        return service

    def check(self) -> None:
        if self._signals:
            raise StopSignal(self._signals[0])
        for service in self._services:
            service.check()


def add_commands(commands: Any) -> None:
    parser = commands.add_parser("up", help="start Prefect, MLflow, deployments and workers here, from a checkout")
    parser.add_argument("--prefect-port", type=int, default=4200, metavar="PORT", help="default 4200")
    parser.add_argument("--mlflow-port", type=int, default=5000, metavar="PORT", help="default 5000")
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "runs", metavar="DIR", help="for MLflow's store and the logs; default runs"
    )
    parser.set_defaults(command=up)


def up(options: argparse.Namespace) -> int:
    """Start everything and wait; returns the exit code (1: a service died), raises UserError before it starts."""
    _check_ports({"--prefect-port": options.prefect_port, "--mlflow-port": options.mlflow_port})
    if not (ROOT / "prefect.yaml").is_file():
        raise UserError(f"{ROOT} has no prefect.yaml: `fp8-grpo up` needs a checkout of the repository")
    runs = options.runs.absolute()
    make_folder(runs / "logs", PRIVATE)
    make_prefect_home()
    reach_this_machine()
    prefect, mlflow = (f"http://127.0.0.1:{port}" for port in (options.prefect_port, options.mlflow_port))
    login, word = prefect_login()
    environment = service_environment(options.prefect_port, options.mlflow_port, login)
    services = Services(environment, runs / "logs")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, services.note_signal)
    try:
        with services:
            server = [*module_arguments("prefect"), "server", "start", *_HERE, str(options.prefect_port)]
            services.start("Prefect server", server, partial(answers, f"{prefect}/api/health"))
            arguments = _mlflow_server(options.mlflow_port, runs)
            services.start("MLflow server", arguments, partial(answers, f"{mlflow}/health"))
            pools = _serve(services, f"{prefect}/api", login, environment)
            # Not the password itself: this output may be kept in a log.
            say(
                f"ready: Prefect {prefect}, MLflow {mlflow}\n"
                f"in other terminals: export PREFECT_API_URL={prefect}/api PREFECT_API_AUTH_STRING={word} "
                f"MLFLOW_TRACKING_URI={mlflow}\n"
                "the password of Prefect's UI, there: echo $PREFECT_API_AUTH_STRING"
            )
            if GPU not in pools:
                say(f"this machine has no GPU: runs of the pool {GPU} wait for a worker (docs/guides/operate.md)")
            wait(services)
    except ServiceError as error:
        return exit_with(str(error), ExitCode.FAILED)
    except StopSignal as stop:
        return 128 + int(stop.args[0])


def wait(services: Services) -> NoReturn:
    try:
        while True:
            services.check()
            time.sleep(_POLL_SECONDS)
    except StopSignal:
        say("stops; a training at work commits its step first, a second signal ends it at once")
        raise


def _check_ports(ports: Mapping[str, int]) -> None:
    for option, port in ports.items():
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
    if not is_set("MLFLOW_BACKEND_STORE_URI"):
        store = default_tracking_uri(runs)
        prepare_store(store, runs)
        places += ["--backend-store-uri", store]
    return [*module_arguments("mlflow"), "server", *places, "--workers", "1", *_HERE, str(port)]


def _serve(services: Services, api: str, login: str, environment: Mapping[str, str]) -> list[str]:
    """Make the pools, deploy, and start a worker for each pool that this machine can serve; returns those."""
    import torch
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.actions import WorkPoolCreate

    with SyncPrefectClient(api, auth_string=login) as client:
        pools = [CPU, GPU] if torch.cuda.is_available() else [CPU]
        for pool in (CPU, GPU):
            work_pool = WorkPoolCreate(name=pool, type="process", is_paused=False, concurrency_limit=1)
            client.create_work_pool(work_pool, overwrite=True)
        _deploy(client, environment)
        services.pause_pools = partial(_pause, api, login, pools)
        services.await_reports = partial(_await_reports, api, login, pools)
        for pool in pools:
            _end_lost_runs(client, pool)
            # It begins the next run when the process of one has ended.
            options = ["--pool", pool, "--limit", "1", "--type", "process"]
            arguments = [*module_arguments("prefect"), "worker", "start", *options]
            services.workers.append(services.start(f"worker of {pool}", arguments, partial(_is_online, client, pool)))
    return pools


@contextlib.contextmanager
def _client_at_end(api: str, login: str) -> "Iterator[SyncPrefectClient]":
    """It gives up soon on a server that is gone."""
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 2}), SyncPrefectClient(api, auth_string=login) as client:
        yield client


def _pause(api: str, login: str, pools: Sequence[str]) -> None:
    import httpx
    from prefect.client.schemas.actions import WorkPoolUpdate

    try:
        with _client_at_end(api, login) as client:
            for pool in pools:
                client.update_work_pool(pool, WorkPoolUpdate(is_paused=True))
    except httpx.HTTPError as error:
        say(f"Prefect's server does not answer, and a run that waits may begin: {first_line(error)}")


def _await_reports(api: str, login: str, pools: Sequence[str]) -> None:
    """Until the workers of this machine have reported the ends of their runs; a worker that is stopped never does."""
    import httpx

    here = f"{socket.gethostname()}:"
    deadline = time.monotonic() + _SERVER_SECONDS
    # `_pause` has said that the server is gone.
    with contextlib.suppress(httpx.HTTPError), _client_at_end(api, login) as client:
        while time.monotonic() < deadline:
            if not any(
                (run.infrastructure_pid or "").startswith(here) for p in pools for run in _unfinished_runs(client, p)
            ):
                return
            time.sleep(_POLL_SECONDS)


def _deploy(client: "SyncPrefectClient", environment: Mapping[str, str]) -> None:
    """Deploy prefect.yaml; a deployment that the server has keeps its schedules, and its pause.

    `prefect deploy` would put declared schedules in place of those that a user has paused, changed or deleted since.
    """
    declarations = yaml.safe_load((ROOT / "prefect.yaml").read_text("utf-8"))
    deployments = {(each.entrypoint, each.name): each for each in client.read_deployments()}
    for deployment in declarations["deployments"]:
        if (had := deployments.get((deployment["entrypoint"], deployment["name"]))) is not None:
            deployment.pop("schedules", None)
            deployment["paused"] = had.paused
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "prefect.yaml")
        file.write_text(yaml.safe_dump(declarations, sort_keys=False), "utf-8")
        say("waiting for: prefect deploy")
        arguments = [*module_arguments("prefect"), "--no-prompt", "deploy", "--all", "--prefect-file", str(file)]
        deploy = _start(arguments, environment, subprocess.PIPE)
        output, _ = deploy.communicate()
    if deploy.returncode:
        raise ServiceError(f"prefect deploy ended with {deploy.returncode}: {last_words(output.decode())}")


def _end_lost_runs(client: "SyncPrefectClient", pool: str) -> None:
    """Runs that hold the place of a pool without any worker have crashed: their machine, or their worker, is gone."""
    from prefect.states import Crashed

    if _is_online(client, pool):
        return
    for run in _unfinished_runs(client, pool):
        client.set_flow_run_state(run.id, Crashed(message="its worker is gone; a retry continues the run"), force=True)


def _unfinished_runs(client: "SyncPrefectClient", pool: str) -> "list[FlowRun]":
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateType,
        WorkPoolFilter,
        WorkPoolFilterName,
    )
    from prefect.client.schemas.objects import StateType

    states = FlowRunFilterStateType(any_=[StateType.PENDING, StateType.RUNNING, StateType.CANCELLING])
    of_pool = WorkPoolFilter(name=WorkPoolFilterName(any_=[pool]))
    unfinished = FlowRunFilter(state=FlowRunFilterState(type=states))
    return client.read_flow_runs(flow_run_filter=unfinished, work_pool_filter=of_pool)


def _is_online(client: "SyncPrefectClient", pool: str) -> bool:
    workers = client.read_workers_for_work_pool(pool)
    return any(worker.status is not None and worker.status.value == "ONLINE" for worker in workers)
