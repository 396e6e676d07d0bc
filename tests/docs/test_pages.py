"""Generated pages are those of the code, and links lead somewhere."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_those_of_the_code() -> None:
    generator = script("generate_reference")
    for path, text in {**generator.pages(), **generator.manifest_schemas()}.items():
        assert path.read_text() == text, "run python docs/generate_reference.py"


def test_the_table_of_claims_is_that_of_the_stored_rows() -> None:
    charts = script("charts")
    page = charts.PAGE.read_text()
    assert charts.rewritten(page, charts.claims()) == page, "run python docs/charts.py"


def test_links_of_pages_lead_somewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "-f", ROOT / "mkdocs.yml", "-d", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
