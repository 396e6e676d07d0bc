import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fp8core.numerics.error import relative_rms
from fp8core.rl.presets import PRESETS


@pytest.fixture(scope="session")
def catalogue() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "numerics_catalogue.py"
    spec = importlib.util.spec_from_file_location("numerics_catalogue", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(catalogue):
    page = catalogue.PAGE.read_text()
    assert catalogue.rewritten(page, catalogue.catalogue()) == page, "run python benchmarks/numerics_catalogue.py"


def test_the_example_on_the_page_runs(catalogue):
    (code,) = re.findall(r"```python\n(.*?)```", catalogue.PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert relative_rms(names["y"], names["x"] @ names["w"].t()) < 0.06


def test_every_measured_table_was_written(catalogue):
    page = catalogue.PAGE.read_text()
    for name in ("quantisers", "gemm", "attention", "logprobs"):
        _, _, rest = page.partition(f"<!-- begin: {name} -->")
        assert rest.partition(f"<!-- end: {name} -->")[0].count("\n| ") > 4, name


def test_every_preset_has_its_row_and_every_deviation_its_number(catalogue):
    text = catalogue.preset_tables(PRESETS)
    for name, preset in PRESETS.items():
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
        numbers = row.split(" | ")[-1].removesuffix(" |")
        listed = [] if numbers == "-" else numbers.split(", ")
        assert [f"{number}. {note}" in text for number, note in zip(listed, preset.deviations, strict=True)] == [
            True
        ] * len(listed)


def test_bars_inside_cells_do_not_end_them(catalogue):
    (table,) = catalogue.docstring_tables("Text.\n\n| a   | b      |\n|-----|--------|\n| |d| | x | y  |\n\nMore.\n")
    assert table.splitlines() == ["| a | b |", "| --- | --- |", r"| \|d\| | x \| y |"]


@pytest.mark.parametrize("page", ["", "<!-- begin: x -->\n", "<!-- begin: x --><!-- end: x -->" * 2])
def test_missing_or_repeated_markers_are_an_error(catalogue, page):
    with pytest.raises(ValueError, match="markers of x"):
        catalogue.rewritten(page, {"x": "text"})


def test_rewriting_keeps_what_is_outside_the_markers_and_is_stable(catalogue):
    page = "before\n<!-- begin: x -->old<!-- end: x -->\nafter \\1\n"
    once = catalogue.rewritten(page, {"x": r"new \1"})
    assert once == "before\n<!-- begin: x -->\n\nnew \\1\n\n<!-- end: x -->\nafter \\1\n"
    assert catalogue.rewritten(once, {"x": r"new \1"}) == once
