"""A training that has ended does not wait for a Prefect server that is gone."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.prefect_server import answers
from flows.tracking.record import TrackingRecord, read_record, write_record

# Ends its training, then waits as Prefect would.
TRAINING = """\
import sys, time
from pathlib import Path
from flows.launch import end_without_prefect
from flows.tracking.record import read_record, write_record
from fp8core.store.outputs import Output
folder, api, summary, status, error = sys.argv[1:]
end_without_prefect(Path(folder), api, Output("--json", summary))
time.sleep(0.1)
record = read_record(Path(folder))
if status != "RUNNING":
    write_record(Path(folder), record.ended(status, error or None, time.time_ns() // 1_000_000))
time.sleep(float(60 if status != "RUNNING" else 8))
"""


@pytest.fixture
def silent_api(request: pytest.FixtureRequest, free_port: Callable[[], int]):
    """An address where nothing listens ("refuses"), or something that never answers ("hangs").

    The watch asks either without regard to how the training ended, and ends the training without regard to which of
    them it asked. So each of the two, and each end, has one test.
    """
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", free_port()))
        if request.param == "hangs":
            bound.listen()
        yield f"http://127.0.0.1:{bound.getsockname()[1]}/api"


def ending(folder: Path, api: str, status: str, error: str = "") -> tuple[subprocess.CompletedProcess[str], float]:
    folder.mkdir()
    (folder / "summary.json").write_text("{}")
    # The end of an earlier process is none of this one's.
    record = TrackingRecord(uri="sqlite:///x", experiment_id="1", run_id="run", folder=str(folder))
    write_record(folder, record.ended("FINISHED", None, 1))
    words = [str(folder), api, str(folder.with_name("summary")), status, error]
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", TRAINING, *words], capture_output=True, text=True, timeout=50)
    return done, time.monotonic() - began


@pytest.mark.parametrize("silent_api", ["hangs"], indirect=True)
def test_a_finished_training_ends_and_says_what_prefect_lacks(silent_api, tmp_path: Path) -> None:
    done, seconds = ending(tmp_path / "run", silent_api, "FINISHED")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    assert "Prefect does not answer" in done.stdout
    assert (tmp_path / "summary").read_text() == "{}"
    assert seconds < 15


@pytest.mark.parametrize("silent_api", ["refuses"], indirect=True)
def test_a_failed_training_ends_with_its_reason(silent_api, tmp_path: Path) -> None:
    done, seconds = ending(tmp_path / "run", silent_api, "FAILED", "broken")
    assert (done.returncode, done.stderr) == (1, "fp8-grpo: broken\n")
    assert not (tmp_path / "summary").exists()
    assert seconds < 15


@pytest.mark.slow
@pytest.mark.parametrize("silent_api", ["hangs"], indirect=True)
def test_a_training_that_goes_on_is_left_alone(silent_api, tmp_path: Path) -> None:
    done, seconds = ending(tmp_path / "run", silent_api, "RUNNING")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert seconds > 8


@pytest.mark.slow
def test_a_command_whose_prefect_server_goes_in_the_last_steps_succeeds(
    small_file: Callable[..., Path],
    prefect_home: Callable[[Path], Path],
    mlflow_store: Callable[[Path], Path],
    tmp_path: Path,
    free_port: Callable[[], int],
) -> None:
    port, python = free_port(), sys.executable
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
    home = prefect_home(tmp_path / "prefect")
    mlflow_store(tmp_path / "runs")
    environment = {**inherited, "PREFECT_HOME": str(home), "PYTHONUNBUFFERED": "1"}
    serve = [python, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port), "--no-ui"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen(serve, env=environment, start_new_session=True, **quiet)
    api = f"http://127.0.0.1:{port}/api"
    try:
        while not answers(f"{api}/health"):
            assert server.poll() is None
            time.sleep(0.2)
        command = [python, "-m", "flows.cli", "run", str(small_file(tmp_path, steps=4)), "--set", "run=orphan"]
        environment |= {"PREFECT_API_URL": api, "PYTHONPATH": str(Path(__file__).parents[2])}
        training = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert training.stdout is not None
        said = []
        for line in training.stdout:
            said.append(line)
            if line.strip().startswith("3/4 "):
                os.killpg(server.pid, signal.SIGSTOP)
            if line.strip().startswith("chain "):
                ended = time.monotonic()
        assert training.wait(timeout=60) == 0, said
        assert time.monotonic() - ended < 15
        assert "Prefect does not answer: " in said[-1]
        assert not any("Traceback" in line for line in said)
        assert read_record(tmp_path / "runs" / "orphan").status == "FINISHED"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
