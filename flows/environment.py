"""Prefect's surroundings. The one place that reads and sets environment variables, before Prefect is imported."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fp8core.errors import UserError


def quiet_prefect_console() -> None:
    """Leave the terminal to our own lines; Prefect's logs still reach its server and its UI."""
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")


def wait_for_prefect() -> None:
    """Give the server that Prefect starts for this process time on a busy machine; 20 seconds are its default."""
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "180")


def make_prefect_home() -> Path:
    """Prefect writes its profile and database below PREFECT_HOME and does not create the folder's parent."""
    home = Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser().absolute()
    home.mkdir(parents=True, exist_ok=True)
    return home


def start_prefect(output: Path) -> None:
    """Reach the configured Prefect server, or start one for this process, which writes to `output`.

    Raises:
        UserError: the configured server does not answer.
    """
    # Imported here, because Prefect reads its settings once, when it is imported.
    from prefect.client.orchestration import get_client

    with _without_interrupts(), _output_to(output), get_client(sync_client=True) as client:
        problem = client.api_healthcheck()
    if problem is not None:
        raise UserError(
            f"Prefect's server at {client.api_url} does not answer ({problem}): "
            "start it with `prefect server start`, or unset PREFECT_API_URL to have one started for the run"
        )


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


@contextmanager
def _output_to(file: Path) -> Iterator[None]:
    """Processes that are started inside write there.

    A pipe that we write to ends for its reader when we end, and not when Prefect's server does.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    before = os.dup(1), os.dup(2)
    with file.open("ab") as target:
        os.dup2(target.fileno(), 1)
        os.dup2(target.fileno(), 2)
    try:
        yield
    finally:
        for ours, theirs in zip(before, (1, 2), strict=True):
            os.dup2(ours, theirs)
            os.close(ours)
