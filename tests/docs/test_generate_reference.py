"""The generated pages and schemas are up to date: settings, commands, manifests, measured steps, table of claims."""

import argparse
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
from pydantic import BaseModel

from fp8core.store.manifest import StepManifest

DOCS = Path(__file__).parents[2] / "docs"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return script("generate_reference")


def test_the_pages_are_those_of_the_code(generator) -> None:
    for path, text in generator.pages().items():
        assert path.read_text() == text, "run python docs/generate_reference.py"


def test_the_page_of_commands_lists_allowed_values(generator) -> None:
    parser = argparse.ArgumentParser()
    command = parser.add_subparsers().add_parser("paint")
    command.add_argument("--colour", choices=("red", "blue"), help="of the wall")
    assert "| `--colour COLOUR` |  | of the wall; one of `red`, `blue` |" in generator.cli_tables(parser)


def test_the_measured_steps_of_plans_are_those_of_the_stored_rows(generator) -> None:
    for path, text in generator.measured_steps().items():
        assert path.read_text() == text, "run python docs/generate_reference.py"


def test_the_schemas_of_manifests_are_those_of_the_code(generator) -> None:
    for path, text in generator.manifest_schemas().items():
        assert path.read_text() == text, "raise the version of the schema, then run python docs/generate_reference.py"


def test_the_schema_file_of_the_manifest_carries_its_version(generator) -> None:
    version = StepManifest.model_fields["schema_version"].default
    schema = json.loads((DOCS / "schemas" / f"manifest-{version}.json").read_text())
    assert schema["properties"]["schema_version"]["const"] == version


def test_every_setting_has_a_meaning_and_every_type_a_table() -> None:
    page = (DOCS / "reference" / "config.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert [row for row in rows if row.endswith("|  |")] == []
    types = {name for row in rows for name in re.findall(r"`([A-Z][A-Za-z]+)`", row.split("|")[2])}
    assert types >= {"FilterConfig", "Limit"}
    assert {name for name in types if f"## Values: `{name}`" not in page} == set()


def test_a_field_without_a_meaning_is_refused(generator) -> None:
    class Silent(BaseModel):
        field: int

    with pytest.raises(ValueError, match=r"^Silent\.field has no description$"):
        generator.table(Silent)


@pytest.mark.parametrize("page", ["", "<!-- begin: x -->\n", "<!-- begin: x --><!-- end: x -->" * 2])
def test_missing_or_repeated_markers_are_an_error(generator, page: str) -> None:
    with pytest.raises(ValueError, match="markers of x"):
        generator.rewritten(page, {"x": "text"})


def test_the_table_of_claims_is_that_of_the_stored_rows() -> None:
    charts = script("charts")
    page = charts.PAGE.read_text()
    assert charts.rewritten(page, charts.claims()) == page, "run python docs/charts.py"
