"""A folder that somebody else wrote names no store of theirs, and no password is stored."""

import io
import json
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from flows.cli import main
from flows.run_lookup import load_settings
from flows.tracking.record import mark_dead, read_record, write_record
from flows.tracking.session import open_session
from flows.tracking.store import default_tracking_uri, store_of_folder
from fp8core.errors import UserError
from fp8core.report.console import Console

SECRET = "the-users-token"


class Decoy(BaseHTTPRequestHandler):
    """A stranger's server: it notes who asks."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(f"{self.path} {self.headers.get('Authorization')}")
        self.send_response(404)
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def decoy(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a stranger's server, in an environment with a token for the user's own."""
    monkeypatch.setattr(Decoy, "asked", [])
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", SECRET)
    server = HTTPServer(("127.0.0.1", 0), Decoy)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def no_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def resume(folder: Path, *overrides: str) -> None:
    """As `fp8-grpo resume`, without Prefect."""
    config = load_settings(str(folder), list(overrides))
    with open_session(config, folder.name, Console(io.StringIO(), config.steps), {}) as session:
        session.follow_ledger()


ROUTES: dict[str, Callable[[Path], Any]] = {
    "resume": resume,
    "verify": lambda folder: main(["verify", str(folder)]),
    "evaluate": lambda folder: store_of_folder(read_record(folder).mlflow.uri, folder),
    "neighbour": lambda folder: mark_dead(folder.parent, default_tracking_uri(folder.parent)),
}
GO_ON = ("verify", "neighbour")


def named_by(folder: Path, uri: str) -> None:
    """Let a folder name a store everywhere, as a stranger's would."""
    described = json.loads((folder / "run.json").read_bytes())
    described["config"]["tracking"]["uri"] = uri
    (folder / "run.json").write_text(json.dumps(described))
    write_record(folder, read_record(folder).with_service("mlflow", uri=uri, told=False))


@pytest.fixture(scope="module")
def beside_its_store(copy_of_trained: Any) -> Path:
    """A finished training, published to the store beside it."""
    folder: Path = copy_of_trained("sqlite:///").folder
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        resume(folder, "tracking.experiment=exp")
    return folder


@pytest.fixture
def strange(beside_its_store: Path, tmp_path: Path) -> Path:
    """A stranger's run, which was copied with the store beside it."""
    shutil.copytree(beside_its_store.parent, tmp_path / "downloads")
    return tmp_path / "downloads" / beside_its_store.name


@pytest.mark.parametrize("route", ROUTES)
def test_a_strangers_server_is_never_asked(strange, decoy, route, monkeypatch, capsys) -> None:
    named_by(strange, decoy)
    refused = pytest.raises(UserError, match=f"^tracking.uri {decoy}: only the run's folder {strange} names this store")
    with nullcontext() if route in GO_ON else refused:
        ROUTES[route](strange)
    assert Decoy.asked == []
    assert SECRET not in capsys.readouterr().out
    if route in ("resume", "verify"):
        # The user names it: the same route asks there, with the token.
        monkeypatch.setenv("MLFLOW_TRACKING_URI", decoy)
        with suppress(UserError):
            ROUTES[route](strange)
        assert any(SECRET in line for line in Decoy.asked)


def test_a_strangers_store_cannot_send_artifacts_to_a_server(strange, decoy) -> None:
    named_by(strange, default_tracking_uri(strange.parent))
    resume(strange)
    run_id = read_record(strange).mlflow.run_id
    for uri in (decoy, decoy.replace("http", "mlflow-artifacts", 1)):
        with closing(sqlite3.connect(strange.with_name("mlflow.db"))) as database, database:
            database.execute("update runs set artifact_uri = ? where run_uuid = ?", (uri, run_id))
        with pytest.raises(UserError, match=r"^tracking\.uri sqlite:.* if you trust this store, name it"):
            resume(strange)
    assert Decoy.asked == []


def test_a_password_is_used_and_is_nowhere_but_in_the_configuration(
    copy_of_trained, server, monkeypatch, capfd
) -> None:
    uri = server.uri.replace("//", "//me:hunter2@")
    copy = copy_of_trained("sqlite:///")
    tracking = copy.config.tracking.model_copy(update={"uri": uri})  # From a file: an override is refused.
    said = copy._replace(config=copy.config.model_copy(update={"tracking": tracking})).publish()
    shown = uri.replace("hunter2", "***")
    assert read_record(copy.folder).mlflow.uri == shown
    with pytest.raises(UserError, match=r"only the run's folder .* \(with its password, which no run stores\)"):
        resume(copy.folder)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    resume(copy.folder)
    main(["verify", str(copy.folder)])
    printed = capfd.readouterr()
    assert f"the same tip in MLflow run {read_record(copy.folder).mlflow.run_id} in {shown}" in printed.out
    held = [path for place in (copy.folder, server.root) for path in place.rglob("*") if path.is_file()]
    assert server.root / "mlflow.db" in held
    assert [path for path in held if b"hunter2" in path.read_bytes()] == []
    assert "hunter2" not in said + printed.out + printed.err
