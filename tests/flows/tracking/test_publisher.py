"""What is committed arrives in MLflow once, whatever fails on the way, and the training does not wait for it."""

import io
import os
import re
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any

import pytest
from mlflow import MlflowClient
from waiting import wait_for

from flows.cli import main
from flows.tracking.record import TrackingRecord, read_record, write_record
from flows.tracking.session import Session, open_session
from flows.tracking.store import default_tracking_uri
from fp8core.errors import UserError
from fp8core.report.console import Console
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import ENTRY, LedgerView, RedoEntry
from fp8core.store.run_directory import RunDirectory
from fp8core.store.run_view import Provenance

AWAY = "MLflow does not answer; metrics stay in the ledger and follow\n"
BACK = "MLflow answers again; it has every step up to "


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.tracking.session.RETRY_SECONDS", (0.05,))
    monkeypatch.setattr("flows.tracking.mlflow_backlog.OUTAGE_PATIENCE_SECONDS", 0.3)


@contextmanager
def session_of(copy: Any) -> Iterator[tuple[Session, io.StringIO]]:
    out = io.StringIO()
    with open_session(copy.config, copy.folder.name, Console(out, copy.config.steps)) as session:
        session.mlflow.follow_ledger()
        session.publisher.wake()
        yield session, out


def publish(copy: Any) -> str:
    """Open a training whose steps are done, and close it; returns what the console said after its header."""
    with session_of(copy) as (session, out):
        session.mlflow.add_result()
    return "".join(out.getvalue().splitlines(keepends=True)[3:])


@pytest.fixture(scope="module")
def expected(runs, copy_of_trained, shown) -> Any:
    """What MLflow shows when nothing fails, on sqlite without a server."""
    copy = copy_of_trained(default_tracking_uri(runs))
    assert publish(copy) == ""
    return shown(copy.config)


def test_everything_is_there(expected, copy_of_trained, mlflow_server, shown) -> None:
    (run,) = expected.runs
    assert run["status"] == "FINISHED"
    assert [step for step, _ in run["metrics"]["core/reward"]] == [1, 2, 3]
    assert [step for step, _ in run["metrics"]["core/groups_with_signal"]] == [1, 2, 3]
    assert [step for step, _ in run["metrics"]["core/heldout"]] == [0, 2, 3]
    tags = {key: run["tags"][key] for key in ("config", "precision", "bounds")}
    assert tags == {"config": "tiny", "precision": "fp8_block+fp8", "bounds": "kept"}
    reward = run["metrics"]["core/reward"]
    first, last = (f"{value:.4g} (step {step})" for step, value in (reward[0], reward[-1]))
    assert f"| reward | {first} | {last} |" in run["tags"]["mlflow.note.content"]
    signals = [value for _, value in run["metrics"]["core/groups_with_signal"]]
    assert ("had a signal: " in run["tags"]["mlflow.note.content"]) == (not any(signals)), signals
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


@pytest.mark.parametrize("live", [True, False], ids=["while it is open", "before it is opened"])
def test_a_checkpoint_that_is_written_again_is_the_model_of_its_step(copy_of_trained, runs, live) -> None:
    """A redo may give another policy (`fp8core.run.checkpoint`)."""
    uri = default_tracking_uri(runs)
    copy = copy_of_trained(uri)
    publish(copy)
    (entry, *_) = LedgerView.read(copy.folder / LEDGER).newest_checkpoints()
    other = entry.model_copy(update={"weights_digest": "f" * len(entry.weights_digest)})
    if not live:
        with RunDirectory.create_or_open(copy.folder) as directory:
            directory.ledger.append(other)
    record = read_record(copy.folder)
    assert record is not None

    def digests() -> dict[str, str]:
        own = f"source_run_id = '{record.run_id}'"
        models = MlflowClient(uri).search_logged_models([record.experiment_id], own)
        assert len(models) == 2
        return {model.tags["step"]: model.tags["weights_digest"] for model in models}

    assert digests()[str(entry.step)] == entry.weights_digest
    with session_of(copy) as (session, _):
        if live:
            wait_for(lambda: not session.mlflow._once, "the look at what an earlier process sent", 20)
            session.run.directory.ledger.append(other)
            session.publisher.wake()
        wait_for(lambda: digests()[str(entry.step)] == other.weights_digest, seconds=20)


@pytest.mark.slow
def test_publishing_all_of_it_again_changes_nothing(expected, copy_of_trained, mlflow_server, shown) -> None:
    copy = copy_of_trained(mlflow_server)
    publish(copy)
    (copy.folder / "tracking.json").unlink()
    publish(copy)
    assert shown(copy.config) == expected


@pytest.mark.slow
def test_a_resume_reads_few_histories_and_writes_no_step_again(copy_of_trained, network) -> None:
    copy = copy_of_trained(network.uri)
    publish(copy)
    first = len(network.requests)
    publish(copy)
    again = network.requests[first:]
    assert not any("manifests" in request for request in again)
    assert len(again) < 50, "so many for any number of steps"


def test_a_killed_neighbour_is_shown_as_killed(copy_of_trained, runs, open_tracker) -> None:
    copy, neighbour = copy_of_trained(default_tracking_uri(runs)), open_tracker()
    folder = copy.folder.with_name("neighbour")
    folder.mkdir()
    (folder / "ledger.jsonl").touch()
    write_record(folder, TrackingRecord.begun(neighbour.uri, neighbour.experiment_id, neighbour.run_id))
    publish(copy)
    assert neighbour.client.get_run(neighbour.run_id).info.status == "KILLED"


def redo_of(entry: Any) -> RedoEntry:
    """Of an update that gave another policy; the same one serves."""
    return RedoEntry(step=entry.step, task=entry.task, outputs=entry.outputs, code_version="c")


def updates(copy: Any) -> list[tuple[str, Any]]:
    lines = (copy.folder / "ledger.jsonl").read_text().splitlines(keepends=True)
    entries = [(line, ENTRY.validate_json(line)) for line in lines]
    return [(line, entry) for line, entry in entries if entry.event == "task" and entry.task == "train"]


def inexact(copy: Any) -> str | None:
    record = read_record(copy.folder)
    assert record is not None
    run = MlflowClient(copy.config.tracking.uri).get_run(record.run_id)
    return run.data.tags.get("inexact")  # type: ignore[no-any-return]


def test_a_redo_before_the_last_checkpoint_is_tagged_by_a_later_process(copy_of_trained, runs) -> None:
    copy = copy_of_trained(default_tracking_uri(runs))
    ledger = copy.folder / "ledger.jsonl"
    line, entry = updates(copy)[0]
    ledger.write_text(ledger.read_text().replace(line, f"{line}{redo_of(entry).model_dump_json()}\n"))
    publish(copy)
    assert inexact(copy) == "true"


def test_a_redo_that_comes_after_the_start_is_tagged(copy_of_trained, runs) -> None:
    copy = copy_of_trained(default_tracking_uri(runs))
    with session_of(copy) as (session, _):
        wait_for(lambda: session.mlflow.published == 3, seconds=10)
        assert inexact(copy) is None
        session.run.directory.ledger.append(redo_of(updates(copy)[-1][1]))
        session.publisher.wake()
        wait_for(lambda: inexact(copy) == "true", seconds=10)


# --- outages ---


def test_the_training_does_not_wait_and_all_of_it_arrives_later(expected, copy_of_trained, network, shown) -> None:
    copy = copy_of_trained(network.uri)
    with session_of(copy) as (session, out):
        wait_for(lambda: read_record(copy.folder).published >= 1)
        network.unplug()
        # All steps may be delivered already; the result is not.
        session.mlflow.add_result()
        wait_for(lambda: AWAY in out.getvalue())
        began = time.perf_counter()
        for _ in range(100):
            session.publisher.wake()
        assert time.perf_counter() - began < 2
        time.sleep(0.2)
        network.plug_in()
        wait_for(lambda: BACK in out.getvalue())
    assert out.getvalue().count(AWAY) == 1
    assert out.getvalue().count(BACK) == 1
    assert shown(copy.config) == expected


@pytest.mark.slow
def test_a_server_that_stays_away_is_not_waited_for_and_a_resume_delivers(
    expected, copy_of_trained, network, shown
) -> None:
    copy = copy_of_trained(network.uri)
    with session_of(copy) as (session, out):
        wait_for(lambda: read_record(copy.folder).published >= 0, seconds=10)
        network.unplug()
        session.mlflow.add_result()
        began = time.perf_counter()
    assert time.perf_counter() - began < 3
    follows = f"to 3 will follow: fp8-grpo resume {copy.folder} --set tracking.uri={network.uri}\n"
    assert out.getvalue().endswith(follows)
    record = read_record(copy.folder)
    assert (record.status, record.told) == ("FINISHED", False)
    # Continued while the server is still away: what it does not know waits on.
    assert publish(copy).endswith(follows)
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


def test_a_failed_training_leaves_its_report_behind_what_is_committed(copy_of_trained, runs, shown) -> None:
    copy = copy_of_trained(default_tracking_uri(runs))
    (copy.folder / "report.html").write_text("of before")
    with pytest.raises(ValueError, match="broken"), session_of(copy):
        raise ValueError("broken")
    (run,) = shown(copy.config).runs
    assert "report.html" in run["files"]
    assert [step for step, _ in run["metrics"]["core/reward"]] == [1, 2, 3]
    page = (copy.folder / "report.html").read_text()
    assert "<title>tiny-run</title>" in page
    assert "; its last start failed: broken" in page
    assert main(["report", str(copy.folder), "--out", str(runs / "page.html")]) == 0
    assert "; its last start failed: broken" in (runs / "page.html").read_text()


REFUSED = ("401 Unauthorized", b"who are you?")


@pytest.mark.slow
def test_a_refusal_is_shown_once_and_what_was_refused_follows(expected, copy_of_trained, network, shown) -> None:
    copy = copy_of_trained(network.uri)
    with session_of(copy) as (session, out):
        wait_for(lambda: read_record(copy.folder).published >= 0, seconds=10)
        network.answer_for(".", *REFUSED)
        wait_for(lambda: "MLflow refuses" in out.getvalue(), seconds=10)
        session.mlflow.add_result()
        for _ in range(50):
            session.publisher.wake()
            time.sleep(0.01)
        network.pass_all()
        wait_for(lambda: BACK in out.getvalue(), seconds=10)
    (line,) = (line for line in out.getvalue().splitlines() if "MLflow refuses" in line)
    assert "401" in line
    assert "credentials" in line
    assert shown(copy.config) == expected


@pytest.mark.slow
def test_a_training_ends_well_while_it_is_refused_and_a_resume_delivers(
    expected, copy_of_trained, network, shown, monkeypatch
) -> None:
    monkeypatch.setattr("flows.tracking.mlflow_backlog.OUTAGE_PATIENCE_SECONDS", 60.0)
    copy = copy_of_trained(network.uri)
    with session_of(copy) as (session, out):
        wait_for(lambda: read_record(copy.folder).published >= 0, seconds=10)
        network.answer_for(".", *REFUSED)
        session.mlflow.add_result()
        began = time.perf_counter()
    assert time.perf_counter() - began < 10, "time does not change a refusal"
    assert f"to 3 will follow: fp8-grpo resume {copy.folder}" in out.getvalue().splitlines()[-1]
    with pytest.raises(UserError, match="401"):
        publish(copy)
    network.pass_all()
    assert publish(copy) == ""
    assert shown(copy.config) == expected


@pytest.mark.slow
@pytest.mark.parametrize("what", ["run", "experiment"])
def test_what_is_deleted_while_it_is_trained_is_to_be_restored_before_a_resume(copy_of_trained, runs, what) -> None:
    copy = copy_of_trained(default_tracking_uri(runs))
    publish(copy)
    with session_of(copy) as (session, out):
        tracker = session.tracker
        number = tracker.run_id if what == "run" else tracker.experiment_id
        getattr(tracker.client, f"delete_{what}")(number)
        session.mlflow.add_result()
    try:
        assert "must be in the 'active' state" in out.getvalue()
        deleted = f"MLflow run {number}" if what == "run" else f"MLflow experiment {copy.config.tracking.experiment}"
        assert f" will follow: restore {deleted}, then fp8-grpo resume {copy.folder}" in out.getvalue().splitlines()[-1]
        with pytest.raises(UserError, match=f"^{deleted} is deleted in .*: restore it or start a run of another name$"):
            publish(copy)
    finally:
        getattr(tracker.client, f"restore_{what}")(number)
    publish(copy)


# --- a store that lost what it confirmed ---


def test_a_store_gets_what_it_lost_and_not_what_its_user_deleted(expected, copy_of_trained, runs) -> None:
    """Rows that are gone, as after a backup was restored."""
    copy = copy_of_trained(default_tracking_uri(runs))
    publish(copy)
    run_id = read_record(copy.folder).run_id
    client = MlflowClient(copy.config.tracking.uri)
    model_of = {output.step: output.model_id for output in client.get_run(run_id).outputs.model_outputs}
    lost, deleted = model_of[2], model_of[3]
    client.delete_logged_model(deleted)
    with sqlite3.connect(runs / "mlflow.db") as database:
        database.execute("delete from metrics where run_uuid = ? and step = 2", (run_id,))
        database.execute("delete from inputs where destination_id = ?", (lost,))
        for table in ("logged_model_metrics", "logged_model_params", "logged_model_tags", "logged_models"):
            database.execute(f"delete from {table} where model_id = ?", (lost,))
    assert "MLflow lost step 2" in publish(copy)
    steps = [row.step for row in client.get_metric_history(run_id, "core/reward")]
    assert sorted(steps) == [1, 2, 3]
    experiment = client.get_run(run_id).info.experiment_id
    (model,) = client.search_logged_models([experiment])
    assert (model.name, str(model.status)) == ("tiny-run-00002", "READY")
    assert publish(copy) == ""


@pytest.mark.parametrize("body", [b"{}", pytest.param(b"", marks=pytest.mark.slow)], ids=["an empty object", "no body"])
def test_steps_that_a_proxy_confirmed_and_dropped_are_sent_again(
    body, expected, copy_of_trained, network, shown, monkeypatch
) -> None:
    monkeypatch.setattr("flows.tracking.mlflow_backlog.OUTAGE_PATIENCE_SECONDS", 30.0)
    copy = copy_of_trained(network.uri)
    network.answer_for("POST .*/runs/log-batch", "200 OK", body)
    with session_of(copy) as (session, out):
        problem = "MLflow lost what it confirmed"
        session.mlflow.add_result()
        session.publisher.wake()
        wait_for(lambda: problem in out.getvalue(), seconds=20)
        network.pass_all()
    assert out.getvalue().count(problem) == 1
    assert shown(copy.config).runs[0]["metrics"] == expected.runs[0]["metrics"]


def test_a_store_that_keeps_nothing_holds_no_training_for_ever(copy_of_trained, network, monkeypatch) -> None:
    """It answers at every attempt, between which the steps are lost again."""
    monkeypatch.setattr("flows.tracking.mlflow_backlog.OUTAGE_PATIENCE_SECONDS", 1.0)
    copy = copy_of_trained(network.uri)
    network.answer_for("POST .*/runs/log-batch", "200 OK", b"{}")
    ending = Timer(30.0, network.pass_all)
    ending.start()
    with session_of(copy) as (session, out):
        session.mlflow.add_result()
        begun = time.monotonic()
    ending.cancel()
    assert time.monotonic() - begun < 20
    assert re.search(r"MLflow lacks them, steps 0 to \d+ will follow", out.getvalue()), out.getvalue()


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
    assert [step for step, _ in run["metrics"]["core/heldout"]] == [0], "no step is left out silently"


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
    monkeypatch.setattr("flows.tracking.mlflow_backlog.OUTAGE_PATIENCE_SECONDS", 30.0)
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
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.read(told, 1)
            publish(copy)
        finally:
            os._exit(0)
    network.lose(pattern, lambda: os.kill(child, signal.SIGKILL), skip)
    os.write(tell, b"x")
    os.close(told)
    os.close(tell)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # Its number stays its own until no request can kill it.
    network.lose_no_more()
    _, status = os.waitpid(child, 0)
    return os.WIFEXITED(status)


@pytest.mark.parametrize("pattern", [WRITES[1], WRITES[3]])
def test_a_kill_before_the_answer_leaves_nothing_twice(expected, copy_of_trained, network, shown, pattern) -> None:
    copy = copy_of_trained(network.uri)
    assert not survives(copy, network, pattern)
    assert publish(copy) == ""
    assert shown(copy.config) == expected


def kind(request: str) -> str:
    """Of a request: its method and path without ids and numbers; of a file its folder."""
    path = re.sub(r"\?.*|\b[0-9a-f-]{32,}\b|\d+", "", request)
    return path.rpartition("/")[0] if path.startswith("PUT ") else path


@pytest.mark.slow
def test_kills_before_every_answer_leave_nothing_twice(expected, copy_of_trained, network, shown) -> None:
    """One kill at a write of each kind, the last of its kind in every other case.

    A kill at what only reads leaves the server as one at the write before it.
    """
    # MLflow asks a server once in a process what it can do, so the second delivery is like those of the forks.
    publish(copy_of_trained(network.uri))
    before = len(network.requests)
    publish(copy_of_trained(network.uri))
    kinds = [kind(request) for request in network.requests[before:]]
    assert len(kinds) > 40
    last = {each: number for number, each in enumerate(kinds) if not each.startswith("GET ") and "search" not in each}
    assert len(last) > 12
    for turn, each in enumerate(last):
        number = last[each] if turn % 2 else kinds.index(each)
        copy = copy_of_trained(network.uri)
        assert not survives(copy, network, ".", skip=number)
        publish(copy)
        assert shown(copy.config) == expected, f"killed at request {number}"


@pytest.mark.slow
def test_a_failed_training_does_not_wait_for_a_long_report(copy_of_trained, network, monkeypatch) -> None:
    copy = copy_of_trained(network.uri)
    publish(copy)
    read, add = [], Provenance.add
    monkeypatch.setattr("flows.tracking.session.STOPPED_PATIENCE_SECONDS", 3.0)
    monkeypatch.setattr(Provenance, "add", lambda *of: (read.append(of), time.sleep(4), add(*of))[2])
    with pytest.raises(RuntimeError, match="broken"), session_of(copy) as (_, out):
        raise RuntimeError("broken")
    assert len(read) == 1, "the run has four steps"
    assert "no report: it takes too long; `fp8-grpo report` makes it\n" in out.getvalue()
