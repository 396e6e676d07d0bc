"""The pages of a training in Prefect: the graph that its UI asks for, of the training and of each step."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId

from flows.step_runs import FLOW
from fp8core.config.load import load_config
from fp8core.run.open import plan_of

STAGES = ["warm_start-0", "first_scales-0", "first_evaluation-0"]
STEPS = [f"{FLOW} / step {index}" for index in (1, 2, 3)]


@pytest.fixture(scope="module")
def trained(launch: Callable[..., Any]) -> Any:
    return launch("pages", steps=3)


def page(client: SyncPrefectClient, run: Any) -> dict[str, Any]:
    found = client.request("GET", "/flow_runs/{id}/graph-v2", path_params={"id": run}).json()
    return dict(found["nodes"])


def edges(nodes: dict[str, Any]) -> dict[str, set[str]]:
    """Predecessors of each completed node, by label."""
    done = [node for node in nodes.values() if node["state_type"] == "COMPLETED"]
    return {node["label"]: {nodes[parent["id"]]["label"] for parent in node["parents"]} for node in done}


def shown(client: SyncPrefectClient, run: Any, expected: dict[str, set[str]]) -> dict[str, set[str]]:
    """The edges of a page, when they are as expected or a while has passed: the server records tasks when it can."""
    deadline = time.monotonic() + 20
    while (found := edges(page(client, run))) != expected and time.monotonic() < deadline:
        time.sleep(0.5)
    return found


def test_each_step_is_a_flow_run_with_the_edges_of_the_plan(trained: Any) -> None:
    plan = plan_of(load_config("tiny", {}))
    producers = {artifact: step.name for step in plan.steps for artifact in step.outputs.values()}
    wanted = {
        f"{step.name}-2": {f"{producers[read]}-2" for read in step.inputs.values() if read in producers}
        for step in plan.steps
    }
    wanted["commit-2"] = wanted.keys() - set().union(*wanted.values())
    wanted["checkpoint-2"] = {"commit-2"}
    chain = [*STAGES, *STEPS]
    training = trained.state.state_details.flow_run_id
    with get_client(sync_client=True) as client:
        after = {label: set(chain[:place][-1:]) for place, label in enumerate(chain)}
        assert shown(client, training, after) == after
        (second,) = (run for run, node in page(client, training).items() if node["label"] == STEPS[1])
        assert shown(client, second, wanted) == wanted


def test_the_run_has_the_name_of_its_training_and_the_lines_of_the_console(trained: Any) -> None:
    training = trained.state.state_details.flow_run_id
    of_training = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[training]))
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(training).name == trained.name
        deadline, lines = time.monotonic() + 20, list[str]()
        while not any("done" in line for line in lines) and time.monotonic() < deadline:
            time.sleep(0.5)
            lines = [log.message for log in client.read_logs(of_training)]
    assert [line for line in lines if line.startswith("3/3 ")]
    assert [line for line in lines if line.startswith("warm start")]
    assert any(f"{trained.name}: done" in line for line in lines)
    assert not any("\x1b" in line or "\\x1b" in line for line in lines)
