import re
from typing import Any

import pytest

from benchmarks import numerics_tables
from fp8core.numerics.gemm import relative_rms


def test_the_pages_are_up_to_date():
    parts = numerics_tables.catalogue()
    for page in (page.read_text() for page in numerics_tables.PAGES):
        found = numerics_tables.parts_of(page, parts)
        assert numerics_tables.rewritten(page, found) == page, "run python -m benchmarks.numerics_tables --catalogue"
        parts = {name: text for name, text in parts.items() if name not in found}
    assert not parts


def test_the_example_on_the_page_runs():
    (code,) = re.findall(r"```python\n(.*?)```", numerics_tables.PAGES[0].read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert relative_rms(names["y"], names["x"] @ names["w"].t()) < 0.06


def test_bars_inside_cells_do_not_end_them():
    (table,) = numerics_tables.docstring_tables(
        "Text.\n\n| a   | b      |\n|-----|--------|\n| |d| | x | y  |\n\nMore.\n"
    )
    assert table.splitlines() == ["| a | b |", "| --- | --- |", r"| \|d\| | x \| y |"]


@pytest.mark.parametrize("page", ["", "<!-- begin: x -->\n", "<!-- begin: x --><!-- end: x -->" * 2])
def test_missing_or_repeated_markers_are_an_error(page):
    with pytest.raises(ValueError, match="markers of x"):
        numerics_tables.rewritten(page, {"x": "text"})


def test_rewriting_keeps_what_is_outside_the_markers_and_is_stable():
    page = "before\n<!-- begin: x -->old<!-- end: x -->\nafter \\1\n"
    once = numerics_tables.rewritten(page, {"x": r"new \1"})
    assert once == "before\n<!-- begin: x -->\n\nnew \\1\n\n<!-- end: x -->\nafter \\1\n"
    assert numerics_tables.rewritten(once, {"x": r"new \1"}) == once
