"""Imports go one way (docs/concepts/iteration.md): flows, tasks, fp8core, fp8core.numerics."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def imported(file: Path) -> set[str]:
    """Modules that a file imports anywhere, also within functions."""
    nodes = [*ast.walk(ast.parse(file.read_text("utf-8")))]
    direct = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return direct | {node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)}


@pytest.mark.parametrize(
    ("package", "forbidden", "own"),
    [
        ("tasks", {"flows", "prefect", "mlflow"}, "tasks"),
        ("fp8core", {"flows", "tasks", "prefect", "mlflow"}, "fp8core"),
        ("fp8core/numerics", {"flows", "tasks", "prefect", "mlflow", "fp8core"}, "fp8core.numerics"),
    ],
)
def test_imports_go_one_way(package: str, forbidden: set[str], own: str) -> None:
    files = [*(ROOT / package).rglob("*.py")]
    assert files
    names = {file: {name for name in imported(file) if not f"{name}.".startswith(f"{own}.")} for file in files}
    assert [(file, name) for file in files for name in names[file] if name.split(".")[0] in forbidden] == []


def test_no_step_imports_another() -> None:
    """What several steps compute is of fp8core; `tasks.step` alone, which declares them, is for all."""
    names = {
        file: {name for name in imported(file) if name.split(".")[0] == "tasks"} for file in ROOT.glob("tasks/*.py")
    }
    assert any(names.values())
    assert {file: found for file, found in names.items() if found - {"tasks.step"}} == {}


def test_no_flow_imports_a_step() -> None:
    files = [*(ROOT / "flows").rglob("*.py")]
    assert files
    assert [(file, name) for file in files for name in imported(file) if name.split(".")[0] == "tasks"] == []
