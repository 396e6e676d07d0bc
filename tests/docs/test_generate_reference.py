"""Pages with generated parts are up to date: settings, commands, and the table of claims."""

import importlib.util
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parents[2] / "docs"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_settings_and_commands_are_those_of_the_code() -> None:
    for path, text in script("generate_reference").pages().items():
        assert path.read_text() == text, "run python docs/generate_reference.py"


def test_the_table_of_claims_is_that_of_the_stored_rows() -> None:
    charts = script("charts")
    page = charts.PAGE.read_text()
    assert charts.rewritten(page, charts.claims()) == page, "run python docs/charts.py"
