"""Setup of a Prefect server for our deployments: work pools, and rules for runs whose process is gone.

    python -m flows.pools

writes them into the database of a server before it starts. One that runs with SQLite may fall silent for ever when a
rule is made or changed (Prefect 3.7). Its event loop waits for a lock that a service may hold; the service looks for
changed rules every five seconds. That service in turn waits for the event loop.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

import httpx
from prefect.client.orchestration import PrefectClient, SyncPrefectClient
from prefect.client.schemas.actions import LogCreate, WorkPoolCreate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateName,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import StateType, WorkerStatus
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Crashed
from prefect.workers.process import ProcessWorker

from flows.environment import HEARTBEAT_SECONDS
from flows.prefect_server import prepare_sqlite

CPU, GPU = "fp8-grpo-cpu", "fp8-grpo-gpu"
"""Work pools: trainings that need no GPU, and those that do. Each runs one flow run at a time; the others queue.

`worker_start` keeps the place of a run that is being cancelled.
"""
_POOLS = {
    CPU: "Runs that need no GPU, one at a time. `fp8-grpo up` starts a worker.",
    GPU: "Runs on GPUs, one at a time. `fp8-grpo up` starts a worker where there is a GPU; without one a run waits.",
}
SILENT = "fp8-grpo: a flow run that falls silent has crashed"
SILENT_ELSEWHERE = "fp8-grpo: a flow run that no worker started, and that falls silent for longer, has crashed"
UNBEGUN = "fp8-grpo: a flow run that does not begin has crashed"
# From the moment a worker takes a flow run until its process has imported everything. On a busy machine, minutes.
_BEGIN_SECONDS = 900
# Without a worker, Prefect's own setting holds: one heartbeat in 180 s. One may be late.
_ELSEWHERE_SECONDS = 400
_HEARTBEAT = "prefect.flow-run.heartbeat"
_JOB = {
    # No place for a command, a folder or variables of a run's own: a worker ignores what the server did not check.
    "job_configuration": {"stream_output": True},
    # The server refuses every `job_variables` of a run of a deployment.
    "variables": {"type": "object", "properties": {}, "additionalProperties": False},
}
_UNDER_WAY = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING, StateType.PAUSED]
_ENDS = ("Completed", "Failed", "Crashed", "Cancelled", "Paused", "Suspended")


async def prepare(client: PrefectClient) -> None:
    """Make the work pools and the rule, or bring them up to date.

    Flow runs send heartbeats as the environment of their worker sets it (`service_environment`).

    A worker reports when the process of a flow run dies. The rules are for when the worker died too, as with its
    machine. Without them the run would be shown as pending or running, and hold its place in the pool, for ever.
    """
    for name, words in _POOLS.items():
        pool = WorkPoolCreate(
            name=name, description=words, type=ProcessWorker.type, base_job_template=_JOB, concurrency_limit=1
        )
        await client.create_work_pool(pool, overwrite=True)
    for rule in lost_run_rules(4 * HEARTBEAT_SECONDS, _ELSEWHERE_SECONDS, _BEGIN_SECONDS):
        known = await client.read_automations_by_name(rule.name)
        if not known:
            await client.create_automation(rule)
        elif AutomationCore.model_validate(known[0].model_dump(include=set(AutomationCore.model_fields))) != rule:
            # Only then: a change drops what the rule has seen, and with it runs that are silent already.
            await client.update_automation(known[0].id, rule)


def lost_run_rules(silent: int, elsewhere: int, unbegun: int) -> list[AutomationCore]:
    """Two kinds of flow run have crashed.

    One sent heartbeats, and then neither one nor a final state: for `silent` seconds where a worker started it, else
    for `elsewhere`. Of the other a worker said that it begins, and it did not within `unbegun` seconds. No worker
    starts a step of a training, which is announced long before it begins.
    """
    begins, of_deployment = "prefect.flow-run.Pending", {"prefect.resource.role": "deployment"}
    heard = "No heartbeat for {} s"
    return [
        _rule(SILENT, heard.format(silent), _HEARTBEAT, {_HEARTBEAT}, silent, of_deployment),
        _rule(SILENT_ELSEWHERE, heard.format(elsewhere), _HEARTBEAT, {_HEARTBEAT}, elsewhere, {}),
        _rule(UNBEGUN, f"Not begun within {unbegun} s", begins, {"prefect.flow-run.Running"}, unbegun, of_deployment),
    ]


def _rule(
    name: str, reason: str, after: str, expected: set[str], seconds: int, related: dict[str, str]
) -> AutomationCore:
    return AutomationCore(
        name=name,
        description=f"{reason}. A retry continues the training from its folder.",
        trigger=EventTrigger(
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            match_related=ResourceSpecification(related),
            for_each={"prefect.resource.id"},
            after={after},
            expect={*expected, *(f"prefect.flow-run.{end}" for end in _ENDS)},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=seconds),
        ),
        actions=[
            ChangeFlowRunState(name="Crashed", state=StateType.CRASHED, message=f"{reason}: its machine is gone?")
        ],
    )


def crash(client: SyncPrefectClient, flow_runs: Iterable[str], reason: str) -> None:
    """Set the state Crashed on those of these flow runs that are shown as under way; their processes are gone.

    One attempt, as somebody waits. Raises httpx.HTTPError: the server does not answer, or refuses.
    """
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
        shown = FlowRunFilter(
            id=FlowRunFilterId(any_=[UUID(number) for number in flow_runs]),
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_UNDER_WAY)),
        )
        for run in client.read_flow_runs(flow_run_filter=shown):
            if run.state_name == "Suspended":
                continue  # By a bound, for somebody to resume it: its process ends by itself.
            client.set_flow_run_state(run.id, Crashed(message=reason))


def of_this_machine() -> tuple[list[str], list[str]]:
    """The pools whose runs this machine can serve, and the others, whose runs wait for a worker elsewhere."""
    import torch  # not above: writing the pools does not need it

    return ([CPU, GPU], []) if torch.cuda.is_available() else ([CPU], [GPU])


def worker_start(pool: str) -> list[str]:
    """Arguments of `prefect` for a worker of a pool.

    The pool's limit counts flow runs that are pending or running. A worker's own limit also counts one that is
    cancelled and still commits its step: the next one begins when its process has ended.
    """
    return ["worker", "start", "--pool", pool, "--limit", "1"]


def is_polled(client: SyncPrefectClient, pool: str, worker: str) -> bool:
    return worker in _online(client, pool)


class Unserved:
    def __init__(self, client: SyncPrefectClient, pools: Sequence[str]) -> None:
        self._client, self._pools = client, pools
        self._told: set[UUID] = set()

    def deployments(self) -> list[str]:
        if not self._pools:
            return []
        flows = {flow.id: flow.name for flow in self._client.read_flows()}
        found = self._client.read_deployments(work_pool_filter=_named(self._pools))
        return sorted(f"{flows[deployment.flow_id]}/{deployment.name}" for deployment in found)

    def tell(self) -> None:
        """Write once into the log of each late run that no worker is online: `--watch` and its page show the log.

        Prefect calls a run late 15 seconds after it was due. `--watch` makes the run, then begins to listen. It has no
        earlier line, which one for a run that is merely due might be.
        """
        for pool in self._pools:
            try:
                # One attempt, as the next look comes soon, and the caller looks after a server that ended.
                with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
                    self._tell(pool)
            except httpx.HTTPError:
                return

    def _tell(self, pool: str) -> None:
        late = FlowRunFilter(state=FlowRunFilterState(name=FlowRunFilterStateName(any_=["Late"])))
        waiting = {run.id for run in self._client.read_flow_runs(flow_run_filter=late, work_pool_filter=_named([pool]))}
        self._told &= waiting
        if not waiting - self._told or _online(self._client, pool):
            return
        words = (
            f"No worker of {pool} is online, so this run waits. `fp8-grpo up` starts one on a machine with a GPU; "
            "where it runs on another machine, it prints how a worker reaches this server."
        )
        self._client.create_logs(
            LogCreate(
                name="fp8-grpo", level=logging.WARNING, message=words, timestamp=datetime.now(UTC), flow_run_id=run
            )
            for run in waiting - self._told
        )
        self._told |= waiting


def _named(pools: Sequence[str]) -> WorkPoolFilter:
    return WorkPoolFilter(name=WorkPoolFilterName(any_=[*pools]))


def _online(client: SyncPrefectClient, pool: str) -> set[str]:
    found = client.read_workers_for_work_pool(pool)
    return {worker.name for worker in found if worker.status == WorkerStatus.ONLINE}


async def _prepare_database() -> None:
    from prefect.server.api.server import create_app

    # `webserver_only` leaves out the services that hold the lock, `ephemeral` the UI.
    app = create_app(webserver_only=True, ephemeral=True)
    login = PREFECT_API_AUTH_STRING.value()
    # A client would let it start for 30 s, in which it makes or migrates all tables; here it takes the time it needs.
    async with app.router.lifespan_context(app), PrefectClient(app, auth_string=login) as client:
        await prepare(client)


if __name__ == "__main__":
    prepare_sqlite()
    asyncio.run(_prepare_database())
