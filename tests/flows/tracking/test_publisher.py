"""What is committed arrives in MLflow once, whatever fails on the way, and the training does not wait for it."""

import io
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from flows.tracking.record import TrackingRecord, read_record, write_record
from flows.tracking.session import Session, open_session
from flows.tracking.store import default_tracking_uri
from fp8core.errors import UserError
from fp8core.report.console import Console
from fp8core.report.provenance import Provenance

AWAY = "MLflow does not answer; metrics stay in the ledger and follow\n"
BACK = "MLflow answers again; it has every step up to "


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.tracking.publisher.RETRY_SECONDS", (0.05,))
    monkeypatch.setattr("flows.tracking.publisher.OUTAGE_PATIENCE_SECONDS", 0.3)


@contextmanager
def session_of(copy: Any) -> Iterator[tuple[Session, io.StringIO]]:
    out = io.StringIO()
    with open_session(copy.config, copy.folder.name, Console(out, copy.config.steps)) as session:
        session.publisher.follow_ledger()
        yield session, out


def publish(copy: Any) -> str:
    """Open a training whose steps are done, and close it; returns what the console said after its header."""
    with session_of(copy) as (session, out):
        session.publisher.add_result()
    return "".join(out.getvalue().splitlines(keepends=True)[3:])


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.fixture(scope="module")
def expected(runs, copy_of_trained, shown) -> Any:
    """What MLflow shows when nothing fails, on sqlite without a server."""
    copy = copy_of_trained(default_tracking_uri(runs))
    assert publish(copy) == ""
    return shown(copy.config)


def test_everything_is_there(expected, copy_of_trained, mlflow_server, shown) -> None:
    (run,) = expected.runs
    assert run["status"] == "FINISHED"
    assert [step for step, _ in run["metrics"]["reward/mean"]] == [1, 2, 3]
    assert [step for step, _ in run["metrics"]["reward/heldout_accuracy"]] == [0, 2, 3]
    assert {f"manifests/{step:05d}.json" for step in range(4)} < set(run["files"])
    tables = {f"{folder}/step_00000{step}.json" for folder in ("samples", "artifacts") for step in (1, 3)}
    result = {"pictures/curves.png", "summary.json", "report.html"}
    assert {*tables, *result, "config.yaml", "graph.md", "graph.txt"} < set(run["files"])
    assert [name for name, _ in run["datasets"]] == ["chain-heldout", "chain-training"]
    assert [(model["name"], model["status"]) for model in expected.models] == [
        ("tiny-run-00002", "READY"),
        ("tiny-run-00003", "READY"),
    ]
    copy = copy_of_trained(mlflow_server)
    assert publish(copy) == ""
    assert shown(copy.config) == expected, "a server shows the same"


def test_publishing_all_of_it_again_changes_nothing(expected, copy_of_trained, mlflow_server, shown) -> None:
    copy = copy_of_trained(mlflow_server)
    publish(copy)
    (copy.folder / "tracking.json").unlink()
    publish(copy)
    assert shown(copy.config) == expected


def test_a_resume_asks_for_no_history_and_writes_no_step_again(copy_of_trained, network) -> None:
    copy = copy_of_trained(network.uri)
    publish(copy)
    first = len(network.requests)
    publish(copy)
    again = network.requests[first:]
    assert not any("metrics/get-history" in request or "manifests" in request for request in again)
    assert len(again) < 25, "so many for any number of steps"


def test_a_killed_neighbour_is_shown_as_killed(copy_of_trained, runs, open_tracker) -> None:
    copy, neighbour = copy_of_trained(default_tracking_uri(runs)), open_tracker()
    folder = copy.folder.with_name("neighbour")
    folder.mkdir()
    (folder / "ledger.jsonl").touch()
    write_record(folder, TrackingRecord.begun(neighbour.uri, neighbour.experiment_id, neighbour.run_id))
    publish(copy)
    assert neighbour.client.get_run(neighbour.run_id).info.status == "KILLED"


# --- outages ---


def test_the_training_does_not_wait_and_all_of_it_arrives_later(expected, copy_of_trained, network, shown) -> None:
    copy = copy_of_trained(network.uri)
    with session_of(copy) as (session, out):
        assert within(10, lambda: read_record(copy.folder).published >= 1)
        network.unplug()
        assert within(10, lambda: AWAY in out.getvalue())
        began = time.perf_counter()
        for _ in range(100):
            session.publisher.wake()
        session.publisher.add_result()
        assert time.perf_counter() - began < 0.1
        time.sleep(0.2)
        network.plug_in()
        assert within(10, lambda: BACK in out.getvalue())
    assert out.getvalue().count(AWAY) == 1
    assert out.getvalue().count(BACK) == 1
    assert shown(copy.config) == expected


def test_a_server_that_stays_away_is_not_waited_for_and_a_resume_delivers(
    expected, copy_of_trained, network, shown
) -> None:
    copy = copy_of_trained(network.uri)
    with session_of(copy) as (session, out):
        assert within(10, lambda: read_record(copy.folder).published >= 0)
        network.unplug()
        session.publisher.add_result()
        began = time.perf_counter()
    assert time.perf_counter() - began < 3
    assert out.getvalue().endswith("to 3 will follow: fp8-grpo resume tiny-run\n")
    record = read_record(copy.folder)
    assert (record.status, record.told) == ("FINISHED", False)
    # Continued while the server is still away: what it does not know waits on.
    assert publish(copy).endswith("to 3 will follow: fp8-grpo resume tiny-run\n")
    network.plug_in()
    assert publish(copy) == ""
    assert shown(copy.config) == expected


def test_a_new_run_needs_its_server(copy_of_trained, network) -> None:
    network.unplug()
    copy = copy_of_trained(network.uri)
    with pytest.raises(UserError, match=rf"^tracking\.uri {network.uri}: .*refused"):
        publish(copy)
    assert read_record(copy.folder) is None
    network.plug_in()


def test_a_failed_or_stopped_training_says_so_without_waiting(copy_of_trained, network, shown) -> None:
    copy = copy_of_trained(network.uri)
    with pytest.raises(KeyboardInterrupt), session_of(copy):
        raise KeyboardInterrupt
    assert shown(copy.config).runs[0]["status"] == "KILLED"
    with pytest.raises(ValueError, match="broken"), session_of(copy):
        raise ValueError("broken")
    (run,) = shown(copy.config).runs
    assert (run["status"], run["tags"]["error"]) == ("FAILED", "broken")
    with pytest.raises(ValueError, match="again"), session_of(copy) as (_, out):
        fail_during_an_outage(network)
    assert out.getvalue().endswith(AWAY)
    record = read_record(copy.folder)
    assert (record.status, record.error, record.told) == ("FAILED", "again", False)
    network.plug_in()


def fail_during_an_outage(network: Any) -> None:
    network.unplug()
    raise ValueError("again")


# --- what is no outage ---


def go_on_without_the_mlflow_run(copy: Any) -> None:
    with session_of(copy) as (session, _):
        session.tracker.client.delete_run(session.tracker.run_id)
        session.publisher.add_result()
        for _ in range(1000):
            session.publisher.wake()
            time.sleep(0.01)
        pytest.fail("ten seconds of training that nobody sees")


def test_a_failed_training_leaves_its_report_behind_what_is_committed(copy_of_trained, runs, shown) -> None:
    copy = copy_of_trained(default_tracking_uri(runs))
    (copy.folder / "report.html").write_text("of before")
    with pytest.raises(ValueError, match="broken"), session_of(copy):
        raise ValueError("broken")
    (run,) = shown(copy.config).runs
    assert "report.html" in run["files"]
    assert [step for step, _ in run["metrics"]["reward/mean"]] == [1, 2, 3]
    assert "<title>tiny-run</title>" in (copy.folder / "report.html").read_text()


def test_what_mlflow_refuses_fails_the_training_at_its_next_commit(copy_of_trained, runs) -> None:
    copy = copy_of_trained(default_tracking_uri(runs))
    publish(copy)
    with pytest.raises(UserError, match=r"^tracking\.uri sqlite:.*must be in the 'active' state"):
        go_on_without_the_mlflow_run(copy)
    with pytest.raises(UserError, match="is deleted"):
        publish(copy)


def test_a_damaged_artifact_is_named_and_fails_the_training(copy_of_trained, runs, shown) -> None:
    copy = copy_of_trained(default_tracking_uri(runs))
    step = '"kind":"metrics","digest":"'
    line = next(line for line in (copy.folder / "ledger.jsonl").read_text().splitlines() if step in line)
    digest = line.partition(step)[2][:64]
    (copy.folder / "artifacts" / digest[:2] / f"{digest}.json").write_text("{}")
    with pytest.raises(UserError, match=digest):
        publish(copy)
    (run,) = shown(copy.config).runs
    assert run["status"] == "FAILED"
    assert digest in run["tags"]["error"]
    assert [step for step, _ in run["metrics"]["reward/heldout_accuracy"]] == [0], "no step is left out silently"


# --- answers that are lost ---

WRITES = [
    r"POST .*/experiments/create",
    r"POST .*/runs/create",
    r"POST .*/runs/update",
    r"POST .*/runs/log-batch",
    r"POST .*/runs/log-inputs",
    r"PUT .*/manifests/00001.json",
    r"PUT .*/samples/step_000003.json",
    r"POST .*/logged-models$",
    r"POST .*/runs/outputs",
    r"PATCH .*/logged-models/",
]


def test_lost_answers_leave_nothing_twice(expected, copy_of_trained, network, shown, monkeypatch) -> None:
    monkeypatch.setattr("flows.tracking.publisher.OUTAGE_PATIENCE_SECONDS", 30.0)
    copy = copy_of_trained(network.uri)
    publish_until_opened(copy, network)
    for pattern in WRITES[2:]:
        network.lose(pattern)
        network.lose(pattern)
    assert publish(copy).count(AWAY) >= 1
    assert network.faults_left == []
    assert shown(copy.config) == expected


def publish_until_opened(copy: Any, network: Any) -> None:
    """A new run that never hears that its MLflow run was created is refused; the next attempt finds what is there."""
    for pattern in WRITES[:2]:
        network.lose(pattern)
        with pytest.raises(UserError, match=r"tracking\.uri"):
            publish(copy)


def survives(copy: Any, network: Any, pattern: str, skip: int = 0) -> bool:
    """Whether a process of its own publishes all, where SIGKILL takes the place of the answer to one request."""
    child = os.fork()
    if child == 0:
        time.sleep(0.05)
        try:
            publish(copy)
        finally:
            os._exit(0)
    network.lose(pattern, lambda: os.kill(child, signal.SIGKILL), skip)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # Its number stays its own until no request can kill it.
    network.lose_no_more()
    _, status = os.waitpid(child, 0)
    return os.WIFEXITED(status)


@pytest.mark.parametrize("pattern", [WRITES[1], WRITES[3], WRITES[7]])
def test_a_kill_before_the_answer_leaves_nothing_twice(expected, copy_of_trained, network, shown, pattern) -> None:
    copy = copy_of_trained(network.uri)
    assert not survives(copy, network, pattern)
    assert publish(copy) == ""
    assert shown(copy.config) == expected


@pytest.mark.slow
def test_kills_before_every_answer_leave_nothing_twice(expected, copy_of_trained, network, shown) -> None:
    whole = copy_of_trained(network.uri)
    publish(whole)
    requests = len(network.requests)
    assert requests > 40
    for number in range(requests):
        copy = copy_of_trained(network.uri)
        assert not survives(copy, network, ".", skip=number)
        publish(copy)
        assert shown(copy.config) == expected, f"killed at request {number}"


def test_a_failed_training_does_not_wait_for_a_long_report(copy_of_trained, network, monkeypatch) -> None:
    copy = copy_of_trained(network.uri)
    publish(copy)
    read, add = [], Provenance.add
    monkeypatch.setattr("flows.tracking.publisher.STOPPED_PATIENCE_SECONDS", 3.0)
    monkeypatch.setattr(Provenance, "add", lambda *of: (read.append(of), time.sleep(4), add(*of))[2])
    with pytest.raises(RuntimeError, match="broken"), session_of(copy) as (_, out):
        raise RuntimeError("broken")
    assert len(read) == 1, "the run has four steps"
    assert "no report: it takes too long; `fp8-grpo report` makes it\n" in out.getvalue()
