"""Environment variables of a command, read and set before the libraries that read them are imported."""

import atexit
import fcntl
import logging
import os
import secrets
import shlex
import socket
import sys
import tempfile
import time
import urllib.request
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from fp8core.errors import UserError, first_line, last_words
from fp8core.processes.end_with_parent import TiedProcess, tied_module
from fp8core.processes.variables import set_variables

if TYPE_CHECKING:
    from fp8core.config.run import RunConfig
    from fp8core.kernels.compilation import KernelFolders

SERVER_SETTINGS = {
    # One transaction for many states of tasks: a server on SQLite refuses requests (503) that meet too many of them.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
}
"""Of every Prefect server that we start; docs/guides/operate.md has them for a user's own."""
OWN_UI = "http://127.0.0.1:4200"
"""Where `prefect server start` shows what the server of one training stores."""
_START_SECONDS = 180.0
NO_TELEMETRY = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
}
# No "Finished in state Completed()": the task's state shows it, and each log costs time in every step.
_QUIET_TASKS = {"PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL": "WARNING"}
_CLIENT_SETTINGS = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    **_QUIET_TASKS,
    # One line for each event that a server which is away does not get, and two for each part of the log.
    "PREFECT_INTERNAL_LOGGING_LEVEL": "CRITICAL",
    # A training that has ended would otherwise wait minutes for a server that is away.
    "PREFECT_CLIENT_MAX_RETRIES": "3",
    "PREFECT_API_REQUEST_TIMEOUT": "15",
}


def leave_working_directory_out() -> None:
    """Import nothing from the working directory, which may be a run's folder that somebody else wrote."""
    # Python's own switch (-P): neither the working directory nor a script's folder comes first on the path.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    here = Path.cwd()
    ours = Path(__file__).parents[1]
    sys.path[:] = [place for place in sys.path if Path(place).absolute() != here or here == ours]


def search_last(folder: Path) -> None:
    """Find modules of the user's own (`uses: mine:score`) in a folder, after the standard library and all packages."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def reach_this_machine() -> None:
    """Ask no proxy for the servers of this machine, which `fp8-grpo up` and trainings start."""
    # Libraries prefer the first, so both are one list.
    no_proxy = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(filter(None, [no_proxy, "127.0.0.1,localhost"]))


def make_prefect_home() -> None:
    """Prefect writes its profile and database below PREFECT_HOME and does not create the folder's parent."""
    _prefect_home().mkdir(parents=True, exist_ok=True)


def _prefect_home() -> Path:
    return Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()


def prefect_login() -> tuple[str, str]:
    """The authentication string of the Prefect server of `fp8-grpo up`, and a word of a shell that gives it."""
    if own := os.environ.get("PREFECT_SERVER_API_AUTH_STRING"):
        return own, '"$PREFECT_SERVER_API_AUTH_STRING"'
    path = _prefect_home() / "fp8-grpo-auth"
    if not path.exists():
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(f"{_new_login()}\n")
    return path.read_text("utf-8").strip(), f'"$(cat {shlex.quote(str(path.absolute()))})"'


def _new_login() -> str:
    return f"admin:{secrets.token_urlsafe(32)}"


def _guarded_server(login: str, origins: str) -> dict[str, str]:
    return {
        "PREFECT_SERVER_API_AUTH_STRING": login,
        "PREFECT_API_AUTH_STRING": login,
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": origins,
    }


class PrefectServer:
    """`prefect server start` for this process alone, with which it ends in every case."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.api = f"http://127.0.0.1:{port}/api"
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - open while the server lives
        words = ["server", "start", "--host", "127.0.0.1", "--port", str(port), "--no-ui"]
        environment = {**SERVER_SETTINGS, **os.environ}
        self._process = TiedProcess(tied_module("prefect", *words), self._output, environment=environment)

    def wait(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not answers(f"{self.api}/health"):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._output.seek(0)
                reason = last_words(self._output.read().decode(errors="replace"))
                raise UserError(f"Prefect's server for this training did not start: {reason}; see PREFECT_HOME")
            time.sleep(0.1)

    def stop(self) -> None:
        """End it and wait until it has stored what it received."""
        self._process.close_copy()
        self._process.wait()


def answers(url: str, seconds: float = 5.0) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=seconds) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def bound_mlflow_requests() -> None:
    """Once and for twenty seconds at most: MLflow repeats a request for minutes, and may create a run twice."""
    requests = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    # The console names the run's page itself, once.
    set_variables({}, {**requests, "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"})


def prepare_prefect(flow: str) -> None:
    """Reach the configured Prefect server, or start one for this process, before Prefect is imported.

    The module `flow` is imported meanwhile. Raises UserError: the server does not answer, or does not start.
    """
    make_prefect_home()
    # The terminal is left to our own lines; Prefect's log still reaches its server and its UI.
    logging.raiseExceptions = False
    set_variables({}, _CLIENT_SETTINGS)
    reach_this_machine()
    # Imported here, because Prefect reads its settings once, when it is imported.
    from prefect.context import refresh_global_settings_context
    from prefect.settings import get_current_settings

    if get_current_settings().api.url is not None:
        _check_server()
        import_module(flow)
        return
    with (_prefect_home() / "fp8-grpo-start.lock").open("ab") as lock:
        # Two servers that start at once would both make the tables of a new database.
        fcntl.flock(lock, fcntl.LOCK_EX)
        # No page of a browser sends its requests, and a client may be set to send no tokens.
        os.environ["PREFECT_SERVER_CSRF_PROTECTION_ENABLED"] = "false"
        os.environ.update(_guarded_server(_new_login(), origins=""))
        server = PrefectServer()
        os.environ["PREFECT_API_URL"] = server.api
        os.environ["PREFECT_UI_URL"] = OWN_UI
        refresh_global_settings_context()
        # Prefect sends its last events when Python exits; a function registered before those is called after them.
        atexit.register(server.stop)
        import_module(flow)
        server.wait()


def _check_server() -> None:
    from httpx import HTTPStatusError
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        problem = client.api_healthcheck()
        if problem is None:
            try:
                # Prefect's server answers any other path with a page of its UI.
                client.read_flows(limit=1)
            except (HTTPStatusError, ValueError) as error:
                problem = error
        if problem is not None:
            raise UserError(
                f"Prefect's server at {client.api_url} does not answer this client ({first_line(problem)}): start it "
                "with `prefect server start`, set PREFECT_API_URL (it ends in /api) and PREFECT_API_AUTH_STRING as "
                "`fp8-grpo up` prints them, or unset PREFECT_API_URL to have one started for the run"
            )


def program(name: str) -> str:
    """The word of a shell that runs a program of this Python's environment."""
    return shlex.quote(str(Path(sys.executable).with_name(name)))


def is_set(variable: str) -> bool:
    return variable in os.environ


def set_engine_variables(config: "RunConfig") -> None:
    """Set what the configuration's engine and trainer read. Raises UserError: the engine is not available."""
    if config.cluster.address is not None:
        return
    from fp8core.config.capability import this_node
    from fp8core.run.build import engine_environment
    from fp8core.training.registry import packages_of

    environment = engine_environment(config, this_node(packages_of(config)))
    set_variables(environment.required, environment.suggested)


def kernel_folders() -> "KernelFolders":
    """Where this process and those that it starts keep compiled kernels, once `set_engine_variables` was called."""
    from fp8core.kernels.compilation import KernelFolders

    home = Path.home()
    triton = Path(os.environ.get("TRITON_HOME", home)) / ".triton" / "cache"
    return KernelFolders(
        deep_gemm=Path(os.environ.get("DG_JIT_CACHE_DIR", home / ".deep_gemm")),
        triton=Path(os.environ.get("TRITON_CACHE_DIR", triton)),
    )


def service_environment(prefect_port: int, mlflow_port: int, login: str) -> dict[str, str]:
    """Environment of the servers and workers of `fp8-grpo up`, and of the trainings they start.

    PREFECT_SERVER_DATABASE_CONNECTION_URL and MLFLOW_BACKEND_STORE_URI, the servers' own variables, are passed on.
    """
    pages = (f"http://{host}:{prefect_port}" for host in ("127.0.0.1", "localhost"))
    search_path = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **SERVER_SETTINGS,
        # A worker looks for runs more often than once in 15 seconds.
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        **NO_TELEMETRY,
        # `prefect deployment run --watch` prints the log as it comes, and stops three seconds after the end.
        "PREFECT_SERVER_LOGS_STREAM_OUT_ENABLED": "true",
        "PREFECT_SERVER_LOGS_STREAM_PUBLISHING_ENABLED": "true",
        "PREFECT_LOGGING_TO_API_BATCH_INTERVAL": "0.5",
        **_QUIET_TASKS,
        # Background work of MLflow that no training uses.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        **os.environ,
        "PREFECT_API_URL": f"http://127.0.0.1:{prefect_port}/api",
        # The UI calls that address, from the page that it has by either name.
        **_guarded_server(login, origins=",".join(pages)),
        "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{mlflow_port}",
        # A worker's training finds the flows, and steps of the user's own, by the names of their modules.
        "PYTHONPATH": os.pathsep.join(search_path),
        # Workers start trainings with `python -m`, which would search the folder they are in before all else.
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
    }
