"""The step, the engine and the check of docs/extending.md work as the page says."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fp8core.config.load import load_config
from fp8core.report.console import Console
from fp8core.store.ledger import LedgerView
from fp8core.store.run_directory import LEDGER
from tasks.loop import train
from tasks.opening import open_directory, open_run, plan_of

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "extending.md").read_text()
FILES = re.compile(r"```(?:python|yaml)\n# (?P<name>[\w.]+)\n(?P<text>.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the page shows."""
    folder = tmp_path_factory.mktemp("extending")
    for shown in FILES.finditer(PAGE):
        (folder / shown["name"]).write_text(shown["text"])
    return folder


def test_the_step_changes_what_the_policy_learns_from(folder, small, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    config = load_config(str(folder / "brief.yaml"), {**small, "steps": 1, "runs": str(folder / "runs")})
    with (
        open_directory(config, "brief") as directory,
        open_run(config, plan_of(config), directory, Console(io.StringIO(), config.steps)) as run,
    ):
        train(run)
        artifacts = LedgerView.read(directory.path / LEDGER).artifacts(1)
        tables = {name: directory.store.get_table(artifacts[name]).to_pylist() for name in ("rewards", "brief")}
        lengths = [len(tokens) for tokens in directory.store.get_table(artifacts["rollouts"])["tokens"].to_pylist()]
        manifest = directory.store.get_json(LedgerView.read(directory.path / LEDGER).step(1).manifest)
    expected = [row["reward"] - 0.02 * length for row, length in zip(tables["rewards"], lengths, strict=True)]
    assert [row["reward"] for row in tables["brief"]] == expected
    assert manifest["record"]["inputs"]["train"]["rewards"]["digest"] == artifacts["brief"].digest


def test_engine_and_trainer_agree(folder):
    done = subprocess.run(
        [sys.executable, "check.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"It prints `{done.stdout.strip()}`" in PAGE


PROTOCOLS = [("rollout/engine.py", "RolloutEngine"), ("training/trainer.py", "Trainer")]


@pytest.mark.parametrize(("file", "protocol"), PROTOCOLS)
def test_every_method_of_a_protocol_is_explained(file, protocol):
    source = (REPOSITORY / "fp8core" / file).read_text().partition(f"class {protocol}(Protocol)")[2]
    for method in re.findall(r"    def (\w+)\(", source):
        shown = f"`{method}`" if f"@property\n    def {method}(" in source else f"`{method}("
        assert shown in PAGE, method
