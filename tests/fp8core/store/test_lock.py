"""A moved or renamed run is the same one; a copy is not, wherever its original is now."""

import fcntl
import os
import shutil
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8core.errors import UserError
from fp8core.store.lock import FolderIdentity, RunLock, is_held, lies_at, original_of

Kill = Callable[[Callable[[Callable[[str], None]], None], float], list[str]]


def close_pipes() -> None:
    """The pipe of acknowledgements must end with the process that is killed, not with its child."""
    for descriptor in range(3, 256):
        try:
            kind = os.fstat(descriptor).st_mode
        except OSError:
            continue
        if stat.S_ISFIFO(kind):
            os.close(descriptor)


def test_the_second_is_refused_until_the_first_releases(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("the longer name of an earlier holder" * 9)
    first = RunLock.acquire(tmp_path / "lock")
    expected = rf"^{tmp_path} is in use by process {os.getpid()} on {socket.gethostname()}; "
    with pytest.raises(UserError, match=expected):
        RunLock.acquire(tmp_path / "lock")
    first.release()
    first.release()
    RunLock.acquire(tmp_path / "lock").release()


def test_a_holder_that_has_not_written_its_name_yet(tmp_path: Path) -> None:
    lock = RunLock.acquire(tmp_path / "lock")
    (tmp_path / "lock").write_text("")
    with pytest.raises(UserError, match="in use by another process, which is just starting"):
        RunLock.acquire(tmp_path / "lock")
    lock.release()


def test_asking_tells_and_leaves_the_lock_as_it_is(tmp_path: Path) -> None:
    assert not is_held(tmp_path / "lock")
    lock = RunLock.acquire(tmp_path / "lock")
    name = (tmp_path / "lock").read_text()
    assert is_held(tmp_path / "lock")
    assert (tmp_path / "lock").read_text() == name
    lock.release()
    assert not is_held(tmp_path / "lock")


def test_somebody_who_asks_is_not_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8core.store.lock._PROBE_SECONDS", 30.0)
    (tmp_path / "lock").touch()
    with (tmp_path / "lock").open() as asked:
        fcntl.flock(asked, fcntl.LOCK_SH)
        timer = threading.Timer(0.03, fcntl.flock, (asked, fcntl.LOCK_UN))
        timer.start()
        RunLock.acquire(tmp_path / "lock").release()
        timer.join()


def test_a_kill_frees_the_lock(tmp_path: Path, acknowledged_before_kill: Kill) -> None:
    def hold(acknowledge: Callable[[str], None]) -> None:
        lock = RunLock.acquire(tmp_path / "lock")
        acknowledge("held")
        time.sleep(60)
        lock.release()

    assert acknowledged_before_kill(hold, 0.0) == ["held"]
    RunLock.acquire(tmp_path / "lock").release()


def test_a_forked_child_does_not_keep_a_killed_parents_lock(tmp_path: Path, acknowledged_before_kill: Kill) -> None:
    def hold(acknowledge: Callable[[str], None]) -> None:
        lock = RunLock.acquire(tmp_path / "lock")
        child = os.fork()
        if child == 0:
            close_pipes()
            time.sleep(60)
            os._exit(0)
        acknowledge(str(child))
        time.sleep(60)
        lock.release()

    (child,) = acknowledged_before_kill(hold, 0.05)
    try:
        os.kill(int(child), 0)
        RunLock.acquire(tmp_path / "lock").release()
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_forking_does_not_free_the_parents_lock(tmp_path: Path) -> None:
    lock = RunLock.acquire(tmp_path / "lock")
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(UserError, match="in use"):
        RunLock.acquire(tmp_path / "lock")
    lock.release()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


@pytest.fixture
def run(runs: Path) -> Path:
    folder = runs / "run"
    folder.mkdir()
    (folder / "run.json").write_text('{"id": "a"}')
    (folder / "ledger.jsonl").write_text("")
    return folder


def copied(run: Path, to: Path) -> Path:
    """As `cp -a` does."""
    return Path(shutil.copytree(run, to))


def moved_to_another_file_system(run: Path, to: Path) -> Path:
    """As `mv` does between two of them; the inodes of the original stay taken, so that no later copy gets them."""
    copied(run, to)
    far = to.parent / "far" / "away"
    far.mkdir(parents=True, exist_ok=True)
    run.rename(far / to.name)
    return to


def test_what_lies_where_it_lay_is_the_run(run: Path) -> None:
    assert original_of(FolderIdentity.of(run), run) is None


def test_a_moved_and_renamed_run_is_the_same(run: Path, tmp_path: Path) -> None:
    recorded = FolderIdentity.of(run)
    (tmp_path / "elsewhere").mkdir()
    moved = run.rename(tmp_path / "elsewhere" / "renamed")
    assert original_of(recorded, moved) is None
    (run.parent / "run").mkdir()
    assert original_of(recorded, moved) is None, "something else is where it lay"


def test_a_copy_beside_its_original_is_told(run: Path) -> None:
    assert original_of(FolderIdentity.of(run), copied(run, run.with_name("copy"))) == str(run)


def test_a_copy_is_told_when_its_original_was_renamed(run: Path, tmp_path: Path) -> None:
    recorded, copy = FolderIdentity.of(run), copied(run, tmp_path / "copy")
    renamed = run.rename(run.with_name("renamed"))
    assert original_of(recorded, copy) == str(renamed)
    assert original_of(recorded, renamed) is None


def test_a_copy_that_took_the_place_of_its_renamed_original_is_told(run: Path) -> None:
    recorded = FolderIdentity.of(run)
    renamed = run.rename(run.with_name("renamed"))
    copy = copied(renamed, run)
    assert original_of(recorded, copy) == str(renamed)
    assert original_of(recorded, renamed) is None


def test_a_copy_of_the_whole_folder_of_runs_is_told(run: Path, tmp_path: Path) -> None:
    recorded = FolderIdentity.of(run)
    shutil.copytree(run.parent, tmp_path / "copied runs")
    assert original_of(recorded, tmp_path / "copied runs" / "run") == str(run)


def test_a_run_that_was_moved_to_another_file_system_is_the_same(run: Path, tmp_path: Path) -> None:
    recorded = FolderIdentity.of(run)
    moved = moved_to_another_file_system(run, tmp_path / "moved")
    assert not FolderIdentity.of(moved).is_same_folder(recorded)
    assert original_of(recorded, moved) is None


def test_a_backup_that_was_put_back_is_the_same(run: Path, tmp_path: Path) -> None:
    recorded = FolderIdentity.of(run)
    backup = moved_to_another_file_system(run, tmp_path / "backup")
    restored = copied(backup, run)
    assert not FolderIdentity.of(restored).is_same_folder(recorded)
    assert original_of(recorded, restored) is None


def test_a_copy_beside_an_original_that_was_put_back_is_told(run: Path, tmp_path: Path) -> None:
    recorded = FolderIdentity.of(run)
    backup = moved_to_another_file_system(run, tmp_path / "backup")
    restored, copy = copied(backup, run), copied(backup, run.with_name("copy"))
    assert original_of(recorded, copy) == str(restored)


def test_what_came_from_another_machine_is_a_copy_and_what_is_seen_from_there_is_not(run: Path, tmp_path: Path) -> None:
    elsewhere = FolderIdentity.of(run).model_copy(update={"host": "other"})
    assert original_of(elsewhere, run) is None, "a file system that both have"
    copy = copied(run, tmp_path / "copy")
    shutil.rmtree(run)
    assert original_of(elsewhere, copy) == f"other:{run}"


def test_only_another_folder_of_the_same_run_lies_there(run: Path) -> None:
    copy = copied(run, run.with_name("copy"))
    assert lies_at(run, copy)
    assert not lies_at(run, run)
    link = run.with_name("link")
    os.symlink(run, link)
    assert not lies_at(link, run)
    (copy / "run.json").write_text('{"id": "b"}')
    assert not lies_at(run, copy)
    assert not lies_at(run.with_name("absent"), run)
