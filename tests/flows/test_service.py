"""Child processes that start, are watched and end together, and `up`'s refusals before it starts any."""

import argparse
import os
import signal
import socket
import stat
import subprocess
from pathlib import Path

import psutil
import pytest

from flows.cli.up import ServiceError, Services, StopSignal, up, wait
from flows.environment import prefect_login
from fp8core.errors import UserError

SLEEP = ["-c", "import time; time.sleep(600)"]
# Ends its work when asked to, as a training does, while its parent, as a worker does, would kill it.
WORKER = """
import signal, subprocess, sys
training = subprocess.Popen([sys.executable, "-c", '''
import pathlib, signal, sys, time
def finish(*_):
    time.sleep(5)
    pathlib.Path("{folder}", "finished").touch()
    sys.exit()
signal.signal(signal.SIGTERM, finish)
pathlib.Path("{folder}", "began").touch()
time.sleep(600)
'''])
signal.signal(signal.SIGTERM, lambda *_: (training.kill(), sys.exit()))
training.wait()
signal.pause()
"""


@pytest.fixture
def services(tmp_path: Path) -> Services:
    return Services(os.environ, tmp_path)


def is_there(process: psutil.Process, words: str = "") -> bool:
    """A process with these words in its command is neither gone nor about to be."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and words in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def test_a_service_that_dies_is_named_with_its_last_words_and_the_others_end(services) -> None:
    with services:
        services.start("a server", SLEEP, lambda: True)
        services.start("a worker", ["-c", "print('out of\\nmemory'); exit(3)"], lambda: True)
        with pytest.raises(ServiceError, match=r"^a worker ended with 3: memory \(log: "):
            wait(services)
    assert not [child for child in psutil.Process().children() if is_there(child, "time.sleep(600)")]


@pytest.mark.parametrize("signals", [1, 2])
def test_a_training_of_a_worker_ends_first_and_in_its_own_time_unless_there_is_none(
    services, tmp_path, monkeypatch, signals
) -> None:
    paused = list[bool]()
    services.pause_pools = lambda: paused.append(True)
    with services:
        arguments = ["-c", WORKER.format(folder=str(tmp_path))]
        services.workers.append(services.start("a worker", arguments, (tmp_path / "began").exists))
        for _ in range(signals):
            services.note_signal(signal.SIGTERM, None)
        with pytest.raises(StopSignal):
            wait(services)
    assert paused == [True]
    assert (tmp_path / "finished").exists() == (signals == 1)


def test_a_port_that_is_taken_is_refused_by_name(tmp_path, free_port) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--mlflow-port {port} cannot be had"):
            up(argparse.Namespace(prefect_port=free_port(), mlflow_port=port, runs=tmp_path))


def test_the_password_is_made_once_and_its_file_is_its_owners(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "a home"))
    (tmp_path / "a home").mkdir()
    login, word = prefect_login()
    assert len(login) > 32
    assert stat.S_IMODE((tmp_path / "a home" / "fp8-grpo-auth").stat().st_mode) == 0o600
    assert subprocess.check_output(["sh", "-c", f"printf %s {word}"], text=True) == login
    assert prefect_login() == (login, word)
