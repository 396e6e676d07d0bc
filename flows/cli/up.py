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
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import psutil

from flows.environment import (
    HEARTBEAT_SECONDS,
    hold_prefect_home,
    hold_prefect_start,
    make_prefect_home,
    mlflow_has_database,
    prefect_database,
    prefect_login,
    reach_this_machine,
    refuse_malformed_settings,
    service_environment,
)
from flows.launch import say, stopped
from flows.prefect_server import answers
from flows.termination import ExitCode
from fp8core.durable import PRIVATE, make_folder
from fp8core.errors import UserError, first_line, last_words
from fp8core.processes.end_with_parent import TiedProcess, installed, running

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

    from flows.pools import Unserved

ROOT = Path(__file__).parents[2]
_HERE = ("--host", "127.0.0.1", "--port")
_START_SECONDS = 300.0
# Longest time for a server, and for a training with a step to commit, to end.
SERVER_SECONDS, STEP_SECONDS = 15.0, 600.0
_POLL_SECONDS, _LOOK_SECONDS = 0.2, 3.0
# Variable with which a Prefect worker passes the id of a flow run to its process.
_FLOW_RUN = "PREFECT__FLOW_RUN_ID"
# Runs in a bare interpreter: ends the process groups on its input when that closes without an exit message.
_REAP = """
import os, signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
groups = []
for line in sys.stdin:
    if line == "goodbye\\n":
        sys.exit()
    groups.append(int(line))
for number, seconds in ((signal.SIGTERM, 10), (signal.SIGKILL, 0)):
    for group in groups:
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            pass
    time.sleep(seconds)
"""


class ServiceError(Exception):
    """A service did not start, or ended."""


class Stopped(Exception):
    """A signal to end this process arrived; `args` holds its number."""


class Service:
    """A child with a process group and a log of its own: neither Ctrl-C nor a signal to our group reaches it."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], place: Path, log: Path):
        self.name, self._log = name, log
        with log.open("ab") as output:
            self._begin = output.tell()
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                cwd=place,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.group = self._process.pid
        self.flow_runs: set[str] = set()
        self._thawed = False

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def death(self) -> ServiceError:
        code = self.exit_code
        assert code is not None, "it has ended"
        if code < 0:
            # The last line may be that of a training, and have nothing to do with it.
            return ServiceError(f"{self.name} was ended by {signal.Signals(-code).name} (log: {self._log})")
        with self._log.open("rb") as log:
            log.seek(self._begin)
            reason = last_words(log.read().decode(errors="replace"))
        return ServiceError(f"{self.name} ended with {code}: {reason} (log: {self._log})")

    def stop(self) -> None:
        """Request its end, after that of its children; a training ends its own children.

        Meanwhile it is frozen: a Prefect worker would kill its trainings when it ends, or start the next one. It does
        not report their end either; `flow_runs` holds the ids of their flow runs from here.
        """
        ended = self.exit_code is not None
        if not ended:
            os.kill(self.group, signal.SIGSTOP)
        for process, _ in _running(self.group):
            with contextlib.suppress(psutil.Error):
                if process.pid != self.group and (number := process.environ().get(_FLOW_RUN)):
                    self.flow_runs.add(number)
        if ended:
            self._signal_group(signal.SIGTERM)
            return
        for child in self._children():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.terminate()

    def wait(self, seconds: float) -> bool:
        """True if it ends, with everything in its group, within `seconds`; its children end first."""
        deadline = time.monotonic() + seconds
        while self.exit_code is None or _running(self.group):
            if not self._thawed and self.exit_code is None and not self._children():
                self._thawed = True
                os.kill(self.group, signal.SIGTERM)
                os.kill(self.group, signal.SIGCONT)
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _children(self) -> list[psutil.Process]:
        return [process for process, parent in _running(self.group) if parent == self.group]

    def kill(self) -> None:
        self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, number)


class Services:
    """The services of this process; leaving the block ends them, the last one started first.

    A signal is only recorded, and raised by `check`, so that every service that starts is registered here.
    """

    def __init__(self, environment: Mapping[str, str], place: Path, logs: Path) -> None:
        self._environment, self._place, self._logs = environment, place, logs
        self._lasting: list[Service] = []
        self._all: list[tuple[Service, float, Callable[[Service], None]]] = []
        self._signals: list[int] = []

    def __enter__(self) -> Self:
        self._reaper = TiedProcess(["-I", "-S", "-c", _REAP], subprocess.DEVNULL)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for service, patience, after in reversed(self._all):
            service.stop()
            deadline = time.monotonic() + patience
            while not service.wait(_POLL_SECONDS):
                if len(self._signals) > 1 or time.monotonic() > deadline:
                    service.kill()
            if len(self._signals) < 2:
                after(service)
        self._reaper.end(b"goodbye\n")

    def note_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: the first one requests the end, a second one the end at once."""
        self._signals.append(number)

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        patience: float,
        after: Callable[[Service], None] = lambda service: None,
    ) -> None:
        """Start our Python with `arguments`, as a lasting service that may take `patience` seconds to end.

        `after` is called when this object has ended it, while the services that started earlier still run.
        """
        self._lasting.append(self._launch(name, arguments, patience, after))

    def begin(self, name: str, arguments: Sequence[str]) -> Service:
        return self._launch(name, arguments, SERVER_SECONDS, lambda service: None)

    def finish(self, service: Service) -> None:
        """Wait for its end. Raises as `wait_until`; ServiceError too when it fails."""
        self.wait_until(lambda: service.exit_code is not None, service.name)
        if service.exit_code != 0:
            raise service.death()

    def _launch(
        self, name: str, arguments: Sequence[str], patience: float, after: Callable[[Service], None]
    ) -> Service:
        log = self._logs / f"{name.replace(' ', '-')}.log"
        service = Service(name, [sys.executable, *arguments], self._environment, self._place, log)
        self._all.append((service, patience, after))
        self._reaper.say(f"{service.group}\n".encode())
        return service

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Print what is waited for. Raises ServiceError: `what` did not come about; and as `check`."""
        say(f"waiting for: {what}")
        deadline = time.monotonic() + _START_SECONDS
        while not condition():
            self.check()
            if time.monotonic() > deadline:
                raise ServiceError(f"{what}: not within {_START_SECONDS:.0f} s (logs: {self._logs})")
            time.sleep(_POLL_SECONDS)

    def watch(self, look: Callable[[], None]) -> NoReturn:
        due = time.monotonic()
        while True:
            self.check()
            if time.monotonic() >= due:
                look()
                due = time.monotonic() + _LOOK_SECONDS
            time.sleep(_POLL_SECONDS)

    def check(self) -> None:
        """Raises Stopped after a signal, and ServiceError when a service has ended."""
        if self._signals:
            raise Stopped(self._signals[0])
        for service in self._lasting:
            if service.exit_code is not None:
                raise service.death()


def _running(group: int) -> list[tuple[psutil.Process, int]]:
    """Processes of a group, with their parents; zombies do not count."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process, process.ppid()))
    return found


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
    with hold_prefect_home(), hold_prefect_start() as start:
        login, word = prefect_login()
        services = Services(service_environment(options.prefect_port, options.mlflow_port, login), ROOT, runs / "logs")
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, services.note_signal)
        try:
            with services:
                made = services.begin("work pools", running("flows.pools"))
                _start_mlflow(services, options.mlflow_port, runs)
                _finish_pools(services, made)
                services.start("Prefect server", server_command(options.prefect_port), SERVER_SECONDS)
                services.wait_until(partial(answers, f"{prefect}/api/health"), "Prefect server")
                start.close()
                services.wait_until(partial(answers, f"{mlflow}/health"), "MLflow server")
                new_client = partial(_new_client, f"{prefect}/api", login)
                with new_client() as client:
                    unserved = _start_workers(services, client, new_client)
                    # Not the string itself: this output may be kept in a log.
                    say(
                        f"ready: Prefect {prefect}, MLflow {mlflow}\n"
                        f"in other terminals: export PREFECT_API_URL={prefect}/api PREFECT_API_AUTH_STRING={word} "
                        f"MLFLOW_TRACKING_URI={mlflow}\n"
                        "the password of Prefect's UI, there: echo $PREFECT_API_AUTH_STRING"
                    )
                    if waiting := unserved.deployments():
                        say(_elsewhere(waiting, prefect, mlflow))
                    wait(services, _look(client, unserved, runs, mlflow))
        except ServiceError as error:
            return stopped(str(error), ExitCode.FAILED)
        except Stopped as stop:
            return 128 + int(stop.args[0])


def _finish_pools(services: Services, made: Service) -> None:
    try:
        services.finish(made)
    except ServiceError as error:
        raise ServiceError(f"{error}; the database is {prefect_database()}") from error


def server_command(port: int) -> list[str]:
    return running("flows.prefect_server", "lasting", str(port))


def wait(services: Services, look: Callable[[], None]) -> NoReturn:
    """Until a signal comes or a service ends (errors: `Services.check`); meanwhile `look` every few seconds."""
    try:
        services.watch(look)
    except Stopped:
        say("stops; a training at work commits its step first, a second signal ends it at once")
        raise


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


def _start_mlflow(services: Services, port: int, runs: Path) -> None:
    from flows.tracking.store import artifact_root, default_tracking_uri, prepare_store, quiet_store_logs

    quiet_store_logs()
    places = ["--default-artifact-root", artifact_root(runs), "--no-serve-artifacts"]
    if not mlflow_has_database():
        store = default_tracking_uri(runs)
        prepare_store(store, runs)
        places += ["--backend-store-uri", store]
    # Artifacts lie where a training without a server puts them: a run may go on with a server or without.
    server = [*installed("mlflow"), "server", *places, "--workers", "1", *_HERE, str(port)]
    services.start("MLflow server", server, SERVER_SECONDS)


def _new_client(api: str, login: str) -> "SyncPrefectClient":
    from prefect.client.orchestration import SyncPrefectClient

    return SyncPrefectClient(api, auth_string=login, httpx_settings={"timeout": SERVER_SECONDS})


def _start_workers(
    services: Services, client: "SyncPrefectClient", new_client: Callable[[], "SyncPrefectClient"]
) -> "Unserved":
    """Deploy, and start a worker for each pool that this machine can serve; returns the others.

    `new_client` makes the client that reports what a worker leaves, when `client` is closed.
    """
    from flows import pools
    from flows.deployments import with_pauses_kept

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "prefect.yaml")
        file.write_text(with_pauses_kept(client, ROOT / "prefect.yaml"), "utf-8")
        deploy = [*installed("prefect"), "--no-prompt", "deploy", "--all", "--prefect-file", str(file)]
        services.finish(services.begin("prefect deploy", deploy))
    name = f"{socket.gethostname()}-{os.getpid()}"
    served, others = pools.of_this_machine()
    for pool in served:
        worker = [*installed("prefect"), *pools.worker_start(pool), "--name", name]
        services.start(f"worker of {pool}", worker, STEP_SECONDS, partial(_report_crashed, new_client))
        services.wait_until(partial(pools.is_polled, client, pool, name), f"worker of {pool}")
    return pools.Unserved(client, others)


def _look(client: "SyncPrefectClient", unserved: "Unserved", runs: Path, mlflow: str) -> Callable[[], None]:
    from flows.ended_trainings import EndedTrainings
    from flows.tracking.record import mark_dead
    from flows.tracking.store import default_tracking_uri

    ended = EndedTrainings(client)

    def look() -> None:
        unserved.tell()
        ended.look()
        for store in (mlflow, default_tracking_uri(runs)):
            mark_dead(runs, store)

    return look


def _report_crashed(new_client: Callable[[], "SyncPrefectClient"], worker: Service) -> None:
    """Tell Prefect that flow runs of a worker which was ended are over; nothing else would, for minutes."""
    if not worker.flow_runs:
        return
    from httpx import HTTPError
    from prefect.exceptions import PrefectException

    from flows.pools import crash

    try:
        with new_client() as client:
            crash(client, worker.flow_runs, "`fp8-grpo up` was stopped")
    except (HTTPError, PrefectException) as error:
        say(f"Prefect's server may show flow runs as running for some minutes: {first_line(error)}")


def _elsewhere(waiting: Sequence[str], prefect: str, mlflow: str) -> str:
    from flows.pools import GPU, worker_start

    ports = " ".join(f"-L {port}:127.0.0.1:{port}" for port in (url.rpartition(":")[2] for url in (prefect, mlflow)))
    return (
        f"this machine has no GPU for {', '.join(waiting)}: their runs wait in {GPU} for a worker\n"
        f"a worker, on a machine that has: ssh -N {ports} {socket.gethostname()} &\n"
        f"  PREFECT_API_URL={prefect}/api PREFECT_API_AUTH_STRING=... "
        f"PREFECT_FLOWS_HEARTBEAT_FREQUENCY={HEARTBEAT_SECONDS} MLFLOW_TRACKING_URI={mlflow} "
        f"prefect {' '.join(worker_start(GPU))}"
    )
