import os
import signal
import socket
import time
from pathlib import Path

import pytest

from fp8core.errors import UserError
from fp8core.store.lock import RunLock, has_owner


def test_the_second_is_refused_until_the_first_releases(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("the longer name of an earlier holder" * 9)
    first = RunLock.acquire(tmp_path / "lock")
    expected = rf"^{tmp_path} is in use by process {os.getpid()} on {socket.gethostname()}; "
    with pytest.raises(UserError, match=expected):
        RunLock.acquire(tmp_path / "lock")
    assert has_owner(tmp_path / "lock")
    first.release()
    assert not has_owner(tmp_path / "lock")
    RunLock.acquire(tmp_path / "lock").release()


def test_a_forked_child_does_not_keep_its_parents_lock(tmp_path: Path) -> None:
    lock = RunLock.acquire(tmp_path / "lock")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"started")
        time.sleep(60)
        os._exit(0)
    try:
        os.read(reader, 7)
        lock.release()
        RunLock.acquire(tmp_path / "lock").release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
