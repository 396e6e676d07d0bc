import logging
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import BAD_REQUEST
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

from flows.tracking.store import (
    Refusal,
    create_sqlite_store,
    default_tracking_uri,
    resolve_tracking_uri,
    store_of_folder,
    ui_command,
)
from flows.tracking.tracker import Tracker
from fp8core.errors import UserError


def test_an_experiment_that_another_process_has_just_created_is_taken(
    open_tracker: Callable[[], Tracker], tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = MlflowClient.get_experiment_by_name
    answers = iter([None])
    monkeypatch.setattr(
        MlflowClient, "get_experiment_by_name", lambda self, name: next(answers, found(self, name)), raising=True
    )
    assert open_tracker().experiment_id == tracker.experiment_id


def test_a_tag_that_another_process_sets_at_the_same_moment_is_taken(
    open_tracker: Callable[..., Tracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_tag = MlflowClient.set_experiment_tag

    def lose_the_race(client: MlflowClient, experiment: str, key: str, value: str) -> None:
        set_tag(client, experiment, key, value)
        refuse()

    def refuse(*_: object) -> None:
        raise MlflowException("UNIQUE constraint failed: experiment_tags.key", BAD_REQUEST)

    monkeypatch.setattr(MlflowClient, "set_experiment_tag", lose_the_race)
    tracker = open_tracker(experiment="raced")
    assert "Runs with reward" in tracker.client.get_experiment(tracker.experiment_id).tags["mlflow.note.content"]
    monkeypatch.setattr(MlflowClient, "set_experiment_tag", refuse)
    with pytest.raises(Refusal, match="UNIQUE"):
        open_tracker(experiment="refused")


def test_a_store_is_made_without_noise_over_the_remains_of_a_kill(fresh_store: Any) -> None:
    assert fresh_store.printed == ""
    assert not (fresh_store.runs / "mlflow.db.new").exists()
    assert logging.getLogger("mlflow.store.tracking").getEffectiveLevel() == logging.WARNING


def test_a_store_that_exists_is_not_made_again(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr(SqlAlchemyStore, "__init__", refuse)
    create_sqlite_store(runs / "mlflow.db")


@pytest.mark.slow
def test_processes_that_open_a_fresh_store_at_once_share_it(tmp_path: Path) -> None:
    program = (
        "import sys, uuid; from pathlib import Path; from flows.tracking.tracker import Tracker;"
        "from flows.tracking.store import default_tracking_uri; runs = Path(sys.argv[1]);"
        "print(Tracker.open(default_tracking_uri(runs), 'exp', 'tiny', runs, uuid.uuid4().hex).experiment_id)"
    )
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", program, str(tmp_path)]
    children = [subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    experiments = [child.communicate()[0] for child in children]
    assert [child.returncode for child in children] == [0] * 3
    assert len(set(experiments)) == 1
    with sqlite3.connect(tmp_path / "mlflow.db") as connection:
        assert connection.execute("select count(*) from runs").fetchone() == (3,)


def test_the_store_is_the_configured_one_else_mlflows_else_beside_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    # A server in this process, which other tests have, sets one.
    monkeypatch.setattr("mlflow.tracking._tracking_service.utils._tracking_uri", None)
    assert resolve_tracking_uri(None, tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert resolve_tracking_uri(None, tmp_path) == "http://tracking:5000"
    assert resolve_tracking_uri("sqlite:///x.db", tmp_path) == "sqlite:///x.db"
    for name in ("a%20b", "what?"):
        with pytest.raises(UserError, match="% or \\?"):
            default_tracking_uri(tmp_path / name)


def test_the_ui_command_is_one_that_a_shell_can_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside_python = Path(sys.executable).with_name("mlflow")
    uri = default_tracking_uri(tmp_path / "my runs")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ui_command(uri) == f"{beside_python} ui --backend-store-uri '{uri}'"
    monkeypatch.setenv("PATH", str(beside_python.parent))
    assert ui_command(uri) == f"mlflow ui --backend-store-uri '{uri}'"
    assert ui_command("http://tracking:5000") is None


@pytest.mark.parametrize(
    ("stored", "found"),
    [
        ("http://localhost:5000", True),
        ("http://127.0.0.1:5000/other", False),
        ("http://example.com:5001", False),
        ("http://[x", False),
    ],
)
def test_a_store_at_another_port_of_this_machine_is_the_one_that_the_user_names(stored, found, tmp_path) -> None:
    """`fp8-grpo up` has it at another one today; nothing is sent to an address that the user does not name."""
    ours = "http://127.0.0.1:5001"
    if found:
        assert store_of_folder(stored, tmp_path / "run", None, ours) == ours
    else:
        with pytest.raises(UserError, match="only the run's folder"):
            store_of_folder(stored, tmp_path / "run", None, ours)
