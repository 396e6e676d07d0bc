"""The tables of the numerics pages are those of the library, and the example computes what the page says."""

import re
from typing import Any

from benchmarks import numerics_tables
from fp8core.numerics.gemm import relative_rms


def test_the_pages_are_up_to_date() -> None:
    parts = numerics_tables.catalogue()
    for page in (page.read_text() for page in numerics_tables.PAGES):
        found = numerics_tables.parts_of(page, parts)
        assert numerics_tables.rewritten(page, found) == page, "run python -m benchmarks.numerics_tables --catalogue"
        parts = {name: text for name, text in parts.items() if name not in found}
    assert not parts


def test_the_example_on_the_page_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", numerics_tables.PAGES[0].read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert relative_rms(names["y"], names["x"] @ names["w"].t()) < 0.06
