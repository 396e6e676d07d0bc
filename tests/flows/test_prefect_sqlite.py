"""Prefect's server on SQLite answers while transactions are refused, and what is repeated does not fill its log."""

import asyncio
import gc
import json
import logging
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_SERVER_LOG_RETRYABLE_ERRORS, temporary_settings
from sqlalchemy import event
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from flows.prefect_server import PrefectServer, answers
from flows.prefect_sqlite import prepare_sqlite
from flows.service import Services
from flows.up import server_command

BUSY_SECONDS = 6.0
SILENT_SECONDS = 20.0


@contextmanager
def no_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def refuse(reader: AsyncConnection, writer: AsyncConnection) -> OperationalError:
    """What SQLite says, at once, to a reader that writes after another one did."""
    await reader.exec_driver_sql("BEGIN")
    (await reader.exec_driver_sql("SELECT * FROM numbers")).all()
    await writer.exec_driver_sql("INSERT INTO numbers VALUES (1)")
    with pytest.raises(OperationalError, match="database is locked") as refused:
        await reader.exec_driver_sql("INSERT INTO numbers VALUES (2)")
    await reader.exec_driver_sql("ROLLBACK")
    return refused.value


async def seconds_of_a_collection(database: Path) -> float:
    """While the connection of a failed statement, which is garbage, waits for the lock."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{database}")

    @event.listens_for(engine.sync_engine, "connect")
    def as_prefect_does(connection: Any, record: Any) -> None:
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute(f"PRAGMA busy_timeout = {1000 * BUSY_SECONDS:.0f}")
        cursor.close()

    async with engine.connect() as holder, engine.connect() as waiter:
        await holder.exec_driver_sql("CREATE TABLE numbers (number)")
        cycle: list[Any] = [await refuse(waiter, holder)]
        cycle.append(cycle)
        del cycle
        await holder.exec_driver_sql("BEGIN IMMEDIATE")
        waiting = asyncio.create_task(waiter.exec_driver_sql("BEGIN IMMEDIATE"))
        await asyncio.sleep(0.5)
        before = time.monotonic()
        gc.collect()
        seconds = time.monotonic() - before
        await holder.exec_driver_sql("COMMIT")
        await waiting
        await waiter.exec_driver_sql("ROLLBACK")
    await engine.dispose()
    return seconds


def test_garbage_of_a_refused_statement_does_not_hold_up_the_event_loop(tmp_path: Path) -> None:
    prepare_sqlite()
    with no_collection():
        assert asyncio.run(seconds_of_a_collection(tmp_path / "numbers.db")) < BUSY_SECONDS / 2


def test_a_refused_transaction_that_is_repeated_is_in_the_log_only_when_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepare_sqlite()
    docket = logging.getLogger("docket.dependencies")

    async def log_a_refusal() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/numbers.db", isolation_level="AUTOCOMMIT")
        async with engine.connect() as reader, engine.connect() as writer:
            await writer.exec_driver_sql("PRAGMA journal_mode = WAL")
            await writer.exec_driver_sql("CREATE TABLE IF NOT EXISTS numbers (number)")
            refused = await refuse(reader, writer)
        docket.error("again: a refusal", exc_info=refused)
        docket.error("again: another mistake", exc_info=ValueError("mine"))
        await engine.dispose()

    asyncio.run(log_a_refusal())
    assert [record.message for record in caplog.records] == ["again: another mistake"]
    with temporary_settings({PREFECT_SERVER_LOG_RETRYABLE_ERRORS: True}):
        asyncio.run(log_a_refusal())
    assert "again: a refusal" in [record.message for record in caplog.records]


# --- a real server ---


@pytest.fixture(params=["of up", "of a training"])
def api(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server with a database of its own, started as `up` or a training without a server does."""
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    monkeypatch.setenv("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    if request.param == "of a training":
        server = PrefectServer()
        server.wait()
        yield server.api
        server.stop()
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Services(os.environ, tmp_path, tmp_path) as services:
        services.start("Prefect server", server_command(port), 1)
        services.wait_until(lambda: answers(f"http://127.0.0.1:{port}/api/health"), "Prefect server")
        yield f"http://127.0.0.1:{port}/api"


def ask(page: str, body: Any = None) -> Any:
    """As Prefect's clients do: again, when the server says that it is busy."""
    data = None if body is None else json.dumps(body).encode()
    while True:
        request = urllib.request.Request(page, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=SILENT_SECONDS) as answer:
                return json.loads(answer.read() or "null")
        except urllib.error.HTTPError as busy:
            if busy.code != 503:
                raise
            time.sleep(0.1)


@pytest.mark.slow
def test_a_server_that_is_asked_much_is_never_silent(api: str) -> None:
    ask(f"{api}/work_pools/", {"name": "pool", "type": "process"})
    flow = ask(f"{api}/flows/", {"name": "flow"})["id"]
    ask(f"{api}/deployments/", {"name": "deployment", "flow_id": flow, "work_pool_name": "pool"})

    def look() -> None:
        ask(f"{api}/work_pools/pool/get_scheduled_flow_runs", {"limit": 1})

    def run() -> None:
        run = ask(f"{api}/flow_runs/", {"flow_id": flow, "state": {"type": "PENDING"}})["id"]
        for state in ("RUNNING", "COMPLETED"):
            ask(f"{api}/flow_runs/{run}/set_state", {"state": {"type": state}, "force": True})

    ended = time.monotonic() + 10
    silences: list[str] = []

    def repeat(act: Callable[[], None]) -> None:
        while time.monotonic() < ended and not silences:
            try:
                act()
            except TimeoutError:
                silences.append(act.__name__)

    threads = [threading.Thread(target=repeat, args=(act,)) for act in (look, look, run, run, run)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not silences
