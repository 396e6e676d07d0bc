"""Prefect shows the progress, the reports and the MLflow run of a training, which does not wait for it."""

import io
import threading
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
from flows.tracking import session as module
from flows.tracking.session import Publisher, publishing
from flows.tracking.store import Outage, Refusal
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
        with publishing(run.console, artifacts) as publisher:
            for index in range(1, 5):
                artifacts.step_done(index)
                publisher.wake()
            wait_for(lambda: prefect.refused, seconds=20)
            prefect.error = None
            wait_for(lambda: any(posted.description == "Step 4 of 4" for posted in prefect.posted), seconds=20)
    assert prefect.keys() == ["whole-1-progress", "whole-3-mlflow", "whole-2-report", "whole-2-report"]
    progress, link, *reports = prefect.posted
    assert progress.data == 100.0
    assert link.data == "[MLflow run](http://mlflow)"
    assert [report.description for report in reports] == ["Step 2 of 4", "Step 4 of 4"]
    assert run_copy.said.count("Prefect does not answer") == 1
    assert run_copy.said.count("Prefect answers again") == 1


def test_what_is_refused_is_said_and_left_out(prefect, run_copy) -> None:
    prefect.error = status_error(422)
    with run_copy.opened() as run, publishing(run.console, PrefectArtifacts(run, "http://mlflow", None, prefect)):
        pass
    assert run_copy.said.count("left out of what Prefect shows: status 422") == 2


def test_metrics_that_are_gone_cost_a_report_only(prefect, run_copy) -> None:
    run_copy.file(4, "metrics").unlink()
    with run_copy.opened() as run:
        artifacts = PrefectArtifacts(run, "http://mlflow", None, prefect)
        with publishing(run.console, artifacts):
            artifacts.step_done(4)
    assert "left out of what Prefect shows" in run_copy.said
    assert prefect.keys() == ["whole-1-progress", "whole-3-mlflow"]


def test_the_end_of_a_training_does_not_wait_for_a_server_that_is_away(prefect, run_copy, monkeypatch) -> None:
    monkeypatch.setattr("flows.orchestration.PATIENCE_SECONDS", 0.5)
    prefect.error = httpx.ConnectError("no answer")
    with run_copy.opened() as run:
        artifacts = PrefectArtifacts(run, "http://mlflow", None, prefect)
        began = time.perf_counter()
        with publishing(run.console, artifacts) as publisher:
            for _ in range(1000):
                artifacts.step_done(1)
                publisher.wake()
        assert time.perf_counter() - began < 2.0
    assert prefect.posted == []


class Service:
    """A destination of the publisher: `error` is what an attempt raises."""

    outage_note = "it follows"
    idle_seconds = None

    def __init__(self, name: str, patience: float = 0.2) -> None:
        self.name, self.patience = name, patience
        self.error: Exception | None = None
        self.waiting = 0
        self.got: list[float] = []

    def publish(self) -> Iterator[None]:
        while self.waiting:
            if self.error is not None:
                raise self.error
            self.waiting -= 1
            self.got.append(time.monotonic())
            yield

    def caught_up(self) -> str:
        return ""


@pytest.mark.parametrize("error", [Outage("gone"), Refusal("no")])
def test_an_outage_of_one_service_does_not_delay_the_other(error, monkeypatch) -> None:
    """The first one's pause is longer than the test."""
    monkeypatch.setattr(module, "RETRY_SECONDS", (60.0,))
    away, sound, out = Service("First"), Service("Second"), io.StringIO()
    away.error, away.waiting = error, 1
    publisher = Publisher(Console(out, 1), away)
    publisher.add(sound)
    for count in range(1, 6):
        sound.waiting += 1
        publisher.wake()
        wait_for(lambda count=count: len(sound.got) == count, seconds=5)
    began = time.monotonic()
    publisher.close()
    assert time.monotonic() - began < 5
    assert out.getvalue().count("First") == 1
    assert "Second" not in out.getvalue()


def test_one_thread_serves_both_in_turn(monkeypatch) -> None:
    """A long backlog of the first does not hold up the second."""
    first, second, out = Service("First"), Service("Second"), io.StringIO()
    begin = threading.Event()
    monkeypatch.setattr(first, "publish", lambda original=first.publish: (begin.wait(10), original())[1])
    first.waiting, second.waiting = 200, 3
    before = threading.active_count()
    publisher = Publisher(Console(out, 1), first)
    publisher.add(second)
    assert threading.active_count() == before + 1
    begin.set()
    publisher.close()
    assert sum(at < second.got[-1] for at in first.got) < 50
    assert len(first.got) == 200
