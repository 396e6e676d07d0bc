"""Changes to the process of Prefect's server when it keeps its data in SQLite, as it does by default.

    python -m flows.prefect_sqlite ARGUMENTS

is the `prefect` command in such a process. Nothing changes with PostgreSQL.

SQLite refuses a transaction that has read and now writes, at once, when another one wrote in between ("database is
locked"). Prefect 3.7 has many such transactions, makes one at every look of a worker (`mark_deployments_ready`), and
repeats them. But aiosqlite gives each connection a thread, and SQLAlchemy 2.0 leaves the cursor of a failed statement
open. The frames of the exception, a cycle, hold it until Python collects garbage, mostly in the thread of the event
loop. To end the cursor there takes the connection's mutex. While that connection waits for SQLite's write lock, the
event loop waits too; the holder of the lock needs the event loop to release it. The whole server is silent until the
connection gives up, which is after 60 s with Prefect. So a cursor whose statement failed is closed here by the thread
that ran it.
"""

import logging
import sqlite3
from collections.abc import MutableMapping, Sequence
from typing import Any, Self

from sqlalchemy import Dialect, Engine, event


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

    Prefect omits such errors from its log unless PREFECT_SERVER_LOG_RETRYABLE_ERRORS is set. It does not omit them
    under the name that docket (its queue of background work) gives to repeated work.
    """
    event.listen(Engine, "do_connect", _make_ours)
    logging.getLogger("docket.dependencies").addFilter(_is_news)


def _make_ours(dialect: Dialect, record: Any, arguments: Sequence[Any], options: MutableMapping[str, Any]) -> None:
    if dialect.driver == "aiosqlite":
        options["factory"] = _Connection


def _is_news(record: logging.LogRecord) -> bool:
    from prefect.settings import get_current_settings

    error = record.exc_info[1] if record.exc_info else None
    refused = getattr(getattr(error, "orig", None), "sqlite_errorname", "").startswith("SQLITE_BUSY")
    return not refused or get_current_settings().server.log_retryable_errors


if __name__ == "__main__":
    prepare_sqlite()
    from prefect.cli import app

    app()
