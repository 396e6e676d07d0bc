"""Load is sampled when it is due, waits during an outage, and no two processes share a step."""

import time
from datetime import UTC, datetime, timedelta

import pytest
import requests

from flows.tracking.mlflow_backlog import SystemLoad
from flows.tracking.tracker import Tracker


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that are added to the clock that only goes forward."""
    ahead, real = [0.0], time.monotonic
    monkeypatch.setattr("flows.tracking.mlflow_backlog.time.monotonic", lambda: real() + ahead[0])
    return ahead


def begun(seconds_ago: float) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds_ago)).isoformat(timespec="seconds")


def logged(tracker: Tracker) -> dict[int, float]:
    history = tracker.client.get_metric_history(tracker.run_id, "system/cpu_utilization_percentage")
    return {row.step: row.value for row in history}


def test_samples_are_taken_when_due_and_named_as_mlflow_names_them(tracker: Tracker, clock: list[float]) -> None:
    load = SystemLoad(tracker, begun(1000.0))
    load.sample()
    load.publish(tracker)
    assert logged(tracker) == {}
    clock[0] = load.interval + 0.1
    load.sample()
    load.sample()
    load.publish(tracker)
    assert [abs(step - 1000) < 5 for step in logged(tracker)] == [True]
    keys = set(tracker.client.get_run(tracker.run_id).data.metrics)
    assert {"system/system_memory_usage_megabytes", "system/disk_usage_percentage"} < keys


def test_samples_wait_for_the_answer(tracker: Tracker, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    load = SystemLoad(tracker, begun(50.0))
    clock[0] = load.interval + 0.1
    load.sample()

    def away(*_: object) -> None:
        raise requests.ConnectionError

    with monkeypatch.context() as outage:
        outage.setattr(Tracker, "log_metrics", away)
        with pytest.raises(requests.ConnectionError):
            load.publish(tracker)
    for _ in range(2):
        load.publish(tracker)
    assert len(logged(tracker)) == 1
