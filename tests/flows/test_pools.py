"""What `up` writes into Prefect's database before its server starts."""

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.states import Pending, Running
from waiting import wait_for

from flows import pools
from fp8core.processes.end_with_parent import running

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


def test_pools_and_rules_are_made_once_and_brought_up_to_date(tmp_path: Path) -> None:
    made = prepared(tmp_path)
    limits, rules = made
    assert limits == [(pools.CPU, 1), (pools.GPU, 1)]
    assert [name for name, *_ in rules] == [pools.SILENT, pools.UNBEGUN]
    assert prepared(tmp_path) == made, "a rule that is changed forgets what it has seen"
    with closing(sqlite3.connect(tmp_path / "prefect.db")) as database, database:
        database.execute("update work_pool set concurrency_limit = 2")
        database.execute("update automation set description = 'of an earlier version'")
    limits_again, again = prepared(tmp_path)
    assert (limits_again, [rule[:3] for rule in again]) == (limits, [rule[:3] for rule in rules])


def test_a_run_whose_worker_died_before_it_began_has_crashed_and_a_step_that_waits_has_not(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    environment |= {"PREFECT_HOME": str(tmp_path), "PREFECT_API_URL": url}
    # The shortest that Prefect takes.
    prepare = (
        "import asyncio; from flows import pools; pools._BEGIN_SECONDS = 10; asyncio.run(pools._prepare_database())"
    )
    subprocess.run([sys.executable, "-c", prepare], env=environment, check=True, timeout=300)
    server = [sys.executable, *running("flows.prefect_server", "lasting", str(port))]
    with subprocess.Popen(server, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            with SyncPrefectClient(url) as client:
                wait_for(lambda: client.api_healthcheck() is None, "the server")
                flow = client.create_flow_from_name("grpo")
                deployment = client.create_deployment(flow, "tiny", work_pool_name=pools.CPU)
                taken, begun = (client.create_flow_run_from_deployment(deployment).id for _ in range(2))
                for run, state in ((taken, Pending()), (begun, Pending()), (begun, Running())):
                    client.set_flow_run_state(run, state)
                step = client.create_flow_run(Flow(lambda: None, name="step"), state=Pending()).id
                wait_for(lambda: client.read_flow_run(taken).state.is_crashed(), "the rule")
                assert [client.read_flow_run(run).state.name for run in (begun, step)] == ["Running", "Pending"]
        finally:
            process.terminate()
