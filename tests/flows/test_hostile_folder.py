"""Files in the working directory that have the names of libraries are never imported in their place.

Nor is code that a run's own configuration names, but for a run that the user trusts.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from flows.cli import main

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
    return started(folder, [str(REPOSITORY)], str(program), *words)


def started(folder: Path, searched: Sequence[str], *words: str) -> "subprocess.CompletedProcess[str]":
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    paths = {"PYTHONPATH": os.pathsep.join(searched), "PREFECT_HOME": str(folder.parent / "prefect")}
    environment = {**inherited, **paths}
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        environment.pop(name, None)
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("start", ["program", "module"])
def test_a_run_that_is_the_working_directory(folder, run_copy, start):
    """`python -m`, and an empty entry of PYTHONPATH, have each put the folder first when our code begins."""
    place = Path(shutil.move(run_copy.folder, folder / "run"))
    for name in NAMES if start == "program" else ["rich", "matplotlib", "mlflow"]:
        shutil.copy(folder / "rich.py", place / f"{name}.py")
    words = ("verify", ".", "--tracking-uri", "none")
    by_module = ("-m", "flows.cli", *words)
    done = started(place, ["", str(REPOSITORY)], *by_module) if start == "module" else run(place, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (folder.parent / "imported").exists()


def named_in(run_folder: Path, section: str, key: str, path: str) -> None:
    """Have a run's configuration name code."""
    described = json.loads((run_folder / "run.json").read_text())
    if section == "pipeline":
        next(step for step in described["config"]["pipeline"]["steps"] if step["name"] == key)["uses"] = path
    else:
        described["config"][section][key] = path
    (run_folder / "run.json").write_text(json.dumps(described))


@pytest.mark.parametrize(
    ("section", "key", "named"),
    [
        ("pipeline", "reward", "pipeline.steps.reward.uses=decoy:made"),
        ("reward", "verifier", "reward.verifier=decoy:made"),
        ("loss", "policy", "loss.policy=decoy:made"),
        ("rollout", "engine", "rollout.engine=decoy:made"),
    ],
)
def test_code_that_a_run_names_is_imported_by_no_command_without_trust(
    run_copy, tmp_path, monkeypatch, capsys, section, key, named
):
    (tmp_path / "libraries").mkdir()
    (tmp_path / "libraries" / "decoy.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write('x')\n")
    monkeypatch.chdir(tmp_path)
    # As it would be found: in the working directory no command that reads searches anyway.
    monkeypatch.syspath_prepend(tmp_path / "libraries")
    named_in(run_copy.folder, section, key, "decoy:made")
    place = str(run_copy.folder)
    for command in (
        ["replay", place, "--step", "1"],
        ["export", place, "exported", "--step", "4"],
        ["resume", place],
        ["evaluate", place],
    ):
        assert main(command) == 2
        assert f"its run.json names code that would be imported: {named}; --trust" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    # The records name another configuration.
    assert main(["verify", place, "--tracking-uri", "none"]) == 1
    assert main(["gc", place]) == 0
    assert main(["report", place]) == 0
    assert main(["compare", place, place]) == 0
    assert main(["bisect", place, "--prompts", "1"]) == (0 if section in ("pipeline", "reward") else 2)
    assert not (tmp_path / "imported").exists()
    capsys.readouterr()
    assert main(["replay", place, "--step", "1", "--trust"]) != 0
    assert f"importing what its run.json names: {named}" in capsys.readouterr().err
    assert (tmp_path / "imported").exists()
    sys.modules.pop("decoy", None)


def test_a_cluster_that_a_run_names_is_used_by_no_command_without_trust(run_copy, capsys):
    named_in(run_copy.folder, "cluster", "address", "127.0.0.1:1")
    for command in (["replay", "--step", "1"], ["export", "exported", "--step", "4"], ["resume"], ["evaluate"]):
        assert main([command[0], str(run_copy.folder), *command[1:]]) == 2
        told = capsys.readouterr().err
        assert "a cluster that would be joined: cluster.address=127.0.0.1:1; --trust" in told
        assert "code" not in told
    # A replay does not join one that an override replaces, but an evaluation may restore the policy there.
    alone, place = ["--set", "cluster.address=null"], str(run_copy.folder)
    assert main(["replay", place, "--step", "3", *alone]) == 0
    assert "joining" not in capsys.readouterr().err
    assert main(["evaluate", place, "--step", "3", *alone]) == 2
    assert "a cluster that would be joined" in capsys.readouterr().err


@pytest.mark.slow
def test_a_training_with_a_step_of_the_working_directory_and_its_children(folder, small, prefect_home, mlflow_store):
    prefect_home(folder.parent / "prefect")
    mlflow_store(folder / "runs")
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
