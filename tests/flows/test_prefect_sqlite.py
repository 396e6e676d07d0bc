"""Prefect's server on SQLite answers while transactions are refused, and what is repeated does not fill its log."""

import asyncio
import gc
import importlib
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from prefect.settings import PREFECT_SERVER_LOG_RETRYABLE_ERRORS, temporary_settings
from sqlalchemy import event
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from flows.cli.up import server_command
from flows.prefect_server import LockFirst, prepare_sqlite

BUSY_SECONDS = 6.0


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Nothing is collected unasked, and what was alive before is not looked at."""
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
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
    with only_new_garbage():
        assert asyncio.run(seconds_of_a_collection(tmp_path / "numbers.db")) < BUSY_SECONDS / 2


@pytest.mark.parametrize("logger", ["docket.dependencies", "prefect.server.models.deployments"])
def test_a_refused_transaction_that_is_repeated_is_in_the_log_only_when_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, logger: str
) -> None:
    prepare_sqlite()
    repeated = logging.getLogger(logger)
    monkeypatch.setattr(logging.getLogger("prefect"), "propagate", True)  # `caplog` listens at the root.

    async def log_a_refusal() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/numbers.db", isolation_level="AUTOCOMMIT")
        async with engine.connect() as reader, engine.connect() as writer:
            await writer.exec_driver_sql("PRAGMA journal_mode = WAL")
            await writer.exec_driver_sql("CREATE TABLE IF NOT EXISTS numbers (number)")
            refused = await refuse(reader, writer)
        repeated.error("again: a refusal", exc_info=refused)
        repeated.error("again: another mistake", exc_info=ValueError("mine"))
        await engine.dispose()

    asyncio.run(log_a_refusal())
    assert [record.message for record in caplog.records] == ["again: another mistake"]
    with temporary_settings({PREFECT_SERVER_LOG_RETRYABLE_ERRORS: True}):
        asyncio.run(log_a_refusal())
    assert "again: a refusal" in [record.message for record in caplog.records]


def test_a_change_of_a_deployment_waits_for_the_lock_where_others_are_refused(tmp_path: Path) -> None:
    prepare_sqlite()
    seen: list[str] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/numbers.db", isolation_level="AUTOCOMMIT")
        async with engine.connect() as reader, engine.connect() as writer:
            await writer.exec_driver_sql("PRAGMA journal_mode = WAL")
            await writer.exec_driver_sql("PRAGMA busy_timeout = 100")
            await writer.exec_driver_sql("CREATE TABLE IF NOT EXISTS numbers (number)")
            await reader.exec_driver_sql("BEGIN DEFERRED")  # As Prefect does.
            (await reader.exec_driver_sql("SELECT * FROM numbers")).all()
            try:
                await writer.exec_driver_sql("INSERT INTO numbers VALUES (1)")
                seen.append("the other writes")
            except OperationalError:
                seen.append("the other waits")
            await reader.exec_driver_sql("ROLLBACK")
        await engine.dispose()

    async def ask(*requests: tuple[str, str]) -> None:
        for method, path in requests:
            await LockFirst(application)({"type": "http", "method": method, "path": path}, None, None)

    asyncio.run(ask(("PATCH", "/api/deployments/1"), ("GET", "/api/deployments/1"), ("POST", "/api/flow_runs/")))
    assert seen == ["the other waits", "the other writes", "the other writes"]


# --- a real server ---


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/prefect_stalls.py."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    return importlib.import_module("benchmarks.prefect_stalls")


@pytest.mark.slow
def test_the_server_of_up_is_never_silent(silence: ModuleType, tmp_path: Path) -> None:
    """As long as Prefect lets a connection wait for the lock: 60 s. A training's server is the same program."""
    with silence.serving(server_command, tmp_path, {}) as api:
        assert silence.ask_much(api, seconds=5).silence < 20
