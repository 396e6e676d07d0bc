"""What `up` writes into Prefect's database before its server starts."""

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from flows import pools
from fp8core.end_with_parent import running

pytestmark = pytest.mark.slow


def prepared(home: Path) -> tuple[list[tuple[str, int]], list[tuple[str, str, str, str]]]:
    """Run `python -m flows.pools` and return what the database has: pools and their limits; of every rule its name, id,
    description and when it was changed."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    environment |= {"PREFECT_HOME": str(home), "PREFECT_API_URL": "http://127.0.0.1:9/api"}
    done = subprocess.run(
        [sys.executable, *running("flows.pools")], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    with closing(sqlite3.connect(home / "prefect.db")) as database:
        found = database.execute("select name, concurrency_limit from work_pool order by name").fetchall()
        return found, database.execute("select name, id, description, updated from automation").fetchall()


def test_pools_and_rule_are_made_once_and_brought_up_to_date(tmp_path: Path) -> None:
    made = prepared(tmp_path)
    limits, [(name, rule, description, _)] = made
    assert limits == [(pools.CPU, 1), (pools.GPU, 1)]
    assert name == pools.SILENT
    assert prepared(tmp_path) == made, "a rule that is changed forgets what it has seen"
    with closing(sqlite3.connect(tmp_path / "prefect.db")) as database, database:
        database.execute("update work_pool set concurrency_limit = 2")
        database.execute("update automation set description = 'of an earlier version'")
    limits_again, [again] = prepared(tmp_path)
    assert (limits_again, again[:3]) == (limits, (name, rule, description))
