"""What `up` writes into Prefect's database before its server starts."""

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import pytest
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.settings.models.flows import FlowsSettings
from prefect.states import Pending, Running
from waiting import wait_for

from flows import pools
from fp8core.processes.end_with_parent import running

pytestmark = pytest.mark.slow
Server = tuple[str, dict[str, str]]


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
    assert [name for name, *_ in rules] == [pools.SILENT, pools.SILENT_ELSEWHERE, pools.UNBEGUN]
    assert prepared(tmp_path) == made, "a rule that is changed forgets what it has seen"
    with closing(sqlite3.connect(tmp_path / "prefect.db")) as database, database:
        database.execute("update work_pool set concurrency_limit = 2")
        database.execute("update automation set description = 'of an earlier version'")
    limits_again, again = prepared(tmp_path)
    assert (limits_again, [rule[:3] for rule in again]) == (limits, [rule[:3] for rule in rules])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]) -> Iterator[Server]:
    """A server with the rules at the shortest times that Prefect takes: its API, and the environment of its clients."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    environment |= {"PREFECT_HOME": str(tmp_path_factory.mktemp("prefect")), "PREFECT_API_URL": url}
    prepare = (
        "import asyncio; from flows import pools; pools.HEARTBEAT_SECONDS = 3; pools._BEGIN_SECONDS = 10; "
        "asyncio.run(pools._prepare_database())"
    )
    subprocess.run([sys.executable, "-c", prepare], env=environment, check=True, timeout=300)
    command = [sys.executable, *running("flows.prefect_server", "lasting", str(port))]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            with SyncPrefectClient(url) as client:
                wait_for(lambda: client.api_healthcheck() is None, "the server")
            yield url, environment
        finally:
            process.terminate()


_BEGUN = """
import sys
from threading import Event
from prefect import flow

@flow(name="fp8-grpo", flow_run_name=sys.argv[1])
def training():
    print("begun", flush=True)
    Event().wait()

training()
"""


def test_a_run_that_no_worker_started_lives_on_between_heartbeats_of_prefects_own(
    server: Server,
) -> None:
    """The one that a worker started sends them more often: it has crashed."""
    url, environment = server
    with SyncPrefectClient(url) as client:
        flow = client.create_flow_from_name("fp8-grpo")
        deployed = client.create_flow_run_from_deployment(client.create_deployment(flow, "tiny")).id
        client.set_flow_run_state(deployed, Running())
        name = {"prefect.resource.role": "deployment", "prefect.resource.id": "prefect.deployment.tiny"}
        begin = [sys.executable, "-c", _BEGUN, "local"]
        with subprocess.Popen(begin, env=environment, stdout=subprocess.PIPE, text=True) as local:
            try:
                assert local.stdout is not None
                assert local.stdout.readline() == "begun\n"
                (found,) = client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=["local"])))
                heartbeat = {
                    "occurred": datetime.now(UTC).isoformat(),
                    "event": "prefect.flow-run.heartbeat",
                    "id": str(uuid4()),
                    "resource": {"prefect.resource.id": f"prefect.flow-run.{deployed}"},
                    "related": [name],
                }
                client.request("POST", "/events", json=[heartbeat]).raise_for_status()
                wait_for(lambda: client.read_flow_run(deployed).state.is_crashed(), "the rule")
                assert client.read_flow_run(found.id).state.name == "Running"
            finally:
                local.kill()
    frequency = FlowsSettings.model_fields["heartbeat_frequency"].default
    assert 2 * frequency < pools._ELSEWHERE_SECONDS, "one may be late"


def test_a_run_whose_worker_died_before_it_began_has_crashed_and_a_step_that_waits_has_not(
    server: Server,
) -> None:
    with SyncPrefectClient(server[0]) as client:
        flow = client.create_flow_from_name("grpo")
        deployment = client.create_deployment(flow, "tiny", work_pool_name=pools.CPU)
        taken, begun = (client.create_flow_run_from_deployment(deployment).id for _ in range(2))
        for run, state in ((taken, Pending()), (begun, Pending()), (begun, Running())):
            client.set_flow_run_state(run, state)
        step = client.create_flow_run(Flow(lambda: None, name="step"), state=Pending()).id
        wait_for(lambda: client.read_flow_run(taken).state.is_crashed(), "the rule")
        assert [client.read_flow_run(run).state.name for run in (begun, step)] == ["Running", "Pending"]
