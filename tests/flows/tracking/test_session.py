"""What is committed arrives in MLflow once, whatever fails on the way, and the training does not wait for it."""

import multiprocessing
import os
import time
from typing import Any

import pytest
from published_copy import KILLED, publish_until
from waiting import wait_for

from flows.tracking.record import ServiceRecord, TrackingRecord, mark_dead, read_record, write_record
from flows.tracking.store import default_tracking_uri
from fp8core.errors import UserError
from fp8core.store.layout import LEDGER
from fp8core.store.lock import RunLock

AWAY = "MLflow does not answer"
BACK = "MLflow answers again; it has every step up to "


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.tracking.session.RETRY_SECONDS", 0.05)


@pytest.fixture(scope="module")
def expected(runs, copy_of_trained, shown) -> Any:
    """What MLflow shows when nothing fails, on sqlite without a server."""
    copy = copy_of_trained(default_tracking_uri(runs))
    assert copy.publish() == ""
    return shown(copy.config)


WRITES = ("create_run", "log_batch", "log_text", "create_logged_model", "set_terminated")


@pytest.mark.parametrize("write", WRITES)
def test_a_kill_after_any_kind_of_write_leaves_nothing_twice(expected, copy_of_trained, runs, shown, write) -> None:
    copy = copy_of_trained(default_tracking_uri(runs))
    context = multiprocessing.get_context("forkserver")  # Of a process without threads, unlike this one.
    context.set_forkserver_preload(["flows.tracking.session"])
    child = context.Process(target=publish_until, args=(copy, write))
    child.start()
    child.join()
    assert child.exitcode == KILLED
    assert copy.publish() == ""
    assert shown(copy.config) == expected


def test_an_outage_loses_nothing_and_holds_nobody_up(expected, copy_of_trained, server, shown, monkeypatch) -> None:
    """The server is killed in mid-training, stays away beyond the end and into the next start, and comes back."""
    copy = copy_of_trained(server.uri)
    with copy.session() as (session, out):
        wait_for(lambda: read_record(copy.folder).mlflow.published >= 1)
        server.kill()
        monkeypatch.setattr("flows.tracking.session.OUTAGE_PATIENCE_SECONDS", 0.3)
        session.add_result()
        wait_for(lambda: AWAY in out.getvalue())
        began = time.perf_counter()
        for _ in range(100):
            session.wake()
    assert time.perf_counter() - began < 3
    assert out.getvalue().count(f"{AWAY} (tracking.uri {server.uri}: ") == 1
    follows = f"will follow: fp8-grpo resume {copy.folder} --set tracking.uri={server.uri}\n"
    assert out.getvalue().endswith(follows)
    record = read_record(copy.folder)
    assert (record.status, record.mlflow.told) == ("FINISHED", False)
    # Continued while the server is still away: what it does not know waits on.
    assert copy.publish().endswith(follows)

    with pytest.raises(UserError, match=rf"^tracking\.uri {server.uri}: no server answers there .*refused"):
        copy_of_trained(server.uri).publish()  # A new run needs its server.
    monkeypatch.setattr("flows.tracking.session.OUTAGE_PATIENCE_SECONDS", 60.0)
    with copy.session() as (session, out):
        wait_for(lambda: AWAY in out.getvalue())
        server.start()
        session.add_result()
    assert BACK in out.getvalue()
    assert "will follow" not in out.getvalue()
    assert shown(copy.config, server.root) == expected


def test_a_failed_or_stopped_training_says_so(copy_of_trained, runs, shown) -> None:
    copy = copy_of_trained(default_tracking_uri(runs))
    (copy.folder / "report.html").write_text("of before")
    with pytest.raises(KeyboardInterrupt), copy.session():
        raise KeyboardInterrupt
    assert shown(copy.config).runs[0]["status"] == "KILLED"
    with pytest.raises(ValueError, match="broken"), copy.session():
        raise ValueError("broken at https://me:hunter2@host\x1b")
    (run,) = shown(copy.config).runs
    assert (run["status"], run["tags"]["error"]) == ("FAILED", "broken at https://me:***@host\\x1b")
    assert "report.html" in run["files"]
    assert [step for step, _ in run["metrics"]["core/1_reward"]] == [1, 2, 3]
    assert "its last start failed: broken" in (copy.folder / "report.html").read_text()
    copy.publish()
    (run,) = shown(copy.config).runs
    assert (run["status"], "error" in run["tags"]) == ("FINISHED", False)


def test_a_training_under_way_has_its_report_and_completions(copy_of_trained, runs) -> None:
    copy = copy_of_trained(default_tracking_uri(runs))
    report = copy.folder / "report.html"
    report.unlink(missing_ok=True)
    with copy.session() as (session, out):
        mlflow = session.trackers["mlflow"]

        def missing() -> set[str]:
            files = {file.path for file in mlflow.client.list_artifacts(mlflow.run_id)}
            return {"report.html", "completions.json"} - files

        session.report.wake()
        wait_for(lambda: not missing(), "both", 60)
        assert mlflow.client.get_run(mlflow.run_id).info.status == "RUNNING"
        written = report.stat().st_mtime_ns
        session.report.wake()
        session.report.close()
        assert report.stat().st_mtime_ns == written, "reports would take all the time of a short step"
    assert f"report      {report}\n" in out.getvalue()


def test_dead_trainings_are_marked_and_no_other(open_tracker, tmp_path) -> None:
    trackers = {name: open_tracker() for name in ("killed", "ended", "alive", "elsewhere")}
    for name, tracker in trackers.items():
        tracker.client.update_run(tracker.run_id, "RUNNING")
        folder = tmp_path / name
        folder.mkdir()
        (folder / LEDGER).touch()
        os.utime(folder / LEDGER, (1_700_000_000, 1_700_000_000))
        uri = "http://127.0.0.1:9" if name == "elsewhere" else tracker.uri
        ended = {"status": "FINISHED", "ended_ms": 123_000} if name == "ended" else {}
        known = ServiceRecord(uri=uri, experiment_id=tracker.experiment_id, run_id=tracker.run_id)
        write_record(folder, TrackingRecord(services={"mlflow": known}, **ended))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tracking.json").write_text("{")
    lock = RunLock.acquire(tmp_path / "alive" / "lock")
    for _ in range(2):
        mark_dead(tmp_path, trackers["killed"].uri)
    lock.release()
    infos = {name: tracker.client.get_run(tracker.run_id).info for name, tracker in trackers.items()}
    assert {name: info.status for name, info in infos.items()} == {
        **{"killed": "KILLED", "ended": "FINISHED", "alive": "RUNNING", "elsewhere": "RUNNING"}
    }
    assert (infos["killed"].end_time, infos["ended"].end_time) == (1_700_000_000_000, 123_000)
    assert read_record(tmp_path / "killed").mlflow.told
