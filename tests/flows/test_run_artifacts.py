import time
from collections.abc import Callable
from uuid import uuid4

import httpx
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

from flows.tracking import prefect_artifacts
from flows.tracking.prefect_artifacts import RunArtifacts


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


def test_prefect_shows_progress_reports_and_the_way_to_mlflow(launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefect_artifacts, "PATIENCE_SECONDS", 120.0)
    finished = launch("Shown_Run", steps=3, overrides={"tracking.report_every": 2})
    flow_run = finished.state.state_details.flow_run_id
    with get_client(sync_client=True) as client:
        mine = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run]))
        found = client.read_artifacts(artifact_filter=mine)
    by_key = {artifact.key: artifact for artifact in found}
    assert set(by_key) == {"progress-shown-run", "report-shown-run", "mlflow-shown-run"}
    assert by_key["progress-shown-run"].data == 100
    assert finished.mlflow_run().info.run_id in by_key["mlflow-shown-run"].data
    reports = sorted(artifact.data.splitlines()[0] for artifact in found if artifact.key == "report-shown-run")
    assert reports == ["**Shown_Run**: step 2 of 3", "**Shown_Run**: step 3 of 3"]


class Prefect:
    """What the artifacts are posted to: `answer` raises what is set, else what is posted is kept."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.posted: list[tuple[object, ...]] = []

    def answer(self, *arguments: object) -> object:
        if self.error is not None:
            raise self.error
        self.posted.append(arguments)
        return uuid4()


@pytest.fixture
def prefect(monkeypatch: pytest.MonkeyPatch) -> Prefect:
    stand_in = Prefect()
    for name in ("create_link", "create_markdown", "create_progress", "update_progress"):
        monkeypatch.setattr(prefect_artifacts, f"{name}_artifact", stand_in.answer)
    monkeypatch.setattr(prefect_artifacts, "RETRY_SECONDS", 0.01)
    return stand_in


def status_error(status: int) -> httpx.HTTPStatusError:
    response = httpx.Response(status, request=httpx.Request("POST", "http://prefect/artifacts"))
    return httpx.HTTPStatusError(f"status {status}", request=response.request, response=response)


@pytest.mark.parametrize("error", [httpx.ConnectError("no answer"), status_error(503), OSError("no route")])
def test_a_server_that_is_away_gets_everything_when_it_is_back(error, prefect, run_copy) -> None:
    prefect.error = error
    with run_copy.opened(**{"tracking.report_every": 2}) as run:
        artifacts = RunArtifacts(run, "http://mlflow")
        for index in range(1, 5):
            artifacts.step_done(index)
        time.sleep(0.1)
        prefect.error = None
        assert within(20, lambda: any("Step 4 of 4" in arguments for arguments in prefect.posted))
        artifacts.close()
    link, progress, *reports = prefect.posted
    assert link[0] == "http://mlflow"
    assert progress[0] == 100.0
    assert [report[2] for report in reports] == ["Step 2 of 4", "Step 4 of 4"]
    assert run_copy.said.count("Prefect does not answer") == 1
    assert run_copy.said.count("Prefect answers again") == 1


def test_what_is_refused_is_said_and_left_out(prefect, run_copy) -> None:
    prefect.error = status_error(422)
    with run_copy.opened() as run:
        artifacts = RunArtifacts(run, "http://mlflow")
        artifacts.close()
    assert run_copy.said.count("left out of what Prefect shows: status 422") == 2


def test_metrics_that_are_gone_cost_a_report_only(prefect, run_copy) -> None:
    run_copy.file(4, "metrics").unlink()
    with run_copy.opened() as run:
        artifacts = RunArtifacts(run, "http://mlflow")
        artifacts.step_done(4)
        artifacts.close()
    assert "left out of what Prefect shows" in run_copy.said
    assert prefect.posted
    assert not [post for post in prefect.posted if "report-" in str(post)]


def test_the_end_of_a_training_does_not_wait_for_a_server_that_is_away(prefect, run_copy) -> None:
    prefect.error = httpx.ConnectError("no answer")
    with run_copy.opened() as run:
        artifacts = RunArtifacts(run, "http://mlflow")
        began = time.perf_counter()
        for _ in range(1000):
            artifacts.step_done(1)
        artifacts.close()
        assert time.perf_counter() - began < 2.0
    assert prefect.posted == []
