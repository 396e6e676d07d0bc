"""The one place that reads and sets environment variables, before what reads them is imported.

Prefect reads its own once, when it is imported; MLflow at every request; an engine when it is imported.
"""

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fp8core.errors import UserError


def quiet_prefect_console() -> None:
    """Leave the terminal to our own lines; Prefect's logs still reach its server and its UI."""
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")


def wait_for_prefect() -> None:
    """Give the server that Prefect starts for this process time on a busy machine; 20 seconds are its default."""
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "180")


def make_prefect_home() -> None:
    """Prefect writes its profile and database below PREFECT_HOME and does not create the folder's parent."""
    Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser().mkdir(parents=True, exist_ok=True)


def bound_mlflow_requests() -> None:
    """A request to MLflow takes half a minute at most, and is made once.

    MLflow by itself repeats a request for minutes, and after a lost answer creates the same run twice. Here who
    publishes tries again, and knows what was created.
    """
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    # The console names the run's page itself, once.
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")


def start_prefect() -> None:
    """Reach the configured Prefect server, or start one for this process.

    Raises:
        UserError: the configured server does not answer.
    """
    # Imported here, because Prefect reads its settings once, when it is imported.
    from prefect.client.orchestration import get_client

    with _without_interrupts(), get_client(sync_client=True) as client:
        problem = client.api_healthcheck()
    if problem is not None:
        raise UserError(
            f"Prefect's server at {client.api_url} does not answer ({problem}): "
            "start it with `prefect server start`, or unset PREFECT_API_URL to have one started for the run"
        )


def set_variables(required: Mapping[str, str], suggested: Mapping[str, str]) -> None:
    """Set what a rollout engine reads when it is imported; of what is only suggested, a user's own values stay."""
    os.environ.update(required)
    for name, value in suggested.items():
        os.environ.setdefault(name, value)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes that are started inside never see Ctrl-C.

    A terminal sends it to every process of the command, and Prefect's server must live to hear how the run ended.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
