"""`fp8-grpo up`: Prefect server, work pools, deployments, workers and MLflow server on this machine, in the foreground.

It says `ready` when all of them answer, and waits. Ctrl-C or SIGTERM takes everything down, and so does the death of
one of them. A training that is at work commits its step first; a second signal ends it at once.
"""

import argparse
import os
import signal
import socket
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from flows.environment import hold_prefect_start, make_prefect_home, mlflow_has_database, service_environment
from flows.launch import stopped
from flows.lifeline import installed, running
from flows.prefect_server import answers
from flows.service import SERVER_SECONDS, STEP_SECONDS, ServiceError, Services, Stopped
from fp8core.errors import UserError

ROOT = Path(__file__).parents[1]
_HERE = ("--host", "127.0.0.1", "--port")


def add_command(commands: Any) -> None:
    """Declare the command on the parser's subcommands."""
    parser = commands.add_parser("up", help="start Prefect, MLflow, the deployments and their workers on this machine")
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
    (runs / "logs").mkdir(parents=True, exist_ok=True)
    make_prefect_home()
    prefect, mlflow = (f"http://127.0.0.1:{port}" for port in (options.prefect_port, options.mlflow_port))
    services = Services(service_environment(f"{prefect}/api", mlflow), ROOT, runs / "logs")
    start = hold_prefect_start()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, services.note_signal)
    try:
        with start, services:
            made = services.begin("work pools", running("flows.pools"))
            _start_mlflow(services, options.mlflow_port, runs)
            services.finish(made)
            services.start("Prefect server", server_command(options.prefect_port), SERVER_SECONDS)
            services.wait_until(partial(answers, f"{prefect}/api/health"), "Prefect server")
            start.close()
            services.wait_until(partial(answers, f"{mlflow}/health"), "MLflow server")
            _start_workers(services, f"{prefect}/api")
            print(f"ready: Prefect {prefect}, MLflow {mlflow}", flush=True)
            print(f"in other terminals: export PREFECT_API_URL={prefect}/api", flush=True)
            wait(services)
    except ServiceError as error:
        return stopped(str(error), 1)
    except Stopped as stop:
        return 128 + int(stop.args[0])


def server_command(port: int) -> list[str]:
    """Arguments of Python for `prefect server start`."""
    return [*running("flows.prefect_sqlite"), "server", "start", *_HERE, str(port)]


def wait(services: Services) -> NoReturn:
    """Until a signal comes or a service ends (errors: `Services.check`)."""
    try:
        services.watch()
    except Stopped:
        print("stops; a training at work commits its step first, a second signal ends it at once", flush=True)
        raise


def _refuse_taken(ports: Mapping[str, int]) -> None:
    for option, port in ports.items():
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except (OSError, OverflowError) as error:
            raise UserError(f"{option} {port} cannot be had ({error}); choose another") from error


def _start_mlflow(services: Services, port: int, runs: Path) -> None:
    from tasks.tracking_store import artifact_root, default_tracking_uri, prepare_store, quiet_store_logs

    quiet_store_logs()
    places = ["--default-artifact-root", artifact_root(runs), "--no-serve-artifacts"]
    if not mlflow_has_database():
        store = default_tracking_uri(runs)
        prepare_store(store, runs)
        places += ["--backend-store-uri", store]
    # Artifacts lie where a training without a server puts them: a run may go on with a server or without.
    server = [*installed("mlflow"), "server", *places, "--workers", "1", *_HERE, str(port)]
    services.start("MLflow server", server, SERVER_SECONDS)


def _start_workers(services: Services, api: str) -> None:
    from prefect.client.orchestration import SyncPrefectClient

    from flows import pools

    services.finish(services.begin("prefect deploy", [*installed("prefect"), "--no-prompt", "deploy", "--all"]))
    name = f"{socket.gethostname()}-{os.getpid()}"
    with SyncPrefectClient(api) as client:
        for pool in pools.of_this_machine():
            worker = [*installed("prefect"), "worker", "start", "--pool", pool, "--name", name]
            services.start(f"worker of {pool}", worker, STEP_SECONDS)
            services.wait_until(partial(pools.is_polled, client, pool, name), f"worker of {pool}")
