"""MLflow's store of runs: which one a run's folder or a user names, made when it is missing, and its errors as ours."""

import fcntl
import http.client
import json
import logging
import os
import re
import shlex
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from flows.environment import program
from flows.tracking.tracker import Outage
from fp8core.durable import PRIVATE, make_folder
from fp8core.errors import UserError, first_line, without_passwords

SERVER_TIMEOUT_SECONDS = 10.0
# The last is an answer that is none of MLflow's, as a proxy's empty body.
STORE_ERRORS = (MlflowException, SQLAlchemyError, OSError, json.JSONDecodeError)


def quiet_store_logs() -> None:
    """Show warnings and errors only of MLflow and of its schema migrations (alembic), which log each table change."""
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # An outage is an exception, which the caller reports in a line; here it is a traceback, or a line a sample.
    for name in ("mlflow.store.db.utils", "mlflow.system_metrics"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def default_tracking_uri(runs: Path) -> str:
    return f"sqlite:///{runs.absolute() / 'mlflow.db'}"


def resolve_tracking_uri(configured_uri: str | None, runs: Path) -> str:
    return named_store(configured_uri) or default_tracking_uri(runs)


def named_store(configured_uri: str | None) -> str | None:
    """The URI that the user's configuration names, else the one of MLFLOW_TRACKING_URI; None: neither does."""
    return configured_uri or (mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else None)


def store_of_folder(stored_uri: str | None, folder: Path, configured_uri: str | None = None) -> str:
    """The store of a run whose folder names one (`stored_uri`, without a password).

    The folder may be somebody else's: MLflow would send the user's credentials to a server of theirs, and write into
    any database. So a store is used that the user names, or the one beside the folder. Raises UserError: the folder
    names another store.
    """
    store = named_store(configured_uri)
    beside = default_tracking_uri(folder.absolute().parent)
    if store is not None and (configured_uri is not None or stored_uri != beside):
        return store
    is_gone = (
        stored_uri is not None
        and stored_uri.startswith("sqlite:///")
        and not Path(stored_uri[len("sqlite:///") :]).exists()
    )
    if stored_uri in (None, beside) or is_gone:
        return beside
    raise UserError(
        f"tracking.uri {without_passwords(str(stored_uri))}: only the run's folder {folder} names this store: if you "
        "trust it with what MLflow sends, name it in MLFLOW_TRACKING_URI or tracking.uri (with its password, which no "
        "run stores)"
    )


def check_artifact_place(uri: str, run: Run, configured_uri: str | None) -> None:
    """Raises UserError: a local store that the user does not name, maybe a stranger's, names a server for artifacts."""
    place = run.info.artifact_uri
    if uri.startswith("sqlite") and named_store(configured_uri) is None and urlsplit(place).scheme not in ("", "file"):
        raise UserError(
            f"tracking.uri {without_passwords(uri)}: puts the artifacts of run {run.info.run_id} at "
            f"{without_passwords(place)}: if you trust this store, name it in MLFLOW_TRACKING_URI or tracking.uri"
        )


def ui_command(uri: str) -> str | None:
    """The shell command that starts the MLflow UI on the store at `uri`; None: a server has it at its address."""
    if is_server(uri):
        return None
    return f"{program('mlflow')} ui --backend-store-uri {shlex.quote(without_passwords(uri))}"


def public_address(server: str) -> str:
    """The address of a server without the name and password that it may hold."""
    return re.sub(r"^(https?://)[^/?#]*@", r"\1", server).rstrip("/")


def is_server(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


def prepare_store(uri: str, runs: Path) -> MlflowClient:
    """A client of a store; a missing sqlite store is made. Raises UserError, and OSError as `existing_store`."""
    if uri.startswith("sqlite"):
        database = make_url(uri).database
        if not database or database == ":memory:":
            raise UserError(f"tracking.uri {without_passwords(uri)}: name a file, as in {default_tracking_uri(runs)}")
        create_sqlite_store(Path(database))
    return existing_store(uri)


def existing_store(uri: str) -> MlflowClient:
    """A client of a store that is there: MLflow would make a missing database. Raises OSError: it does not answer."""
    if is_server(uri):
        _ask_for_life(uri)
    elif uri.startswith("sqlite") and not Path(make_url(uri).database or "").is_file():
        raise FileNotFoundError("there is no such database")
    return MlflowClient(tracking_uri=uri)


def create_sqlite_store(database: Path) -> None:
    """Create MLflow's schema at `database` unless the file exists.

    The schema is made in a file of its own and renamed: a kill in the middle of MLflow's migrations leaves no half.
    """
    make_folder(database.parent, PRIVATE)
    with open(database.with_name(f"{database.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if database.exists():
            return
        fresh = database.with_name(f"{database.name}.new")
        fresh.unlink(missing_ok=True)
        MlflowClient(tracking_uri=f"sqlite:///{fresh}").search_experiments()
        os.replace(fresh, database)


def get_or_create_experiment(client: MlflowClient, uri: str, name: str, runs: Path) -> str:
    """The id of an experiment; `runs` takes its artifacts, unless `uri` is a server. Several processes may call it."""
    if client.get_experiment_by_name(name) is None:
        # MLflow might show its pages for agents.
        tags = {"mlflow.experimentKind": "custom_model_development"}
        try:
            client.create_experiment(name, None if is_server(uri) else artifact_root(runs), tags)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
    experiment = client.get_experiment_by_name(name)
    assert experiment is not None, f"experiment {name} exists and cannot be found"
    return str(experiment.experiment_id)


def artifact_root(runs: Path) -> str:
    return (runs.absolute() / "mlartifacts").as_uri()


def check_server(configured_uri: str | None) -> None:
    """Raises UserError: the user names a server (`named_store`), and none answers. No store is made."""
    uri = named_store(configured_uri)
    if uri is None or not is_server(uri):
        return
    try:
        with store_errors(uri):
            _ask_for_life(uri)
    except Outage as error:
        raise UserError(str(error)) from error


def _ask_for_life(server: str) -> None:
    """Raises OSError within seconds where MLflow's own requests may take minutes."""
    try:
        urllib.request.urlopen(f"{public_address(server)}/health", timeout=SERVER_TIMEOUT_SECONDS).close()
    except urllib.error.HTTPError:
        return  # Something answers; the first request shows if it is MLflow and admits us.
    except (urllib.error.URLError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConnectionError(f"no server answers there ({getattr(reason, 'strerror', None) or reason})") from error


@contextmanager
def store_errors(uri: str) -> Iterator[None]:
    """Errors of MLflow's client in the block become Outage."""
    try:
        yield
    except STORE_ERRORS as error:
        raise Outage(without_passwords(f"tracking.uri {uri}: {first_line(error)}")) from error
