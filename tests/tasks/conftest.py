"""One MLflow store on sqlite for the tests of everything that writes to MLflow: its schema takes seconds to make."""

import io
import uuid
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest

from tasks.tracking import Tracker
from tasks.tracking_store import create_sqlite_store, default_tracking_uri, quiet_store_logs


class FreshStore(NamedTuple):
    runs: Path
    printed: str


@pytest.fixture(scope="session")
def fresh_store(tmp_path_factory: pytest.TempPathFactory) -> FreshStore:
    runs = tmp_path_factory.mktemp("runs")
    # What a kill in the middle of the schema's migrations leaves.
    (runs / "mlflow.db.new").write_bytes(b"torn")
    printed = io.StringIO()
    quiet_store_logs()
    with redirect_stdout(printed), redirect_stderr(printed):
        create_sqlite_store(runs / "mlflow.db")
    return FreshStore(runs, printed.getvalue())


@pytest.fixture
def runs(fresh_store: FreshStore) -> Path:
    return fresh_store.runs


@pytest.fixture
def open_tracker(runs: Path) -> Callable[..., Tracker]:
    """A new MLflow run, or that of a training which has one."""

    def open_it(training: str | None = None, experiment: str = "exp") -> Tracker:
        return Tracker.open(default_tracking_uri(runs), experiment, "tiny", runs, training or uuid.uuid4().hex)

    return open_it


@pytest.fixture
def tracker(open_tracker: Callable[..., Tracker]) -> Tracker:
    return open_tracker()
