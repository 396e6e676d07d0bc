"""Killed trainings are shown as killed, and no other."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.tracking.record import TrackingRecord, mark_killed, mark_killed_siblings, read_record, write_record
from flows.tracking.tracker import Tracker
from fp8core.store.lock import RunLock

LAST_WRITE_SECONDS = 1_700_000_000
Dead = Callable[..., Path]


@pytest.fixture
def dead(tmp_path: Path, tracker: Tracker, monkeypatch: pytest.MonkeyPatch) -> Dead:
    """The folder of a training whose process is gone; the environment names its store."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracker.uri)

    def make(name: str = "dead", tracker: Tracker = tracker, **changes: object) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "ledger.jsonl").touch()
        os.utime(folder / "ledger.jsonl", (LAST_WRITE_SECONDS, LAST_WRITE_SECONDS))
        (folder / "lock").write_text('{"pid": 1, "host": "gone"}')
        record = TrackingRecord.begun(tracker.uri, tracker.experiment_id, tracker.run_id).changed(told=True, **changes)
        write_record(folder, record)
        return folder

    return make


def shown(tracker: Tracker) -> tuple[str, int | None]:
    info = tracker.client.get_run(tracker.run_id).info
    return info.status, info.end_time


def test_a_dead_training_is_killed_since_its_last_write(dead: Dead, tracker: Tracker) -> None:
    folder = dead()
    assert mark_killed(folder)
    assert shown(tracker) == ("KILLED", 1000 * LAST_WRITE_SECONDS)
    record = read_record(folder)
    assert (record.status, record.told, record.ended_ms) == ("KILLED", True, 1000 * LAST_WRITE_SECONDS)
    assert not mark_killed(folder), "once is enough"


def test_a_living_training_is_left_alone(dead: Dead, tracker: Tracker) -> None:
    folder = dead()
    lock = RunLock.acquire(folder / "lock")
    assert not mark_killed(folder)
    assert shown(tracker)[0] == "RUNNING"
    assert read_record(folder).status == "RUNNING"
    lock.release()
    assert mark_killed(folder)


@pytest.mark.parametrize("outcome", ["FINISHED", "FAILED", "KILLED"])
def test_what_an_outage_kept_from_mlflow_is_told(dead: Dead, tracker: Tracker, outcome: str) -> None:
    folder = dead(status=outcome, ended_ms=123_000)
    write_record(folder, read_record(folder).changed(told=False))
    assert mark_killed(folder)
    assert shown(tracker) == (outcome, 123_000)


def test_what_mlflow_heard_before_the_kill_stays(dead: Dead, tracker: Tracker) -> None:
    """Killed between telling MLflow and noting that it was told."""
    folder = dead()
    tracker.finish("FINISHED", None, 5000)
    assert mark_killed(folder)
    assert shown(tracker) == ("FINISHED", 5000)
    assert read_record(folder).status == "FINISHED"


def test_nothing_to_say_and_nobody_to_say_it_to(
    dead: Dead, tracker: Tracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no_record").mkdir()
    assert not mark_killed(tmp_path / "no_record")
    assert not mark_killed(dead("finished", status="FINISHED", ended_ms=1))
    for name, where in {
        "server": {"uri": "http://127.0.0.1:9"},
        "store": {"uri": f"sqlite:///{tmp_path}/absent.db"},
        "run": {"run_id": "0" * 32},
    }.items():
        folder = dead(name, **where)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", where.get("uri", tracker.uri))
        assert not mark_killed(folder)
        assert read_record(folder).status == "RUNNING", "the next one may be heard"
    assert not (tmp_path / "absent.db").exists()


def test_siblings_are_marked_unless_they_live_or_are_elsewhere(
    dead: Dead, tracker: Tracker, open_tracker: Callable[[], Tracker], tmp_path: Path
) -> None:
    mine, alive, elsewhere = tracker, open_tracker(), open_tracker()
    folder = dead("mine", mine)
    killed = open_tracker()
    dead("killed", killed)
    dead("elsewhere", elsewhere, uri="http://127.0.0.1:9")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tracking.json").write_text("{")
    lock = RunLock.acquire(dead("alive", alive) / "lock")
    mark_killed_siblings(folder, tracker.uri)
    lock.release()
    assert [shown(each)[0] for each in (mine, alive, elsewhere)] == ["RUNNING"] * 3
    assert shown(killed)[0] == "KILLED"


def test_a_process_that_waits_loads_neither_torch_nor_mlflow(dead: Dead) -> None:
    folder = dead("settled", status="KILLED", ended_ms=1)
    program = (
        "import sys; from pathlib import Path; from flows.tracking.record import mark_killed;"
        f"assert not mark_killed(Path({str(folder)!r})); print('torch' in sys.modules, 'mlflow' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
