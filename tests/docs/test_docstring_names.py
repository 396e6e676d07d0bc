"""Docstrings name parts of our modules, as `module.name`, that are there."""

import ast
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FILES = [file for folder in ("flows", "tasks", "fp8core") for file in sorted((REPOSITORY / folder).rglob("*.py"))]
DOTTED = re.compile(r"`([a-z_]\w*(?:\.\w+)+)`")
FILE_NAMES = (".py", ".json", ".jsonl", ".cuh")
# Instructions of PTX, a path in JSON, and libraries that not every environment has.
ELSEWHERE = ("cvt.", "div.", "megatron.core.", "outputs.", "sglang.", "transformer.", "vllm.EngineArgs")


@cache
def identifiers(file: Path) -> set[str]:
    nodes = ast.walk(ast.parse(file.read_text()))
    named = (getattr(node, part, None) for node in nodes for part in ("id", "name", "arg", "attr", "value"))
    return {name for name in named if isinstance(name, str)}


def files_of(dotted: str) -> list[Path]:
    """Our modules and packages whose dotted names end in this."""
    path = dotted.replace(".", "/")
    return [file for file in FILES if str(file).endswith((f"/{path}.py", f"/{path}/__init__.py"))]


def is_there(dotted: str, file: Path, settings: set[str]) -> bool:
    """True of a module, a name in one, a setting, and an attribute of what the file itself names."""
    first, *rest = dotted.split(".")
    heads = [".".join([first, *rest[:count]]) for count in range(len(rest))]
    named = any(rest[count] in identifiers(found) for count, head in enumerate(heads) for found in files_of(head))
    if named or files_of(dotted) or dotted in settings:
        return True
    return first in identifiers(file) or (not files_of(first) and find_spec(first) is not None)


def test_names_in_docstrings_are_there() -> None:
    page = (REPOSITORY / "docs" / "reference" / "config.md").read_text()
    sections = [part.partition("`") for part in page.split("\n## `")[1:]]
    rows = re.compile(r"^\| `(\w+)`", re.MULTILINE)
    settings = {f"{name}.{key}" for name, _, table in sections for key in rows.findall(table)}
    settings |= {"pipeline.reach", *(name for name, _, _ in sections)}
    missing = {
        f"{file.relative_to(REPOSITORY)}: {dotted}"
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for dotted in DOTTED.findall(ast.get_docstring(node) or "")
        if not dotted.startswith(ELSEWHERE) and not dotted.endswith(FILE_NAMES) and not is_there(dotted, file, settings)
    }
    assert missing == set()
