"""Episodes on a server in the manner of OpenEnv, which is a real one here."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from fp8core.environments.pool import EnvironmentPool
from fp8core.environments.protocol import Action, Outcome, Said, Task, Turn

NAME = "fp8core.environments.hubs:OpenEnv"


class Countdown(BaseHTTPRequestHandler):
    """Counts down from the seed; `fault` names what it does wrong."""

    fault = ""
    steps: dict[str, int] = {}  # noqa: RUF012 - of the server

    def do_POST(self) -> None:
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        episode = "shared" if self.fault == "shared" else sent["episode_id"]
        if self.path == "/reset":
            self.steps[episode] = 0
            self.answer({"observation": {"text": f"say {sent['seed']}", "level": sent["level"]}, "done": False})
        elif self.fault in FAULTS:
            FAULTS[self.fault](self)
        else:
            self.steps[episode] += 1
            right = sent["action"] == {"message": "done"}
            self.answer({"observation": {"text": f"step {self.steps[episode]}"}, "reward": 0.5 + right, "done": right})

    def do_GET(self) -> None:
        (episode,) = parse_qs(urlsplit(self.path).query)["episode_id"]
        steps = self.steps["shared"] if self.fault == "shared" else self.steps.get(episode, 0)
        self.answer({"episode_id": episode, "step_count": 0 if self.fault == "forgets" else steps})

    def answer(self, message: Any) -> None:
        self.send(json.dumps(message).encode())

    def send(self, content: bytes, code: int = 200) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


FAULTS: dict[str, Callable[[Countdown], None]] = {
    "no json": lambda server: server.send(b"<html>"),
    "an error": lambda server: server.send(b"{}", 500),
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Countdown) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def pool(start_pool: Callable[..., EnvironmentPool], url: str) -> EnvironmentPool:
    return start_pool(NAME, url=url, observation="text", columns=["level"])


def task(seed: int) -> Task:
    return Task("Count down.", "", seed, columns={"level": 3})


def test_episodes_side_by_side_on_one_server(pool: EnvironmentPool) -> None:
    for sample in range(3):
        pool.begin((0, sample), task(sample))
    assert {key: reply for key, reply, _ in wait(pool, 3)} == {
        (0, sample): Turn((Said("user", "Count down."), Said("user", f"say {sample}"))) for sample in range(3)
    }
    for sample in range(3):
        pool.act((0, sample), Action("well"))
    assert [reply for _, reply, _ in wait(pool, 3)] == [Turn((Said("user", "step 1"),), reward=0.5)] * 3
    for sample in range(3):
        pool.act((0, sample), Action("done"))
    assert [reply for _, reply, _ in wait(pool, 3)] == [Outcome("right", 1.5)] * 3


@pytest.mark.parametrize(
    ("fault", "detail"),
    [
        ("no json", "ServerError: /step answered no JSON"),
        ("an error", "ServerError: /step answered 500"),
        ("forgets", "ServerError: its state is not that of this episode"),
    ],
)
def test_a_server_that_answers_otherwise_ends_the_episode(
    pool: EnvironmentPool, monkeypatch: pytest.MonkeyPatch, fault: str, detail: str
) -> None:
    pool.begin((0, 0), task(5))
    wait(pool, 1)
    monkeypatch.setattr(Countdown, "fault", fault)
    pool.act((0, 0), Action("done"))
    ((_, reply, _),) = wait(pool, 1)
    assert isinstance(reply, Outcome)
    assert (reply.outcome, reply.detail[: len(detail)]) == ("crashed", detail)


def test_a_server_with_one_episode_for_all_is_found_out(pool: EnvironmentPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Countdown, "fault", "shared")
    for sample in range(2):
        pool.begin((0, sample), task(sample))
        wait(pool, 1)
    pool.act((0, 0), Action("well"))
    assert isinstance(wait(pool, 1)[0][1], Turn)
    pool.act((0, 1), Action("well"))
    ((_, reply, _),) = wait(pool, 1)
    assert isinstance(reply, Outcome)
    assert "use environment.at_once=1" in reply.detail
    pool.end((0, 0))


def test_a_column_that_the_data_lacks_is_named(start_pool: Callable[..., EnvironmentPool], url: str) -> None:
    pool = start_pool(NAME, url=url, columns=["level", "info"])
    pool.begin((0, 0), task(5))
    ((_, reply, _),) = wait(pool, 1)
    assert isinstance(reply, Outcome)
    assert reply.outcome == "crashed"
    assert reply.detail.startswith("ValueError: columns: the data has no column 'info'; it has level (data.columns)")


def wait(pool: EnvironmentPool, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        found += pool.replies(wait=True)
    return found
