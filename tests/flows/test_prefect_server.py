"""The Prefect server of a training goes with it, and not before it."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import wait_for

from flows.prefect_server import PrefectServer
from fp8core.errors import UserError

pytestmark = pytest.mark.slow

# Starts a server, says where it is, and waits to be killed.
PARENT = """\
import time
from flows.prefect_server import PrefectServer
server = PrefectServer()
server.wait()
print(server.api, server._process._process.pid, flush=True)
time.sleep(600)
"""


def answers(api: str) -> bool:
    try:
        return urllib.request.urlopen(f"{api}/health", timeout=5).status == 200
    except OSError:
        return False


def test_it_outlives_sigterm_and_ends_when_its_training_is_killed(
    prefect_home: Callable[[Path], Path], tmp_path: Path
) -> None:
    # A project of the user's own may have `flows` as well.
    project = tmp_path / "project"
    (project / "flows").mkdir(parents=True)
    (project / "flows" / "__init__.py").touch()
    parent = subprocess.Popen(
        [sys.executable, "-P", "-c", PARENT],
        cwd=project,
        env={**os.environ, "PREFECT_HOME": str(prefect_home(tmp_path / "home"))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert parent.stdout is not None
        assert parent.stderr is not None
        line = parent.stdout.readline()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/api \d+\n", line), parent.stderr.read()
        api, pid = line.split()
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(int(pid), number)
        time.sleep(0.5)
        assert answers(api)
        parent.kill()
        assert parent.stdout.read() == "", "the server does not hold our output open"
        assert parent.stderr.read() == ""
        wait_for(lambda: not answers(api), seconds=20)
    finally:
        parent.kill()
        parent.wait()


def test_a_server_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its port is its own as long as it tries."""
    monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", "nonsense")
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    server = PrefectServer()
    port = int(server.api.removesuffix("/api").rpartition(":")[2])
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    with pytest.raises(
        UserError, match=r"^Prefect's server for this training did not start: .*not parse SQLAlchemy URL"
    ):
        server.wait()
    server.stop()


def test_a_database_that_is_damaged_is_named(tmp_path: Path) -> None:
    database = tmp_path / "prefect.db"
    database.write_bytes(b"damaged" * 1000)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    begun = "from flows.environment import start_prefect; start_prefect('prefect.main')"
    done = subprocess.run(
        [sys.executable, "-c", begun],
        env={**environment, "PREFECT_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stderr.splitlines()[-1].endswith(
        "did not start: sqlalchemy.exc.DatabaseError: (sqlite3.DatabaseError) file is not a database; "
        f"its database is {database}"
    )


# Starts a server as a training does, which asks it something, and asks as another program and as a page would.
TRAINING = """\
import os
from urllib.error import HTTPError
from urllib.request import Request, urlopen
from flows.environment import make_prefect_home, start_prefect
make_prefect_home()
start_prefect("prefect.main")
from prefect.client.orchestration import get_client
with get_client(sync_client=True) as client:
    client.create_concurrency_limit("of this training", 1)
for headers in ({}, {"Host": "evil.example"}):
    try:
        urlopen(Request(os.environ["PREFECT_API_URL"] + "/admin/version", headers=headers), timeout=30)
    except HTTPError as error:
        print(error.code, flush=True)
"""


# Of a user whose machine reaches others by a proxy, and who has a server of their own.
ODD = {
    **dict.fromkeys(("http_proxy", "HTTP_PROXY"), "http://127.0.0.1:9"),
    **dict.fromkeys(("no_proxy", "NO_PROXY"), ""),
    "PREFECT_SERVER_API_BASE_PATH": "/mine",
    "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
    "PREFECT_CLIENT_CSRF_SUPPORT_ENABLED": "false",
}


def test_two_that_start_together_make_one_new_database_and_answer_their_trainings_only(tmp_path: Path) -> None:
    """The second one has settings that are meant for other servers."""
    environment = {**os.environ, "PREFECT_HOME": str(tmp_path / "home")}
    environment.pop("PREFECT_API_URL", None)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", TRAINING],
            env=environment | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for own in ({}, ODD)
    ]
    said = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert [answers.split() for answers, _ in said] == [["401", "400"]] * 2
