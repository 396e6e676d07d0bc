"""Files in the working directory that have the names of libraries are never imported in their place."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
NAMES = ["rich", "torch", "json", "pickle", "socket", "numpy", "pyarrow", "pydantic", "prefect", "mlflow", "uvicorn"]
# What a console script is: its own folder comes first on the path, the working directory is not on it.
PROGRAM = "import sys\nfrom flows.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
MINE = """\
import multiprocessing
import subprocess
import sys

from tasks import reward as ours
from tasks.step import step


def imports():
    import json, pickle, socket


@step(inputs=ours.reward.spec.inputs, outputs=ours.reward.spec.outputs)
def mine(run, index, options, prompts, rollouts):
    child = multiprocessing.get_context("spawn").Process(target=imports)
    child.start()
    child.join()
    assert child.exitcode == 0, child.exitcode
    subprocess.run([sys.executable, "-m", "json.tool", "--help"], check=True, capture_output=True)
    return ours.reward(run, index, options, prompts, rollouts)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with a step of the user's own, and with files that say when they are imported."""
    place = tmp_path / "work"
    place.mkdir()
    for name in NAMES:
        told = f"open({str(tmp_path / 'imported')!r}, 'a').write('{name}\\n')\n"
        (place / f"{name}.py").write_text(f"{told}raise ImportError('the {name} of the working directory')\n")
    (place / "mine.py").write_text(MINE)
    return place


def run(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    program = folder.parent / "bin" / "fp8-grpo"
    program.parent.mkdir(exist_ok=True)
    program.write_text(PROGRAM)
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    environment = {**inherited, "PYTHONPATH": str(REPOSITORY), "PREFECT_HOME": str(folder.parent / "prefect")}
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        environment.pop(name, None)
    command = [sys.executable, str(program), *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_a_report_of_a_run_elsewhere(folder, whole_run):
    done = run(folder, "report", str(whole_run.folder), "--png", "page.png")
    assert done.returncode == 0, done.stderr
    assert not (folder.parent / "imported").exists()


@pytest.mark.slow
def test_a_training_with_a_step_of_the_working_directory_and_its_children(folder, small):
    settings = {
        "steps": 1,
        "warm_start.steps": small["warm_start"]["steps"],
        "rollout.prompts_per_step": 4,
        "rollout.group_size": 4,
        "evaluation.prompts": 8,
        "pipeline.replace": "{reward: {uses: 'mine:mine', needs: [prompts, rollouts]}}",
    }
    flags = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    done = run(folder, "run", "tiny", "--set", "run=r", *flags)
    assert done.returncode == 0, done.stderr + done.stdout
    assert not (folder.parent / "imported").exists(), (folder.parent / "imported").read_text()
    verified = run(folder, "verify", "r")
    assert verified.returncode == 0, verified.stderr
    assert not (folder.parent / "imported").exists()
