"""MLflow's store of runs, made when it is missing, and the experiment in it."""

import errno
import fcntl
import http.client
import json
import logging
import os
import re
import shlex
import shutil
import sqlite3
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from mlflow.utils.file_utils import local_file_uri_to_path
from requests import HTTPError
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError

from flows.tracking.metric_names import ACCURACY, ERROR, K3, MEAN_REWARD
from fp8core.durable import PRIVATE, make_folder, sole_file
from fp8core.errors import UserError, first_line, without_passwords

SERVER_TIMEOUT_SECONDS = 10.0
_DEFAULT = "mlflow.db"
_DATABASES = ("postgresql", "mysql", "mssql")
# All that MLflow's client raises; the last is an answer that is none of MLflow's, as a proxy's empty body.
STORE_ERRORS = (MlflowException, SQLAlchemyError, OSError, json.JSONDecodeError)
# MLflow's errors for a server that cannot be reached or is overloaded, and for a database that is locked or away.
_PASSING_CODES = {
    "INTERNAL_ERROR",
    "TEMPORARILY_UNAVAILABLE",
    "IO_ERROR",
    "SERVICE_UNDER_MAINTENANCE",
    "WORKSPACE_TEMPORARILY_UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "RESOURCE_EXHAUSTED",
    "REQUEST_LIMIT_EXCEEDED",
    "COULD_NOT_ACQUIRE_LOCK",
}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_PASSING_STATUS = {408, 429}
_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}
_UNAUTHORISED_STATUS = {401, 403}
_KIND, _TRAINING = "mlflow.experimentKind", "custom_model_development"
_NOTE = "mlflow.note.content"
# MLflow keeps chosen columns in a browser. Its button "share view" makes a tag of the experiment, and a link.
_VIEW_NAME = "fp8-grpo"
_VIEW = f"mlflow.sharedViewState.{_VIEW_NAME}"


def quiet_store_logs() -> None:
    """Show warnings and errors only of MLflow and of its schema migrations (alembic), which log each table change."""
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # A database that is locked or away is an exception, which the caller reports in a line; here it is a traceback.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)


def default_tracking_uri(runs: Path) -> str:
    """The sqlite store beside the run folders.

    Raises UserError: the path has a character that MLflow and SQLAlchemy read differently in a URI.
    """
    path = runs.absolute() / _DEFAULT
    if set("%?") & set(str(path)):
        raise UserError(f"runs {runs.absolute()}: the sqlite store cannot be below a folder with % or ? in its name")
    return f"sqlite:///{path}"


def resolve_tracking_uri(configured: str | None, runs: Path) -> str:
    return named_store(configured) or default_tracking_uri(runs)


def named_store(configured: str | None) -> str | None:
    """The URI that the user's configuration names, else the one of MLFLOW_TRACKING_URI; None: neither does.

    Raises UserError: its password could not be told from the text around it.
    """
    named = configured or (mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else None)
    if named is not None and re.search(r"://[^/@]*:[^@]*\s[^@]*@", named):
        raise UserError("tracking.uri: has a blank in its password; write it as %20")
    return named


def store_of_folder(stored: str | None, folder: Path, lay_at: str | None, configured: str | None = None) -> str:
    """The store of a run, with its password, where the run's folder names one (`stored`, without a password).

    The folder may be somebody else's: MLflow would send the user's credentials to a server of theirs, and write into
    any database. So a store is used that the user names (`configured`), or a sqlite file below the folder of runs. One
    beside `lay_at`, where the folder lay when `stored` was written, may have been moved with it. Raises UserError: the
    folder names another store.
    """
    named, runs = named_store(configured), folder.absolute().parent
    if stored is None and named is not None:
        return named
    if named is not None and stored is not None and _one_server(_shown(named), stored.rstrip("/")):
        return named
    beside = runs / _DEFAULT
    file = beside if stored is None else _sqlite_file(stored)
    if file is not None:
        moved = lay_at is not None and file == Path(lay_at).parent / _DEFAULT and beside.is_file()
        missing = not os.path.exists(file)  # False too for what cannot be looked at.
        if missing and named is not None:
            return named
        if moved or missing:
            file = beside
        if file.resolve().is_relative_to(runs.resolve()):
            return default_tracking_uri(runs) if file == beside else str(stored)
    place = f"sqlite:///{beside}" if stored is None else without_passwords(stored)
    raise UserError(
        f"tracking.uri {place}: only the run's folder {folder} names this store: if you trust it with what MLflow "
        "sends, name it in MLFLOW_TRACKING_URI or tracking.uri (with its password, which no run stores)"
    )


def refuse_strange_artifacts(uri: str, run: Run, configured: str | None) -> None:
    """Let a local store that the user does not name put files into folders of its runs only.

    The store may be a stranger's, as the folder, and holds the places of its runs' artifacts. A place may be a server,
    which MLflow would send the user's credentials, or a link to a file of the user's.

    Raises:
        UserError: the artifacts of `run` lie elsewhere.
    """
    named = named_store(configured)
    if not uri.startswith("sqlite") or (named is not None and _shown(named) == _shown(uri)):
        return
    place = run.info.artifact_uri
    if urlsplit(place).scheme in ("", "file"):
        folder = Path(local_file_uri_to_path(place)).resolve()
        own = folder.parts[-2:] == (run.info.run_id, "artifacts")
        if own and not any(path.is_symlink() for path in folder.rglob("*")):
            return
    raise UserError(
        f"tracking.uri {_shown(uri)}: puts the artifacts of run {run.info.run_id} at {without_passwords(place)}: if "
        "you trust this store, name it in MLFLOW_TRACKING_URI or tracking.uri"
    )


def _shown(uri: str) -> str:
    return without_passwords(uri).rstrip("/")


def _one_server(named: str, stored: str) -> bool:
    """True if both are one address, or ports of this machine: `fp8-grpo up` may serve a store at another one today."""
    if named == stored:
        return True
    try:
        ours, theirs = (urlsplit(uri) for uri in (named, stored))
        both_here = is_server(named) and ours.hostname in _LOOPBACK and theirs.hostname in _LOOPBACK
        return both_here and (ours.scheme, ours.path) == (theirs.scheme, theirs.path)
    except ValueError:
        return False


def _sqlite_file(uri: str) -> Path | None:
    """The file of a sqlite URI without options, by its absolute path; None for any other."""
    path = uri.removeprefix("sqlite:///")
    return Path(path) if path != uri and path.startswith("/") and not set("%?") & set(path) else None


def is_missing(uri: str) -> bool:
    return uri.startswith("sqlite") and not Path(make_url(uri).database or "").is_file()


def ui_command(uri: str) -> str | None:
    """The shell command that starts the MLflow UI on the store at `uri`; None: a server has it at its address."""
    if is_server(uri):
        return None
    beside_python = Path(sys.executable).with_name("mlflow")
    on_path = shutil.which("mlflow")
    program = "mlflow" if on_path is not None and Path(on_path) == beside_python else str(beside_python)
    return f"{shlex.quote(program)} ui --backend-store-uri {shlex.quote(without_passwords(uri))}"


def public_address(server: str) -> str:
    """The address of a server without the name and password that it may hold."""
    return re.sub(r"^(https?://)[^/?#]*@", r"\1", server)


def is_server(uri: str) -> bool:
    """True if the store is behind an MLflow server, which keeps artifacts as well."""
    return uri.startswith(("http://", "https://"))


def prepare_store(uri: str, runs: Path) -> None:
    """Create a missing sqlite store; check that a server answers.

    Raises:
        UserError: `uri` is a sqlite store without a file.
        OSError: the server does not answer, or the disk refuses the file.
    """
    if is_server(uri):
        _ask_for_life(uri)
    elif uri.startswith("sqlite"):
        database = make_url(uri).database
        if not database or database == ":memory:":
            raise UserError(f"tracking.uri {without_passwords(uri)}: name a file, as in {default_tracking_uri(runs)}")
        create_sqlite_store(Path(database))


def create_sqlite_store(database: Path) -> None:
    """Create MLflow's schema at `database` unless the file exists.

    The schema is made in a file of its own and renamed. So a kill in the middle leaves no half-migrated store, and a
    second process meets none (MLflow's own creation is neither locked nor atomic).
    """
    make_folder(database.parent, PRIVATE)
    # The folder may be a stranger's: what a link names is left alone.
    place = database.with_name(f"{database.name}.lock")
    with open(place, "w", opener=sole_file) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if database.exists():
            return
        fresh = database.with_name(f"{database.name}.new")
        fresh.unlink(missing_ok=True)
        SqlAlchemyStore(f"sqlite:///{fresh}", artifact_root(database.parent)).engine.dispose()
        os.replace(fresh, database)


def client_of_existing_store(uri: str) -> MlflowClient:
    """A client of a server or a database that is a store already: MLflow makes one of any other database or folder.

    Raises OSError: there is none, or the server does not answer.
    """
    if is_server(uri):
        _ask_for_life(uri)
    elif uri.startswith("sqlite"):
        if is_missing(uri):
            raise FileNotFoundError("there is no such database")
        _refuse_other_database(Path(make_url(uri).database or ""))
    elif not uri.startswith(_DATABASES):
        raise FileNotFoundError("neither a server nor a database")
    return MlflowClient(tracking_uri=uri)


def _refuse_other_database(path: Path) -> None:
    """Raises FileNotFoundError: a file is no store of MLflow."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            database.execute("select 1 from alembic_version, experiments limit 1").fetchone()
    except sqlite3.OperationalError as error:
        if "locked" not in str(error):
            raise FileNotFoundError(f"not a store of MLflow: {error}") from error
    except sqlite3.DatabaseError as error:
        raise FileNotFoundError(f"not a store of MLflow: {error}") from error


def get_or_create_experiment(client: MlflowClient, uri: str, name: str, runs: Path) -> str:
    """The id of an experiment; several processes may request a new one at once.

    `runs` takes the artifacts of a new experiment (`mlartifacts`), unless `uri` is a server, which keeps them itself.

    It opens in MLflow's pages for training, not in those for agents, unless somebody has chosen others. Its note leads
    to the list of runs with their headline metrics as columns.

    Raises:
        UserError: the experiment is deleted.
    """
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            place = None if is_server(uri) else artifact_root(runs)
            made = client.create_experiment(name, artifact_location=place, tags={_KIND: _TRAINING})
            return _with_view(client, made, {})
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        experiment = client.get_experiment_by_name(name)
        assert experiment is not None, f"experiment {name} exists and cannot be found"
    if experiment.lifecycle_stage != "active":
        place = without_passwords(uri)
        raise UserError(f"tracking.experiment {name} is deleted in {place}: restore it or set another name")
    if "inferred" in experiment.tags.get(_KIND, "inferred"):  # MLflow's UI guesses the kind from what it finds.
        _set_tag(client, experiment.experiment_id, _KIND, _TRAINING)
    return _with_view(client, experiment.experiment_id, experiment.tags)


def _with_view(client: MlflowClient, experiment: str, tags: Mapping[str, str]) -> str:
    columns = [
        *(f"metrics.`{name}`" for name in (MEAN_REWARD, ACCURACY, ERROR, K3)),
        "tags.`config`",
        "tags.`precision`",
    ]
    state = json.dumps({"selectedColumns": [*columns, "tags.`bounds`"], "orderByKey": "attributes.start_time"})
    link = f"#/experiments/{experiment}/runs?viewStateShareKey={_VIEW_NAME}&workflowType=machine_learning"
    if tags.get(_VIEW) != state:
        _set_tag(client, experiment, _VIEW, state)
    if _NOTE not in tags:
        _set_tag(client, experiment, _NOTE, f"[Runs with reward, held-out accuracy, error - 1 and k3]({link})")
    return experiment


def _set_tag(client: MlflowClient, experiment: str, key: str, value: str) -> None:
    """Two processes may set the same tag of a new experiment at once: the store then refuses the later of them."""
    try:
        client.set_experiment_tag(experiment, key, value)
    except MlflowException:
        if client.get_experiment(experiment).tags.get(key) != value:
            raise


def _ask_for_life(server: str) -> None:
    """Raises OSError within seconds where MLflow's own requests may take minutes."""
    try:
        address = f"{public_address(server).rstrip('/')}/health"
        urllib.request.urlopen(address, timeout=SERVER_TIMEOUT_SECONDS).close()
    except urllib.error.HTTPError:
        return  # Something answers; the first request shows if it is MLflow and admits us.
    except urllib.error.URLError as error:
        why = getattr(error.reason, "strerror", None) or error.reason
        raise ConnectionError(f"no server answers there ({why})") from error
    except (http.client.HTTPException, ValueError) as error:
        raise ConnectionError(f"no server of MLflow answers there ({error})") from error


def refuse_silence(configured: str | None) -> None:
    """Raises UserError: the user names a server (`named_store`), and none answers. No store is made."""
    uri = named_store(configured)
    if uri is None or not is_server(uri):
        return
    try:
        with store_errors(uri):
            _ask_for_life(uri)
    except Outage as error:
        raise UserError(str(error)) from error


def artifact_root(runs: Path) -> str:
    return (runs.absolute() / "mlartifacts").as_uri()


class Outage(RuntimeError):
    """A service does not answer, or answers that it cannot at the moment; one line."""

    @property
    def shown(self) -> str:
        """Words for the console, after the name of the service."""
        return "does not answer"


class Unwritable(Outage):
    """A disk or folder of this machine takes nothing at the moment; one line."""

    @property
    def shown(self) -> str:
        return f"cannot write ({self})"


class Lost(Outage):
    """The store confirmed what it does not hold; one line."""

    @property
    def shown(self) -> str:
        return f"lost what it confirmed ({self})"


class Refusal(UserError):
    """The store refuses a request; one line. A training that has begun goes on without the store."""

    @property
    def shown(self) -> str:
        return f"refuses a request ({self})"


class Unauthorised(Refusal):
    """The store does not accept the credentials, or their user lacks a right."""

    @property
    def shown(self) -> str:
        return f"{super().shown}: renew the credentials, or the user's rights in the store"


@contextmanager
def store_errors(uri: str) -> Iterator[None]:
    """Errors of MLflow's client in the block as ours.

    Raises:
        Outage: trying again later may help.
        Refusal: it helps only when somebody changes the store or the credentials.
    """
    try:
        yield
    except STORE_ERRORS as error:
        raise _kind(error)(without_passwords(f"tracking.uri {uri}: {cause_line(error)}")) from error


def cause_line(error: Exception) -> str:
    """The first line of an error, or of the database's own behind it.

    SQLAlchemy may put a line about its flush before it, and MLflow repeats that.
    """
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, DBAPIError) and behind.orig is not None:
            return first_line(behind.orig)
        behind = behind.__cause__ or behind.__context__
    return first_line(error)


def _kind(error: Exception) -> type[Outage | Refusal]:
    match error:
        case MlflowException():
            passes, status = error.error_code in _PASSING_CODES, error.get_http_status_code()
        case HTTPError() if error.response is not None:
            status = error.response.status_code
            passes = status >= 500 or status in _PASSING_STATUS
        case SQLAlchemyError():
            passes, status = isinstance(error, OperationalError), None
        case OSError() if error.errno in _UNWRITABLE:
            return Unwritable
        case _:
            passes, status = not isinstance(error, FileNotFoundError), None
    if passes:
        return Outage
    return Unauthorised if status in _UNAUTHORISED_STATUS else Refusal
