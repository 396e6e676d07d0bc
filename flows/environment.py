"""The one place that reads and sets environment variables, before Prefect is imported."""

import os
from pathlib import Path


def quiet_prefect_console() -> None:
    """Leave the terminal to our own lines; Prefect's logs still reach its server and its UI."""
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")


def wait_for_prefect() -> None:
    """Give the server that Prefect starts for this process time on a busy machine; 20 seconds are its default."""
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "180")


def make_prefect_home() -> None:
    """Prefect writes its profile and database below PREFECT_HOME and does not create the folder's parent."""
    Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser().mkdir(parents=True, exist_ok=True)


def prefect_server() -> str | None:
    """Address of the Prefect server in use; None when one is started for this process alone."""
    return os.environ.get("PREFECT_API_URL")
