"""Prefect's server in a process of its own, which answers only to this machine's names.

    python -m flows.prefect_server lasting PORT
    python -m flows.prefect_server training FILE
    python -m flows.prefect_server command ARGUMENTS

The first one is the server of `fp8-grpo up`, with the UI. A signal ends it.

The second one is the server of one training, where none is configured: it ends with that training in every case. It
serves Prefect's API, without its UI, on a bound socket that it inherits as that file number. It ends with the file at
its standard input. Prefect would start one by itself, but as an ordinary child. A signal to the process group ends
that before the training has reported. SIGKILL of the training leaves it running, with the training's standard output
open.

The third one is the `prefect` command, for a server of the user's own. All of them close failed cursors of SQLite
(`prepare_sqlite`).
"""

import logging
import os
import signal
import socket
import sqlite3
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import MutableMapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self

from flows.imports import uncollected
from fp8core.errors import UserError, last_words
from fp8core.processes.end_with_parent import TiedProcess, running

if TYPE_CHECKING:
    from sqlalchemy import Dialect

_locks_first = ContextVar("locks_first", default=False)
# Names under which work is logged that is repeated: docket is the queue of background work.
_REPEATING = (
    "docket.dependencies",
    "prefect.server.models.deployments",
    "prefect.server.services.task_run_recorder",
    "prefect.server.utilities.messaging.memory",
)
_START_SECONDS = 180.0
_STOP_SECONDS = 10.0


class PrefectServer:
    def __init__(self) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - open while the server lives
        # The socket is handed over and not its number: a port that was free may be taken when the server has started.
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            self.api = f"http://127.0.0.1:{bound.getsockname()[1]}/api"
            arguments = running("flows.prefect_server", "training", str(bound.fileno()))
            self._process = TiedProcess(arguments, self._output, files=[bound.fileno()])

    def wait(self) -> None:
        """Return when it serves. Raises UserError, with its last output, when it does not."""
        deadline = time.monotonic() + _START_SECONDS
        while not answers(f"{self.api}/health"):
            if self._process.exit_code is not None or time.monotonic() > deadline:
                self._output.seek(0)
                reason = last_words(self._output.read().decode(errors="replace"))
                raise UserError(f"Prefect's server for this training did not start: {reason}")
            time.sleep(0.1)

    def stop(self) -> None:
        """End it and wait until it has stored what it received."""
        self._process.end()


def answers(url: str, seconds: float = 5.0) -> bool:
    """True if an HTTP server answers 200 there, within `seconds`."""
    try:
        with urllib.request.urlopen(url, timeout=seconds) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def serve(bound: socket.socket) -> None:
    """Serve a training there until standard input ends."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(_application(ephemeral=True), log_level="error"))
    # Not in the main thread, where uvicorn would handle the signals itself.
    serving = threading.Thread(target=server.run, args=([bound],), daemon=True)
    serving.start()
    _wait_for_end(serving)
    server.should_exit = True
    serving.join(_STOP_SECONDS)


def serve_lasting(port: int) -> None:
    """Serve there, with the UI and all of Prefect's services, until a signal comes."""
    import uvicorn
    from prefect.settings import get_current_settings

    settings = get_current_settings().server
    uvicorn.run(
        _application(ephemeral=False),
        host="127.0.0.1",
        port=port,
        timeout_keep_alive=settings.api.keepalive_timeout,
        ws_ping_interval=settings.api.websocket_ping_interval,
        ws_ping_timeout=settings.api.websocket_ping_timeout,
        log_level=settings.logging_level.lower(),
    )


def _application(*, ephemeral: bool) -> Any:
    """Prefect's application; a page of another name that leads to this machine (DNS rebinding) gets no answer."""
    prepare_sqlite()
    with uncollected():
        from prefect.server.api.server import create_app
        from starlette.middleware.trustedhost import TrustedHostMiddleware

        ours = LockFirst(create_app(ephemeral=ephemeral, final=True))
        return TrustedHostMiddleware(ours, ["127.0.0.1", "localhost"])


class LockFirst:
    """ASGI application whose changes of deployments, and of runs that go on, take SQLite's write lock before they read.

    Such a change reads much, then writes. The server of a training writes to the same database all the time. Without
    the lock its transactions come in between, and each attempt of `prefect deploy` is refused. With it, a change waits.
    """

    def __init__(self, application: Any) -> None:
        self._application = application

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            # Each time: requests on one connection may share a context.
            path = scope["path"]
            changes = path.startswith("/api/deployments/") or (path.startswith("/api/flow_runs/") and "resume" in path)
            _locks_first.set(scope["method"] != "GET" and changes)
        await self._application(scope, receive, send)


def _lock_first(
    connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool
) -> tuple[str, Any]:
    # Prefect begins so what may write; of its reads it begins none.
    begins = statement == "BEGIN DEFERRED" and _locks_first.get()
    return "BEGIN IMMEDIATE" if begins else statement, parameters


def _wait_for_end(serving: threading.Thread) -> None:
    ended = threading.Thread(target=lambda: os.read(0, 1), daemon=True)
    ended.start()
    while ended.is_alive() and serving.is_alive():
        ended.join(0.5)


class _Cursor(sqlite3.Cursor):
    def execute(self, *arguments: Any) -> Self:
        try:
            return super().execute(*arguments)
        except sqlite3.Error:
            self.close()
            raise

    def executemany(self, *arguments: Any) -> Self:
        try:
            return super().executemany(*arguments)
        except sqlite3.Error:
            self.close()
            raise


class _Connection(sqlite3.Connection):
    def cursor(self, factory: Any = _Cursor) -> Any:
        return super().cursor(factory)


def prepare_sqlite() -> None:
    """Before this process serves: failed cursors are closed, and a refused transaction that is repeated is no error.

    SQLite refuses a transaction that has read and now writes, at once, when another one wrote in between ("database is
    locked"). Prefect 3.7 has many such transactions, makes one at every look of a worker (`mark_deployments_ready`),
    and repeats them. But aiosqlite gives each connection a thread, and SQLAlchemy 2.0 leaves the cursor of a failed
    statement open. The frames of the exception, a cycle, hold it until Python collects garbage, mostly in the thread of
    the event loop. To end the cursor there takes the connection's mutex. While that connection waits for SQLite's write
    lock, the event loop waits too; the holder of the lock needs the event loop to release it. The whole server is
    silent until the connection gives up, which is after 60 s with Prefect. So the thread that ran a failed statement
    closes its cursor here. Nothing changes with PostgreSQL.

    Prefect omits such errors from its log unless PREFECT_SERVER_LOG_RETRYABLE_ERRORS is set. It does not omit those of
    background work that it repeats (`_REPEATING`); when it gives up, it logs a line without the error.
    """
    from sqlalchemy import Engine, event  # not above: trainings and commands import this module too

    event.listen(Engine, "do_connect", _make_ours)
    event.listen(Engine, "before_cursor_execute", _lock_first, retval=True)
    for name in _REPEATING:
        logging.getLogger(name).addFilter(_is_news)


def _make_ours(dialect: "Dialect", record: Any, arguments: Sequence[Any], options: MutableMapping[str, Any]) -> None:
    if dialect.driver == "aiosqlite":
        options["factory"] = _Connection


def _is_news(record: logging.LogRecord) -> bool:
    from prefect.settings import get_current_settings

    error = record.exc_info[1] if record.exc_info else None
    refused = getattr(getattr(error, "orig", None), "sqlite_errorname", "").startswith("SQLITE_BUSY")
    return not refused or get_current_settings().server.log_retryable_errors


def main(kind: str, *arguments: str) -> None:
    if kind == "command":
        prepare_sqlite()
        from prefect.cli import app

        sys.argv = ["prefect", *arguments]
        return app()
    (number,) = map(int, arguments)
    if kind == "lasting":
        return serve_lasting(number)
    # The training decides when it ends: a scheduler sends SIGTERM to every process of a job.
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    serve(socket.socket(fileno=number))
    # Nothing is left to do, and taking the interpreter down takes seconds.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
