"""A run's folder may be somebody else's: the store that it names gets nothing of the user's."""

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
from mlflow.exceptions import MlflowException

from flows.cli import main
from flows.run_lookup import load_settings
from flows.tracking.record import mark_killed, mark_killed_siblings, read_record, write_record
from flows.tracking.results import place_of_run, tracked
from flows.tracking.session import open_session
from flows.tracking.store import default_tracking_uri
from fp8core.errors import UserError
from fp8core.report.console import Console
from fp8core.run.open import open_directory

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
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    server = HTTPServer(("127.0.0.1", 0), Decoy)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def resume(folder: Path, *overrides: str) -> None:
    """As `fp8-grpo resume`, without Prefect."""
    config = load_settings(str(folder), list(overrides))
    with open_session(config, folder.name, Console(io.StringIO(), config.steps)) as session:
        session.mlflow.follow_ledger()


def verify(folder: Path) -> None:
    assert main(["verify", str(folder)]) == 0


ROUTES: dict[str, Callable[[Path], Any]] = {
    "resume": resume,
    "verify": verify,
    "evaluate": lambda folder: place_of_run(folder, 3, None),
    "export": lambda folder: tracked(folder, 3),
    "guardian": mark_killed,
}


def named_by(folder: Path, uri: str) -> None:
    """Let a folder name a store everywhere, as a stranger's would."""
    described = json.loads((folder / "run.json").read_bytes())
    described["config"]["tracking"]["uri"] = uri
    (folder / "run.json").write_text(json.dumps(described))
    if (folder / "tracking.json").exists():
        write_record(folder, read_record(folder).running().changed(uri=uri, place=None))


@pytest.fixture(scope="module")
def beside_its_store(copy_of_trained: Any) -> Path:
    """A finished training, published to the store beside it."""
    folder = copy_of_trained("sqlite:///").folder
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
    with nullcontext() if route in ("verify", "export") else refused:  # Those two go on without.
        ROUTES[route](strange)
    assert Decoy.asked == []
    assert SECRET not in capsys.readouterr().out

    # The user names it: the same route asks there, with the token.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", decoy)
    with suppress(UserError, MlflowException):
        ROUTES[route](strange)
    assert any(SECRET in line for line in Decoy.asked)


def test_a_server_in_run_json_alone_is_not_asked_either(strange, decoy) -> None:
    (strange / "tracking.json").unlink()
    named_by(strange, decoy)
    with pytest.raises(UserError, match="only the run's folder"):
        resume(strange)
    verify(strange)
    assert Decoy.asked == []


def test_the_killed_neighbours_of_a_run_are_told_to_its_own_store_only(strange, decoy) -> None:
    named_by(strange, decoy)
    mark_killed_siblings(strange.with_name("mine"), default_tracking_uri(strange.parent))
    assert Decoy.asked == []


@pytest.mark.parametrize(
    ("name", "linked"),
    [("sqlite:///{}", False), ("sqlite:///{}", True), ("sqlite:///file:{}?uri=true", False), ("{}", True)],
)
def test_a_database_elsewhere_is_not_written(strange, tmp_path, runs, monkeypatch, name, linked) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    mine = tmp_path / "home" / "mine.db"
    mine.parent.mkdir()
    shutil.copy(runs / "mlflow.db", mine)
    place = mine
    if linked:
        place = strange.with_name("linked.db")
        place.symlink_to(mine)
    before = mine.read_bytes()
    named_by(strange, name.format(place))
    refused = "only the run's folder" if "sqlite" in name else "tracking.uri: expected "
    with pytest.raises(UserError, match=refused):
        resume(strange)
    with pytest.raises(UserError, match="only the run's folder"):
        place_of_run(strange, 3, None)
    assert mine.read_bytes() == before
    assert [path.name for path in mine.parent.iterdir()] == ["mine.db"]
    if name == "sqlite:///{}":
        # The user's own choice: this store has no run of the folder's yet.
        monkeypatch.setenv("MLFLOW_TRACKING_URI", name.format(place))
        claimed = read_record(strange).run_id
        resume(strange)
        assert read_record(strange).run_id != claimed


def test_a_run_that_is_copied_with_its_store_goes_on_in_the_copy(beside_its_store, strange, monkeypatch) -> None:
    """The original is still there: its store is not the copy's."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    original = (beside_its_store.parent / "mlflow.db").read_bytes()
    resume(strange)
    assert read_record(strange).uri == default_tracking_uri(strange.parent)
    assert (beside_its_store.parent / "mlflow.db").read_bytes() == original
    resume(strange)


def test_a_strangers_store_cannot_send_artifacts_elsewhere(strange, decoy, tmp_path, monkeypatch) -> None:
    """A store says where the artifacts of its runs lie: at a server, or behind a link to a file of the user's."""
    resume(strange)
    run_id, store = read_record(strange).run_id, strange.with_name("mlflow.db")
    mine = tmp_path / "config.yaml"
    mine.write_text("mine")

    def placed(uri: str) -> None:
        with closing(sqlite3.connect(store)) as database, database:
            database.execute("update runs set artifact_uri = ? where run_uuid = ?", (uri, run_id))

    linked = strange.with_name("mlartifacts") / run_id / "artifacts"
    (linked / "config.yaml").unlink(missing_ok=True)
    linked.mkdir(parents=True, exist_ok=True)
    (linked / "config.yaml").symlink_to(mine)
    for uri in (decoy, decoy.replace("http", "mlflow-artifacts", 1), tmp_path.as_uri(), linked.as_uri()):
        placed(uri)
        with pytest.raises(UserError, match=r"^tracking\.uri sqlite:.* if you trust this store, name it"):
            resume(strange)
    assert (Decoy.asked, mine.read_text()) == ([], "mine")
    (linked / "config.yaml").unlink()
    resume(strange)
    assert (linked / "config.yaml").is_file()


def test_the_lock_of_a_new_store_follows_no_link(strange, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    strange.with_name("mlflow.db").unlink()
    strange.with_name("mlflow.db.lock").unlink(missing_ok=True)
    strange.with_name("mlflow.db.lock").symlink_to(mine)
    with pytest.raises(UserError):
        resume(strange)
    assert mine.read_text() == "mine"


def test_a_password_is_used_and_is_nowhere_but_in_the_configuration(
    copy_of_trained, mlflow_server, runs, monkeypatch, capfd
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    uri = mlflow_server.replace("//", "//me:hunter2@")
    copy = copy_of_trained("sqlite:///")
    tracking = copy.config.tracking.model_copy(update={"uri": uri})  # From a file: an override is refused.
    copy = copy._replace(config=copy.config.model_copy(update={"tracking": tracking}))
    out = io.StringIO()

    def publish() -> None:
        with open_session(copy.config, copy.folder.name, Console(out, copy.config.steps)) as session:
            session.mlflow.follow_ledger()

    shutil.move(copy.folder / "ledger.jsonl", copy.folder.with_name("ledger"))
    with open_directory(copy.config, copy.folder.name):
        pass  # A run that has finished nothing gets its run.json anew, with the store.
    shutil.move(copy.folder.with_name("ledger"), copy.folder / "ledger.jsonl")
    publish()
    shown = uri.replace("hunter2", "***")
    assert read_record(copy.folder).uri == shown
    assert json.loads((copy.folder / "run.json").read_text())["config"]["tracking"]["uri"] == shown
    publish()  # Goes on in the same MLflow run.

    with pytest.raises(UserError, match=r"only the run's folder .* \(with its password, which no run stores\)"):
        resume(copy.folder)
    main(["verify", str(copy.folder)])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    resume(copy.folder)
    main(["verify", str(copy.folder)])
    assert f"the same head in MLflow run {read_record(copy.folder).run_id} in {shown}" in capfd.readouterr().out

    held = [path for place in (copy.folder, runs) for path in place.rglob("*") if path.is_file()]
    assert runs / "mlflow.db" in held
    assert [path for path in held if b"hunter2" in path.read_bytes()] == []
    assert "me:***@" in out.getvalue()
    assert "hunter2" not in out.getvalue() + "".join(capfd.readouterr())


@pytest.mark.parametrize("command", [["run", "tiny"], ["parity"], ["evaluate", "RUN"], ["resume", "RUN"]])
def test_an_override_with_a_password_is_refused_before_prefect_stores_it(strange, command, capsys) -> None:
    words = [str(strange) if word == "RUN" else word for word in command]
    assert main([*words, "--set", "tracking.uri=postgresql://me:hunter2@host/db"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fp8-grpo: tracking.uri: postgresql://me:***@host/db has a password")
    assert "MLFLOW_TRACKING_URI" in line
