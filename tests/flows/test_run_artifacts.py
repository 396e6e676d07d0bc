"""Prefect shows the progress, the reports and the MLflow run of a training, which does not wait for it."""

import io
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import httpx
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from waiting import wait_for

from flows.orchestration import PrefectArtifacts
from flows.tracking import publisher as module
from flows.tracking.publisher import Publisher
from flows.tracking.tracker import Outage, Refusal
from fp8core.errors import UserError
from fp8core.report.console import Console


def test_prefect_shows_progress_reports_and_the_way_to_mlflow(launch) -> None:
    finished = launch("Shown_Run", steps=3, overrides={"tracking.report_every": 2})
    flow_run = finished.state.state_details.flow_run_id
    with get_client(sync_client=True) as client:
        mine = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run]))
        found = client.read_artifacts(artifact_filter=mine)
    by_key = {artifact.key: artifact for artifact in found}
    assert set(by_key) == {"shown-run-1-progress", "shown-run-2-report", "shown-run-3-mlflow"}
    assert by_key["shown-run-1-progress"].data == 100
    assert finished.mlflow_run().info.run_id in by_key["shown-run-3-mlflow"].data
    reports = sorted(artifact.data.splitlines()[0] for artifact in found if artifact.key == "shown-run-2-report")
    assert reports == ["**Shown_Run**: step 2 of 3", "**Shown_Run**: step 3 of 3"]


class Prefect:
    """A client of Prefect's server: a request raises `error` if it is set, else what is posted is kept."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.refused = False
        self.posted: list[Any] = []

    def create_artifact(self, artifact: Any) -> Any:
        if self.error is not None:
            self.refused = True
            raise self.error
        self.posted.append(artifact)
        return type("Created", (), {"id": uuid4()})

    def update_artifact(self, artifact_id: object, artifact: Any) -> None:
        self.create_artifact(artifact)

    def keys(self) -> list[str]:
        return [artifact.key for artifact in self.posted if hasattr(artifact, "key")]


@pytest.fixture
def prefect(monkeypatch: pytest.MonkeyPatch) -> Prefect:
    monkeypatch.setattr(module, "RETRY_SECONDS", (0.01,))
    return Prefect()


def status_error(status: int) -> httpx.HTTPStatusError:
    response = httpx.Response(status, request=httpx.Request("POST", "http://prefect/artifacts"))
    return httpx.HTTPStatusError(f"status {status}", request=response.request, response=response)


@pytest.mark.parametrize("error", [httpx.ConnectError("no answer"), status_error(503), OSError("no route")])
def test_a_server_that_is_away_gets_everything_when_it_is_back(error, prefect, run_copy) -> None:
    prefect.error = error
    with run_copy.opened(**{"tracking.report_every": 2}) as run:
        artifacts = PrefectArtifacts(run, "http://mlflow", None, prefect)
        publisher = Publisher(artifacts, run.console)
        for index in range(1, 5):
            artifacts.step_done(index)
            publisher.wake()
        wait_for(lambda: prefect.refused, seconds=20)
        prefect.error = None
        wait_for(lambda: any(posted.description == "Step 4 of 4" for posted in prefect.posted), seconds=20)
        publisher.close()
    assert prefect.keys() == ["whole-1-progress", "whole-3-mlflow", "whole-2-report", "whole-2-report"]
    progress, link, *reports = prefect.posted
    assert progress.data == 100.0
    assert link.data == "[MLflow run](http://mlflow)"
    assert [report.description for report in reports] == ["Step 2 of 4", "Step 4 of 4"]
    assert run_copy.said.count("Prefect does not answer") == 1
    assert run_copy.said.count("Prefect answers again") == 1


def test_what_is_refused_is_said_and_left_out(prefect, run_copy) -> None:
    prefect.error = status_error(422)
    with run_copy.opened() as run:
        Publisher(PrefectArtifacts(run, "http://mlflow", None, prefect), run.console).close()
    assert run_copy.said.count("left out of what Prefect shows: status 422") == 2


def test_metrics_that_are_gone_cost_a_report_only(prefect, run_copy) -> None:
    run_copy.file(4, "metrics").unlink()
    with run_copy.opened() as run:
        artifacts = PrefectArtifacts(run, "http://mlflow", None, prefect)
        artifacts.step_done(4)
        Publisher(artifacts, run.console).close()
    assert "left out of what Prefect shows" in run_copy.said
    assert prefect.keys() == ["whole-1-progress", "whole-3-mlflow"]


def test_the_end_of_a_training_does_not_wait_for_a_server_that_is_away(prefect, run_copy, monkeypatch) -> None:
    monkeypatch.setattr("flows.orchestration.PATIENCE_SECONDS", 0.5)
    prefect.error = httpx.ConnectError("no answer")
    with run_copy.opened() as run:
        artifacts = PrefectArtifacts(run, "http://mlflow", None, prefect)
        began = time.perf_counter()
        publisher = Publisher(artifacts, run.console)
        for _ in range(1000):
            artifacts.step_done(1)
            publisher.wake()
        publisher.close()
        assert time.perf_counter() - began < 2.0
    assert prefect.posted == []


class Service:
    """A destination of the publisher: `error` is what an attempt raises."""

    name, outage_note, patience = "Service", "it follows", 0.2

    def __init__(self, error: Exception) -> None:
        self.error: Exception | None = error
        self.got = 0

    def publish(self) -> Iterator[None]:
        if self.error is not None:
            raise self.error
        self.got += 1
        yield

    def caught_up(self) -> str:
        return ""


@pytest.mark.parametrize("error", [Outage("gone"), Refusal("no")])
def test_the_end_of_a_training_ends_a_pause(error, monkeypatch) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", (60.0,))
    service, out = Service(error), io.StringIO()
    publisher = Publisher(service, Console(out, 1))
    wait_for(lambda: out.getvalue().count("Service") == 1, seconds=5)
    service.error = None
    began = time.monotonic()
    publisher.close()
    assert time.monotonic() - began < 5
    assert service.got == 1


def test_what_a_service_finds_wrong_with_the_run_reaches_the_training() -> None:
    publisher = Publisher(Service(UserError("rewritten")), Console(io.StringIO(), 1))
    with pytest.raises(UserError, match="rewritten"):
        publisher.close()
