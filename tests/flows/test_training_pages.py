"""Pages of a training's steps while the server is away, and what a killed process left of them."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect import flow, runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags

from flows.training_pages import TrainingPages

pytestmark = pytest.mark.usefixtures("prefect_server")


class Run:
    """As much of a run as its pages ask for."""

    def __init__(self) -> None:
        self.id, self.notes = uuid4().hex, list[str]()
        self.directory = SimpleNamespace(path=Path("run"), description=lambda: SimpleNamespace(id=self.id))
        self.console = SimpleNamespace(note=self.notes.append)
        self.config = SimpleNamespace(steps=5)

    def steps(self) -> list[tuple[str, str]]:
        tagged = FlowRunFilter(tags=FlowRunFilterTags(all_=[f"run-{self.id}"]))
        with get_client(sync_client=True) as client:
            found = client.read_flow_runs(flow_run_filter=tagged)
        return sorted((step.name, step.state_type.value) for step in found if step.state_type is not None)


def in_a_flow(body: Callable[[], None]) -> UUID:
    @flow(name="alone", persist_result=False)
    def alone() -> UUID:
        body()
        return UUID(runtime.flow_run.id)

    return alone()


def test_steps_of_a_failed_a_killed_and_a_stopped_training_do_not_stay_running() -> None:
    run: Any = Run()

    def failed() -> None:
        with TrainingPages(run) as pages:
            pages.begin_step(1, [])
            raise ValueError("broken")

    def killed() -> None:
        pages = TrainingPages(run).__enter__()
        pages.begin_step(2, [])
        pages._ask(lambda: None).result()
        assert {("step 2", "RUNNING"), ("step 3", "PENDING")} < {*run.steps()}

    def continued() -> None:
        with TrainingPages(run) as pages:
            pages.start({"MLflow": "http://mlflow"})
            pages.begin_step(3, [])

    with pytest.raises(ValueError, match="broken"):
        in_a_flow(failed)
    in_a_flow(killed)
    in_a_flow(continued)
    assert run.steps() == [
        ("step 1", "FAILED"),
        *(("step 2", "CANCELLED"), ("step 2", "CRASHED")),
        *(("step 3", "CANCELLED"), ("step 3", "CRASHED")),
        ("step 4", "CANCELLED"),
    ]
