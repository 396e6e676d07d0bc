"""Files in the working directory that have the names of libraries are never imported in their place.

Nor is code that a run's own configuration names, but for a run that the user trusts.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flows.cli import main
from flows.tracking.record import read_record
from fp8core.errors import StoredFileError

REPOSITORY = Path(__file__).parents[2]
NAMES = ["rich", "torch", "json", "pickle", "socket", "numpy", "pyarrow", "pydantic", "prefect", "mlflow", "uvicorn"]
# What a console script is: its own folder comes first on the path, the working directory is not on it.
PROGRAM = "import sys\nfrom flows.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with files that say when they are imported."""
    place = tmp_path / "work"
    place.mkdir()
    for name in NAMES:
        told = f"open({str(tmp_path / 'imported')!r}, 'a').write('{name}\\n')\n"
        (place / f"{name}.py").write_text(f"{told}raise ImportError('the {name} of the working directory')\n")
    return place


def test_a_run_that_is_the_working_directory(folder, run_copy):
    place = Path(shutil.move(run_copy.folder, folder / "run"))
    for name in NAMES:
        shutil.copy(folder / "rich.py", place / f"{name}.py")
    program = folder.parent / "bin" / "fp8-grpo"
    program.parent.mkdir()
    program.write_text(PROGRAM)
    dropped = ("PYTHONSAFEPATH", "PREFECT_API_URL", "MLFLOW_TRACKING_URI")
    inherited = {key: value for key, value in os.environ.items() if key not in dropped}
    environment = {**inherited, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(program), "verify", "."]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (folder.parent / "imported").exists()


def named_in(run_folder: Path, section: str, key: str, path: str | list[str]) -> None:
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
        assert f"its run.json names code to run or servers to ask: {named}; --trust" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    # The records name another configuration.
    assert main(["verify", place]) == 1
    assert main(["gc", place]) == 0
    assert main(["report", place]) == 0
    assert main(["compare", place, place]) == 0
    assert not (tmp_path / "imported").exists()
    capsys.readouterr()
    assert main(["replay", place, "--step", "1", "--trust"]) != 0
    assert f"uses code or servers that its run.json names: {named}" in capsys.readouterr().err
    assert (tmp_path / "imported").exists()
    sys.modules.pop("decoy", None)


def test_a_tracker_that_a_run_names_is_opened_by_no_command_without_trust(run_copy, capsys):
    named_in(run_copy.folder, "tracking", "services", ["decoy:made"])
    assert main(["resume", str(run_copy.folder)]) == 2
    assert "servers to ask: tracking.services.0=decoy:made; --trust" in capsys.readouterr().err


def test_a_cluster_that_a_run_names_is_used_by_no_command_without_trust(run_copy, capsys):
    named_in(run_copy.folder, "cluster", "address", "127.0.0.1:1")
    for command in (["replay", "--step", "1"], ["export", "exported", "--step", "4"], ["resume"], ["evaluate"]):
        assert main([command[0], str(run_copy.folder), *command[1:]]) == 2
        assert "names code to run or servers to ask: cluster.address=127.0.0.1:1; --trust" in capsys.readouterr().err


def test_a_run_id_that_is_a_path_is_refused(run_copy):
    """W&B's files of a run are found, and removed, by its id."""
    record = {"services": {"wandb": {"uri": "https://api.wandb.ai", "run_id": "x/../../mine"}}}
    (run_copy.folder / "tracking.json").write_text(json.dumps(record))
    with pytest.raises(StoredFileError, match="String should match pattern"):
        read_record(run_copy.folder)
