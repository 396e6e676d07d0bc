"""Child processes that start, are watched and end together, and `up`'s refusals before it starts any."""

import argparse
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from waiting import wait_for

from flows.cli.up import ServiceError, Services, Stopped, up, wait
from flows.environment import hold_prefect_home, hold_prefect_start, prefect_login
from fp8core.errors import UserError

SLEEP = ["-c", "import time; time.sleep(600)"]
# Ends its work when asked to, as a training does, while its parent, as a worker does, would kill it.
WORKER = """
import signal, subprocess, sys
training = subprocess.Popen([sys.executable, "-c", '''
import pathlib, signal, sys, time
def finish(*_):
    time.sleep(5)
    pathlib.Path("finished").touch()
    sys.exit()
signal.signal(signal.SIGTERM, finish)
pathlib.Path("began").touch()
time.sleep(600)
'''])
signal.signal(signal.SIGTERM, lambda *_: (training.kill(), sys.exit()))
training.wait()
signal.pause()
"""


@pytest.fixture
def services(tmp_path: Path) -> Services:
    return Services(os.environ, tmp_path, tmp_path)


def is_there(process: psutil.Process, words: str = "") -> bool:
    """A process with these words in its command is neither gone nor about to be."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and words in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("print('out of\\nmemory'); sys.exit(3)", "ended with 3: memory"),
        ("print('busy\\nAn exception occurred.\\n'); sys.exit(1)", "ended with 1: busy"),
        ("sys.exit(1)", "ended with 1: it said nothing"),
        ("print('step 3'); sys.stdout.flush(); os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
    ],
)
def test_a_service_that_dies_is_named_with_its_last_words_and_the_others_end(services, program, words) -> None:
    with services:
        services.start("a server", SLEEP, 10.0)
        services.start("a worker", ["-c", f"import os, sys; {program}"], 10.0)
        with pytest.raises(ServiceError, match=rf"^a worker {words} \(log: "):
            services.watch(lambda: None)
    assert not [child for child in psutil.Process().children() if is_there(child, "time.sleep(600)")]


@pytest.mark.parametrize("signals", [1, 2])
def test_what_a_service_has_started_ends_first_and_in_its_own_time_unless_there_is_none(
    services, tmp_path, signals
) -> None:
    with services:
        services.start("a worker", ["-c", WORKER], 60.0)
        wait_for((tmp_path / "began").exists)
        for _ in range(signals):
            services.note_signal(signal.SIGTERM, None)
        with pytest.raises(Stopped):
            services.watch(lambda: None)
    assert (tmp_path / "finished").exists() == (signals == 1)


def test_services_end_when_who_started_them_is_killed(tmp_path) -> None:
    program = f"""
        import os, pathlib
        from flows.cli.up import Services
        with Services(os.environ, pathlib.Path({str(tmp_path)!r}), pathlib.Path({str(tmp_path)!r})) as services:
            services.start("a server", {SLEEP!r}, 10.0)
            print(services._lasting[0].group, flush=True)
            services.watch(lambda: None)
    """
    owner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    service = psutil.Process(int(owner.stdout.readline()))
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_for(lambda: not is_there(service))


def test_who_asks_for_the_end_is_told_what_it_waits_for(services, capsys) -> None:
    services.note_signal(signal.SIGINT, None)
    with pytest.raises(Stopped):
        wait(services, lambda: None)
    assert "commits its step first, a second signal ends it at once" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["prefect_port", "mlflow_port"])
def test_a_port_that_is_taken_is_refused_by_name(option, tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as free:
        ports = {"prefect_port": free.getsockname()[1], "mlflow_port": free.getsockname()[1]}
        free.close()
        ports[option] = taken.getsockname()[1]
        named = re.escape(f"--{option.replace('_', '-')} {ports[option]} cannot be had")
        with pytest.raises(UserError, match=named):
            up(argparse.Namespace(**ports, runs=tmp_path))


def test_a_second_service_on_the_same_database_is_refused_at_once(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    monkeypatch.delenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", raising=False)
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports.append(free.getsockname()[1])
    second = argparse.Namespace(prefect_port=ports[0], mlflow_port=ports[1], runs=tmp_path / "runs")
    with hold_prefect_home():
        with pytest.raises(UserError, match=f"another `fp8-grpo up` runs with PREFECT_HOME={re.escape(str(tmp_path))}"):
            up(second)
        monkeypatch.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", "postgresql+asyncpg://there")
        hold_prefect_home()
    monkeypatch.delenv("PREFECT_SERVER_DATABASE_CONNECTION_URL")
    with hold_prefect_home():
        pass


@pytest.mark.parametrize("begin", [hold_prefect_home, hold_prefect_start, prefect_login])
def test_a_home_that_cannot_be_written_is_named(begin, tmp_path, monkeypatch) -> None:
    """For root, any folder can be written; one that is not there cannot."""
    home = tmp_path / "no home"
    monkeypatch.setenv("PREFECT_HOME", str(home))
    monkeypatch.delenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", raising=False)
    with pytest.raises(UserError, match=f"^Prefect's folder {re.escape(str(home))} cannot be written: No such file"):
        begin()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("PREFECT_LOGGING_LEVEL", "loud", "PREFECT_LOGGING_LEVEL=LOUD: Input should be 'DEBUG', "),
        ("PREFECT_API_REQUEST_TIMEOUT", "abc", "PREFECT_API_REQUEST_TIMEOUT=abc: Input should be a valid number"),
        ("PREFECT_PROFILES_PATH", "{folder}/p.toml", "{folder}/p.toml, which Prefect reads, or a prefect.toml here: "),
    ],
)
def test_a_setting_that_prefect_cannot_read_is_named_in_one_line(name, value, said, tmp_path, free_port) -> None:
    (tmp_path / "p.toml").write_text('active = "x\n')
    ports = ["--prefect-port", str(free_port()), "--mlflow-port", str(free_port())]
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "up", *ports, "--runs", str(tmp_path / "runs")],
        env={**os.environ, "PREFECT_HOME": str(tmp_path), name: value.format(folder=tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
    assert done.stderr.startswith(f"fp8-grpo: {said.format(folder=tmp_path)}")


# --- the password of Prefect's server ---


def test_the_password_is_made_once_and_its_file_is_its_owners(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "a home"))
    (tmp_path / "a home").mkdir()
    login, word = prefect_login()
    assert len(login) > 32
    assert stat.S_IMODE((tmp_path / "a home" / "fp8-grpo-auth").stat().st_mode) == 0o600
    assert subprocess.check_output(["sh", "-c", f"printf %s {word}"], text=True) == login
    assert prefect_login() == (login, word)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    assert prefect_login()[0] != login
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "mine:own")
    login, word = prefect_login()
    assert (login, subprocess.check_output(["sh", "-c", f"printf %s {word}"], text=True)) == ("mine:own", "mine:own")


@pytest.mark.parametrize("fault", ["others can read it", "link", "folder", "FIFO", "empty"])
def test_a_password_that_somebody_else_may_know_is_refused(fault, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    path, elsewhere = tmp_path / "fp8-grpo-auth", tmp_path / "elsewhere"
    elsewhere.write_text("" if fault == "empty" else "admin:known\n")
    elsewhere.chmod(0o640 if fault == "others can read it" else 0o600)
    if fault == "link":
        path.symlink_to(elsewhere)
    elif fault == "folder":
        path.mkdir(mode=0o700)
    elif fault == "FIFO":
        os.mkfifo(path, 0o600)
    else:
        elsewhere.rename(path)
    with pytest.raises(UserError, match=re.escape(str(path))) as refused:
        prefect_login()
    assert "known" not in str(refused.value)
