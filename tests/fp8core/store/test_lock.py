import os
import signal
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8core.errors import UserError
from fp8core.store.lock import RunLock, is_held

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


def test_asking_tells_and_leaves_the_lock_as_it_is(tmp_path: Path) -> None:
    assert not is_held(tmp_path / "lock")
    lock = RunLock.acquire(tmp_path / "lock")
    name = (tmp_path / "lock").read_text()
    assert is_held(tmp_path / "lock")
    assert (tmp_path / "lock").read_text() == name
    lock.release()
    assert not is_held(tmp_path / "lock")


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
