"""Imports go one way (docs/concepts/iteration.md): flows, tasks, fp8core, fp8core.numerics."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Each imports only what stands before it.
PARTS = (
    *("errors", "metric", "progress", "user_files", "user_code", "durable", "freed_memory", "processes", "numerics"),
    *("config", "rl", "models", "resources", "kernels", "rewards", "environments", "store", "rollout", "training"),
    *("metrics", "alignment", "cluster", "data", "evaluation", "plan", "report", "parity", "run"),
)


def imported(file: Path) -> set[str]:
    """Modules that a file imports anywhere, also within functions."""
    nodes = [*ast.walk(ast.parse(file.read_text("utf-8")))]
    direct = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return direct | {node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)}


def imported_parts(file: Path) -> set[str]:
    """Packages and single modules right below fp8core that a file imports anywhere, also within functions."""
    names = imported(file) - {"fp8core"}
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "fp8core":
            names |= {f"fp8core.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("fp8core.")}


@pytest.mark.parametrize(
    ("package", "forbidden", "own"),
    [
        ("flows", {"fp8_grpo"}, "flows"),
        ("tasks", {"fp8_grpo", "flows", "prefect", "mlflow"}, "tasks"),
        ("fp8core", {"fp8_grpo", "flows", "tasks", "prefect", "mlflow"}, "fp8core"),
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


def test_parts_of_the_library_import_only_those_before_them() -> None:
    files = {
        file: file.relative_to(ROOT / "fp8core").parts[0].removesuffix(".py") for file in ROOT.glob("fp8core/**/*.py")
    }
    assert {*files.values()} - {"__init__"} == {*PARTS}
    place = {part: number for number, part in enumerate(PARTS)}
    found = [
        (file, name, place[name] > place[part])
        for file, part in files.items()
        if part in place
        for name in imported_parts(file)
    ]
    assert len(found) > len(PARTS)
    assert [(file, name) for file, name, later in found if later] == []
