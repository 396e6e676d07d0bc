"""The prose of README and docs keeps the rules of docs/lint_prose.py, and the rules find what they are for."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def lint() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lint_prose", REPOSITORY / "docs" / "lint_prose.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("length", "word " * 26 + "."),
        ("clause", "Who is done first gets no more."),
        ("verbs", "The trainer asks the engine."),
        ("words", "Leave `--param` away for all 80."),
        ("words", "| a | should meet the same company |"),
        ("words", "It runs every night where the deployments do."),
        ("words", "The packed trainer does not tell its gradients."),
        ("words", "A few layers later every value is another."),
        ("words", "Only x86 cuts off."),
    ],
)
def test_a_fault_is_found(lint: ModuleType, tmp_path: Path, rule: str, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# What is here\n\n{text}\n")
    assert [found.rule for found in lint.check(page, list(lint.RULES))] == [rule]


def test_code_headings_and_links_are_no_prose(lint: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# What it knows\n\n```sh\nWhat asks.\n```\n\nSee [this](who-asks.md), `knows`, 0.5 and 1.5.\n")
    assert not list(lint.check(page, list(lint.RULES)))


def test_docstrings_and_comments_are_prose(lint: ModuleType, tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""It knows.\n"""\n\n# The engine asks.\nx = "asks"\n')
    assert [found.line for found in lint.check(module, ["verbs"])] == [1, 4]


def test_hand_written_pages_stay_short() -> None:
    """Words of README and docs but for parts that scripts write, and the raw rows below docs/results/index.md."""
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    words = 0
    for page in pages:
        if "results" not in page.parts or page.name == "index.md":
            text = re.sub(r"<!-- begin: (\w+) -->.*?<!-- end: \1 -->", "", page.read_text(), flags=re.DOTALL)
            words += sum(re.search(r"\w", word) is not None for word in text.split())
    assert words <= 20_000
