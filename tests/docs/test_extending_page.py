"""The engine, the loss, the metric and the step of docs/extending.md work as the page says."""

import ast
import io
import re
import runpy
from pathlib import Path

import pytest
import yaml

from fp8core.config.load import load_config
from fp8core.config.shipped import ENGINES
from fp8core.report.console import Console
from fp8core.run.checks.settings import graph_of
from fp8core.run.commit import stored_metrics
from fp8core.run.loop import train
from fp8core.run.open import open_directory, open_run
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import LedgerView

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "extending.md").read_text()
LOSS = (REPOSITORY / "docs" / "guides" / "losses.md").read_text()
FILES = re.compile(r"```(?:python|yaml)\n# (?P<name>[\w.]+)\n(?P<text>.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the page shows."""
    folder = tmp_path_factory.mktemp("extending")
    for shown in FILES.finditer(PAGE + LOSS):
        (folder / shown["name"]).write_text(shown["text"])
    return folder


def test_the_step_changes_what_the_policy_learns_from(folder, small, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    config = load_config(str(folder / "brief.yaml"), {**small, "steps": 1, "runs": str(folder / "runs")})
    with (
        open_directory(config, "brief") as directory,
        open_run(config, graph_of(config), directory, Console(io.StringIO(), config.steps)) as run,
    ):
        train(run)
        artifacts = LedgerView.read(directory.path / LEDGER).artifacts(1)
        tables = {name: directory.store.get_table(artifacts[name]).to_pylist() for name in ("rewards", "brief")}
        lengths = [len(tokens) for tokens in directory.store.get_table(artifacts["rollouts"])["tokens"].to_pylist()]
        manifest = directory.store.get_json(LedgerView.read(directory.path / LEDGER).step(1).manifest)
    expected = [row["reward"] - 0.02 * length for row, length in zip(tables["rewards"], lengths, strict=True)]
    assert [row["reward"] for row in tables["brief"]] == expected
    assert manifest["record"]["inputs"]["train"]["rewards"]["digest"] == artifacts["brief"].digest


def test_engine_loss_and_metric_are_named_by_a_configuration(folder, small, monkeypatch):
    """One training with all three, since each of them is a setting of its own."""
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    named = {key: yaml.safe_load((folder / key).read_text()) for key in ("timed.yaml", "sharp.yaml")}
    settings = {
        "rollout.engine": named["timed.yaml"]["rollout"]["engine"],
        "loss.policy": named["sharp.yaml"]["loss"]["policy"],
        "loss.options": named["sharp.yaml"]["loss"]["options"],
    }
    config = load_config("silent.yaml", {**small, **settings, "steps": 1, "runs": str(folder / "named")})
    with (
        open_directory(config, "named") as directory,
        open_run(config, graph_of(config), directory, Console(io.StringIO(), config.steps)) as run,
    ):
        train(run)
        ledger = LedgerView.read(directory.path / LEDGER)
        assert "mine/silent_share" in stored_metrics(ledger, directory.store, 1)
        record = directory.store.get_json(ledger.step(1).manifest)["record"]
    assert record["executed"]["loss"].keys() == {"source"}


def test_engine_and_trainer_agree(folder, monkeypatch, capsys):
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    runpy.run_path("check.py", run_name="__main__")
    assert f"It prints `{capsys.readouterr().out.strip()}`" in PAGE


# Libraries, not engines: vLLM's package brings DeepGEMM, and the extra `vllm` a package for the trainer.
OF_LIBRARIES = {"fp8core/kernels/hopper_gemm.py", "fp8core/report/doctor.py"}


def names_an_engine(path: Path) -> bool:
    """True if the code of a module has the name of an engine that is optional: in an import, a setting or a text."""
    names = re.compile(rf"\b({'|'.join(ENGINES.keys() - {'embedded'})})\b")
    tree = ast.parse(path.read_text())
    described = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return any(
        isinstance(part, str) and names.search(part)
        for node in ast.walk(tree)
        if id(node) not in described
        for part in (getattr(node, "value", None), getattr(node, "attr", None), getattr(node, "module", None))
    )


def test_the_page_names_every_module_that_an_engine_of_the_package_touches():
    modules = [path for folder in ("fp8core", "flows", "tasks") for path in (REPOSITORY / folder).rglob("*.py")]
    named = {path.relative_to(REPOSITORY).as_posix() for path in modules if names_an_engine(path)}
    outside = {path for path in named if path.split("/")[:2] != ["fp8core", "rollout"] or path.count("/") == 2}
    sentence = PAGE.partition("An engine of the package")[2].partition("Its name is in no other")[0]
    assert outside - OF_LIBRARIES == set(re.findall(r"`([\w/]+\.py)`", sentence))
    assert outside >= OF_LIBRARIES


PROTOCOLS = [("rollout/engine.py", "RolloutEngine"), ("training/trainer.py", "Trainer")]


@pytest.mark.parametrize(("file", "protocol"), PROTOCOLS)
def test_every_method_of_a_protocol_is_explained(file, protocol):
    text = (REPOSITORY / "fp8core" / file).read_text()
    source = text.partition(f"class {protocol}(Protocol)")[2].partition("\nclass ")[0]
    for method in re.findall(r"    def (\w+)\(", source):
        shown = f"`{method}`" if f"@property\n    def {method}(" in source else f"`{method}("
        assert shown in PAGE, method
