"""docs/reference/manifest.md and the schema files say what the models say."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from pydantic import BaseModel

from fp8core.store.manifest import StepManifest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_manifest", DOCS / "generate_manifest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(generator):
    page = generator.PAGE.read_text()
    assert generator.rewritten(page, generator.tables()) == page, "run python docs/generate_manifest.py"


def test_the_schemas_are_up_to_date(generator):
    for path, text in generator.schemas().items():
        assert path.read_text() == text, "raise the version of the schema, then run python docs/generate_manifest.py"


def test_the_schema_file_of_the_manifest_carries_its_version(generator):
    version = StepManifest.model_fields["schema_version"].default
    schema = json.loads((DOCS / "schemas" / f"manifest-{version}.json").read_text())
    assert schema["properties"]["schema_version"]["const"] == version


def test_a_field_without_a_meaning_is_refused(generator):
    class Silent(BaseModel):
        field: int

    with pytest.raises(ValueError, match=r"^Silent\.field has no description$"):
        generator.table(Silent)


@pytest.mark.parametrize("page", ["", "<!-- begin: x -->\n", "<!-- begin: x --><!-- end: x -->" * 2])
def test_missing_or_repeated_markers_are_an_error(generator, page):
    with pytest.raises(ValueError, match="markers of x"):
        generator.rewritten(page, {"x": "text"})
