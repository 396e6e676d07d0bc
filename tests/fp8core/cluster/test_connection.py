"""What is said of an address where something else than a Ray cluster listens; a cluster that is busy is not refused."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from ray_nodes import start_cluster

from flows import cli
from fp8core.cluster import connection
from fp8core.cluster.connection import HeadWatch
from fp8core.config.load import load_config
from fp8core.errors import HeadLost, UserError
from fp8core.run.machine import members_node

OTHER = "it did not answer `ray status` as a Ray head"


class Refusing(BaseHTTPRequestHandler):
    """Answers as it is, in silence."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def http_server() -> Iterator[str]:
    # Ray reaches this machine by its address, not at 127.0.0.1.
    with ThreadingHTTPServer(("", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def silent() -> Iterator[str]:
    """The kernel accepts connections, and nobody answers."""
    with socket.create_server(("", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = start_cluster({"num_cpus": 1})
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(autouse=True)
def not_known_yet(monkeypatch):
    """Where a cluster was found before, it is not looked for again."""
    monkeypatch.setattr(connection, "_joined", None)


def test_an_http_server_is_refused_soon(http_server, capsys):
    began = time.monotonic()
    assert cli.main(["doctor", "--address", http_server]) == 2
    # Ray's command has to start, which it may do slowly beside other tests.
    assert time.monotonic() - began < 30
    why = "it did not answer as a Ray head within 10 s"
    assert capsys.readouterr() == ("", f"fp8-grpo: --address {http_server}: {why}\n")


def test_a_server_that_stays_silent_is_refused_before_a_run_has_a_folder(silent, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "_STATUS_SECONDS", 1.0)
    settings = (f"cluster.address={silent}", f"runs={tmp_path / 'runs'}")
    assert cli.main(["run", "tiny", *(flag for setting in settings for flag in ("--set", setting))]) == 2
    why = "it did not answer as a Ray head within 1 s"
    assert capsys.readouterr() == ("", f"fp8-grpo: cluster.address={silent}: {why} (--set)\n")
    assert not list(tmp_path.iterdir())


def test_a_cluster_of_our_own_leaves_sigterm_to_the_command():
    """In a process of its own: Ray sets variables for a cluster that it starts, which would reach later tests."""
    program = (
        "import os, signal\n"
        "from fp8core.cluster.connection import connect\n"
        "from fp8core.config.load import load_config\n"
        "signal.signal(signal.SIGTERM, lambda number, frame: os.write(1, b'answered'))\n"
        "connect(load_config('tiny', {'cluster.ranks': 2}).cluster, 1)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (found.stdout, found.returncode) == ("answered", 0), found.stderr


def test_sigterm_that_comes_while_ray_connects_is_answered_after_it(monkeypatch):
    seen = list[str]()

    def init(**settings):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        seen.append("connected")

    monkeypatch.setattr(connection.ray, "init", init)
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append("answered"))
    try:
        connection.connect(load_config("tiny", {"cluster.ranks": 2}).cluster, 1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == ["connected", "answered"]


def test_another_port_of_a_cluster_is_refused(cluster, capfd):
    members_node(load_config("tiny", {"cluster.address": cluster.address}))
    (node,) = ray.nodes()
    ray.shutdown()
    address = f"127.0.0.1:{node['NodeManagerPort']}"
    assert cli.main(["doctor", "--address", address]) == 2
    said = f"fp8-grpo: --address {address}: {OTHER}\n"
    assert capfd.readouterr() == ("", said)


def test_a_cluster_whose_head_stands_still_for_seconds_is_no_other_server(cluster):
    head = cluster.head_node.all_processes["gcs_server"][0].process.pid
    os.kill(head, signal.SIGSTOP)
    threading.Timer(6.0, os.kill, (head, signal.SIGCONT)).start()
    began = time.monotonic()
    assert cli.main(["doctor", "--address", cluster.address]) == 0
    assert time.monotonic() - began > 6


def test_a_cluster_that_was_found_is_not_looked_for_again(cluster, monkeypatch):
    """A run that has lost a process is not to wait for it."""
    config = load_config("tiny", {"cluster.address": cluster.address})
    members_node(config)
    ray.shutdown()
    monkeypatch.setattr(connection, "_STATUS", "raise SystemExit('ray.exceptions.RpcError')")
    members_node(config)
    monkeypatch.setattr(connection, "_joined", None)
    ray.shutdown()
    with pytest.raises(UserError, match=OTHER):
        members_node(config)


def test_the_last_cluster_of_this_machine_that_is_gone_is_told_with_its_address(monkeypatch, capsys):
    monkeypatch.setattr(connection, "_STATUS_SECONDS", 1.0)
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
    # Before the file that a crashed head leaves, Ray takes the variable.
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    assert cli.main(["doctor", "--address", "auto"]) == 2
    said = rf"fp8-grpo: --address auto: no running cluster answers; \S+:{port} \(RAY_ADDRESS\) was tried\n"
    assert re.fullmatch(said, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import time; time.sleep(60)", "`ray status` has not begun within 0.5 s"),
        ("import sys; sys.stderr.write('x\\n' * 2**20); print(flush=True); sys.exit('ray.exceptions.RpcError')", OTHER),
    ],
)
def test_an_import_of_ray_that_hangs_or_says_much_holds_nothing_up(silent, monkeypatch, program, said):
    monkeypatch.setattr(connection, "_STATUS", program)
    monkeypatch.setattr(connection, "_IMPORT_SECONDS", 0.5 if "time" in program else 60.0)
    began = time.monotonic()
    with pytest.raises(UserError, match=said):
        members_node(load_config("tiny", {"cluster.address": silent}))
    assert time.monotonic() - began < 30


def test_a_head_that_takes_no_connection_several_times_in_turn_is_lost():
    def listen() -> socket.socket:
        return socket.create_server(("127.0.0.1", port))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        watch = HeadWatch("auto", f"127.0.0.1:{port}")
        watch.look()
    for _ in range(2):
        for _ in range(4):
            watch.look()
        with listen():
            watch.look()
    for _ in range(4):
        watch.look()
    watch.check()
    watch.look()
    said = f"^cluster.address=auto: its head at 127.0.0.1:{port} does not answer .*; `fp8-grpo resume` continues"
    with pytest.raises(HeadLost, match=said):
        watch.check()


def test_a_head_at_an_address_of_ipv6_is_found():
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    with listener:
        assert HeadWatch("auto", f"[::1]:{listener.getsockname()[1]}").silence() is None


def test_a_head_is_looked_for_beside_a_process_that_makes_no_call(monkeypatch):
    monkeypatch.setattr(connection, "_HEAD_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        watch = HeadWatch("auto", f"127.0.0.1:{listener.getsockname()[1]}")
        watch.begin()
        time.sleep(0.3)
        watch.check()

    def ask() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            watch.check()

    with pytest.raises(HeadLost):
        ask()


def without_head(*arguments: str) -> float:
    """Seconds until a process was told so, which Ray would end."""
    script, began = Path(__file__).with_name("without_head.py"), time.monotonic()
    found = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=300)
    assert found.stdout.startswith("HeadLost cluster.address="), (found.stdout, found.stderr, time.monotonic() - began)
    assert found.returncode == 0
    return float(found.stdout.split()[-1])


@pytest.mark.slow
def test_a_run_that_waits_ends_with_an_error_before_ray_ends_it_for_want_of_its_head():
    assert without_head("300", "5") < 60


def test_a_run_whose_calls_end_soon_is_told_of_its_lost_head():
    assert without_head("0.1", "1") < 60


def test_a_node_tells_the_versions_of_further_packages(cluster):
    config = load_config("tiny", {"cluster.address": cluster.address})
    found = connection.ask_node(config.cluster, 1, False, ("pytest",))
    assert found.version("pytest") == pytest.__version__
    assert "pytest" not in members_node(config).packages
    ray.shutdown()
