"""A child learns of its parent's death by SIGKILL, whatever copies of the pipe a fork has made."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from waiting import wait_for

from fp8core.processes.end_with_parent import TiedProcess

# Starts a child that writes what it reads and then END, forks a process that stays, and waits to be killed.
PARENT = """\
import os, sys, time
from fp8core.processes.end_with_parent import TiedProcess
echo = "import os; word = os.read(0, 100); os.write(1, word + b'END')"
process = TiedProcess(["-c", echo], open(sys.argv[1], "wb"))
if os.fork() == 0:
    time.sleep(60)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def said(tmp_path: Path) -> Path:
    return tmp_path / "said"


def test_a_killed_parent_is_noticed_beside_a_forked_copy(said: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(said)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        assert said.read_bytes() == b""
        parent.kill()
        wait_for(lambda: said.read_bytes() == b"END", seconds=20)
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()


def test_the_child_hears_a_word_and_is_waited_for(said: Path) -> None:
    with said.open("wb") as file:
        process = TiedProcess(
            ["-c", "import os; os.write(1, os.read(0, 100)); os.write(1, os.read(0, 100) + b'!')"], file
        )
    assert process.exit_code is None
    process.end(b"goodbye")
    assert said.read_bytes() == b"goodbye!"
    assert process.exit_code == 0
    process.end()


def test_a_child_that_is_gone_is_no_error(said: Path) -> None:
    with said.open("wb") as file:
        process = TiedProcess(["-c", ""], file)
    while process.exit_code is None:
        time.sleep(0.02)
    process.end(b"goodbye")


def test_signals_of_the_group_do_not_reach_the_child(said: Path) -> None:
    with said.open("wb") as file:
        process = TiedProcess(["-c", "import os; print(os.getsid(0), flush=True); os.read(0, 1)"], file)
    process.end()
    assert int(said.read_text()) != os.getsid(0)
