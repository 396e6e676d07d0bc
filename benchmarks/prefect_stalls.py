"""How long Prefect's server is silent when it is asked much: on SQLite, with and without our cure.

    python -m benchmarks.prefect_stalls [--seconds 60] [--postgresql postgresql+asyncpg://user:password@host/database]

prints the table of docs/results/service.md: each server has a new database (the one of PostgreSQL must be empty) and is
asked by seven threads, each again as soon as it has its answer: one for its health, two as workers look for runs, one
heartbeat of a worker, three that make flow runs and set their states. Answers are counted, among them "busy, ask again"
(503), and the longest wait for one. Run it after an upgrade of Prefect or SQLAlchemy: `prepare_sqlite` of
flows/prefect_server.py may go when the first line is as good as the second.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.cli.up import server_command
from flows.prefect_server import answers
from fp8core.processes.end_with_parent import installed

# Longer than Prefect's busy timeout.
PATIENCE_SECONDS = 150.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="for each server; default 60")
    parser.add_argument("--postgresql", metavar="URL", help="measure PostgreSQL too, in this empty database")
    options = parser.parse_args()
    print("| server | answers per second | of them busy | longest silence, s |")
    print("| --- | --- | --- | --- |")
    measure("`prefect server start`", plain_command, {}, options.seconds)
    measure("`fp8-grpo up`", server_command, {}, options.seconds)
    if options.postgresql:
        database = {"PREFECT_SERVER_DATABASE_CONNECTION_URL": options.postgresql}
        measure("`fp8-grpo up` on PostgreSQL", server_command, database, options.seconds)


def plain_command(port: int) -> list[str]:
    """Prefect's own."""
    return [*installed("prefect"), "server", "start", "--port", str(port)]


def measure(name: str, command: Callable[[int], list[str]], settings: Mapping[str, str], seconds: float) -> None:
    """Print the line of a server."""
    with tempfile.TemporaryDirectory() as folder, serving(command, Path(folder), settings) as api:
        asked = ask_much(api, seconds)
    rates = f"{asked.answers / asked.seconds:.0f} | {asked.busy / asked.answers:.0%} | {asked.silence:.1f}"
    print(f"| {name} | {rates} |", flush=True)


@contextmanager
def serving(command: Callable[[int], list[str]], folder: Path, settings: Mapping[str, str]) -> Iterator[str]:
    """The API of a server with its files in `folder`, and `settings` in its environment."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment = {**inherited, "PREFECT_HOME": str(folder), "PREFECT_SERVER_ANALYTICS_ENABLED": "false", **settings}
    with (folder / "log").open("wb") as output:
        server = subprocess.Popen([sys.executable, *command(port)], env=environment, stdout=output, stderr=output)
    try:
        while not answers(f"http://127.0.0.1:{port}/api/health"):
            if server.poll() is not None:
                raise RuntimeError((folder / "log").read_text())
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/api"
    finally:
        server.terminate()
        server.wait()


@dataclass
class Asked:
    """Counts of the threads: answers, those that were "busy", the longest wait for one, and seconds of requests."""

    answers: int = 0
    busy: int = 0
    silence: float = 0.0
    seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, page: str, body: Any = None) -> Any:
        """Send a request as Prefect's clients do: again, when the server is busy."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(page, data, {"Content-Type": "application/json"})
        while True:
            before = time.monotonic()
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
                    return json.loads(answer.read() or "null")
            except urllib.error.HTTPError as busy:
                if busy.code != 503:
                    raise
                with self.lock:
                    self.busy += 1
                time.sleep(0.1)
            finally:
                with self.lock:
                    self.answers += 1
                    self.silence = max(self.silence, time.monotonic() - before)


def ask_much(api: str, seconds: float) -> Asked:
    """Send requests for `seconds`, and wait until each is answered."""
    asked = Asked()
    asked.ask(f"{api}/work_pools/", {"name": "pool", "type": "process"})
    flow = asked.ask(f"{api}/flows/", {"name": "flow"})["id"]
    asked.ask(f"{api}/deployments/", {"name": "deployment", "flow_id": flow, "work_pool_name": "pool"})

    def health() -> None:
        asked.ask(f"{api}/health")
        time.sleep(0.05)

    def look() -> None:
        asked.ask(f"{api}/work_pools/pool/get_scheduled_flow_runs", {"limit": 1})

    def beat() -> None:
        asked.ask(f"{api}/work_pools/pool/workers/heartbeat", {"name": "worker"})

    def run() -> None:
        run = asked.ask(f"{api}/flow_runs/", {"flow_id": flow, "state": {"type": "PENDING"}})["id"]
        for state in ("RUNNING", "COMPLETED"):
            asked.ask(f"{api}/flow_runs/{run}/set_state", {"state": {"type": state}, "force": True})

    begin = time.monotonic()

    def repeat(act: Callable[[], None]) -> None:
        while time.monotonic() < begin + seconds:
            act()

    threads = [threading.Thread(target=repeat, args=(act,)) for act in (health, look, look, beat, run, run, run)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asked.seconds = time.monotonic() - begin
    return asked


if __name__ == "__main__":
    main()
